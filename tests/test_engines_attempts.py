"""However small the pieces in which a unit is done, its bytes are the same; a record that kills workers is named or set aside."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import unit
from mdsmix.engines import hang
from mdsmix.engines.tasks import ALONE, MOST_DEATHS, Attempt, End, after_death, pieces
from mdsmix.errors import MdsmixError
from mdsmix.kinds.pretraining import Pretraining
from tests.alarm import at_most
from tests.converting import (
    chats,
    documents,
    files,
    mdsmix,
    pairs,
    quarantined,
    run_recipe,
    write_jsonl,
    write_recipe,
)
from tests.tasks import place

DIED, HUNG = End(how="signal SIGKILL"), End(how="no sign of life for 300 s", hung=True)


def test_pieces_are_all_records_in_order_once() -> None:
    for count in (0, 1, 2, 7, 64, 1000):
        for halvings in (0, 1, 3, 30):
            without = {n for n in (0, 3, 4, 6, 999) if n < count}
            found, most = list(pieces(count, halvings, without)), max(1, count >> halvings)
            assert [n for piece in found for n in piece] == sorted({*range(count)} - without)
            assert all(1 <= len(piece) <= most for piece in found)
            whole = [len(piece) for piece in pieces(count, halvings, set())]
            assert max(whole, default=0) == min(count, most)


def refused(attempt: Attempt, at: Any, end: End, set_aside: bool = False) -> str:
    with pytest.raises(MdsmixError) as caught:
        after_death(attempt, at, end, set_aside, "of a.jsonl")
    return str(caught.value)


def test_a_record_is_blamed_when_it_kills_or_hangs_alone_and_twice() -> None:
    for end, verb in ((DIED, "die"), (HUNG, "hang")):
        at, skipped = place(7), frozenset({("a", 1)})
        once = after_death(Attempt(deaths=1, halvings=4, skipped=skipped), at, end, False, "a")
        assert (once.deaths, once.halvings, once.died_at) == (2, ALONE, at)
        assert after_death(once, place(8), end, False, "a").died_at == place(8)
        said = (
            f"{verb} ({end.how}) over the work unit of a.jsonl, the record at byte 7 of a (9 bytes)"
        )
        assert said in refused(once, at, end)
        assert "--quarantine-crashes" in refused(once, at, end)
        aside = after_death(once, at, end, True, "a")
        assert aside == Attempt(deaths=1, halvings=ALONE, skipped=skipped | {("a", 7)})


def test_several_records_are_not_blamed_however_often_they_kill() -> None:
    at = place(7, records=2)
    words = "die (signal SIGKILL) over the work unit of a.jsonl, the 2 records from byte 7 of a on"
    attempt = after_death(Attempt(), at, DIED, True, "a")
    assert attempt == Attempt(deaths=1, halvings=4, died_at=at)
    for deaths in range(2, MOST_DEATHS + 1):
        attempt = after_death(attempt, at, DIED, True, "a")
        assert (attempt.deaths, attempt.halvings, attempt.skipped) == (deaths, ALONE, frozenset())
    assert words in refused(attempt, at, DIED, True)


def test_after_a_hang_records_are_done_alone_and_outside_of_records_little_is_tried_again() -> None:
    """A hang takes minutes to notice: halving down to one record would take hours."""
    once = after_death(Attempt(), place(0, 4000), HUNG, True, "a")
    assert (once.halvings, once.died_at) == (ALONE, place(0, 4000))
    for end, times in ((HUNG, 1), (DIED, 3)):
        attempt = Attempt()
        for _ in range(times):
            attempt = after_death(attempt, None, end, True, "a")
        said = refused(attempt, None, end, True)
        assert "over the work unit of a.jsonl, while no record was in work" in said


def test_batches_of_any_size_give_the_same_bytes(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest too, with what it counts."""
    text = "some words of the record number"
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "one"}]
    records: dict[str, tuple[Any, Sequence[dict[str, Any]]]] = {
        "web": (documents, [{"text": f"{text} {n}"} for n in range(100)]),
        "faq": (pairs, [{"prompt": text, "response": f"{n}"} for n in range(100)]),
        "chat": (chats, [{"messages": turns * (1 + n % 3)} for n in range(100)]),
    }
    streams = {
        name: stream(write_jsonl(tmp_path / f"{name}.jsonl", found))
        for name, (stream, found) in records.items()
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)
    run_recipe(recipe)
    monkeypatch.setattr(unit, "pieces", lambda count, n, without: pieces(count, n + 5, without))
    run_recipe(recipe, f"local={tmp_path / 'small'}")
    assert files(tmp_path / "small") == files(tmp_path / "out")


def test_records_that_kill_or_hang_workers_are_named_and_set_aside(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one unit; the 41st record of the first kills the process that encodes it, that of the second stands at the same
    byte, and the 8th of the second waits for ever."""
    encode = Pretraining.encode

    def failing(self: Pretraining, records: list[Any]) -> Any:
        texts = {record.text for record in records}
        if "this one kills  " in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        if "this one hangs  " in texts:
            os.read(os.pipe()[0], 1)
        return encode(self, records)

    monkeypatch.setattr(Pretraining, "encode", failing)
    monkeypatch.setattr(hang, "SILENT_SECONDS", 0.6)
    monkeypatch.setattr(hang, "LOOK_SECONDS", 0.05)
    for name, line, text in (("a", 40, "this one kills  "), ("b", 7, "this one hangs  ")):
        texts = [f"text number {n:04}" for n in range(100)]
        texts[line] = text
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
    streams = {"web": documents(tmp_path / "*.jsonl")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    with at_most(120):
        answer = mdsmix("convert", recipe, "--quarantine-crashes")
    assert answer.code == 0
    assert "quarantined: 2 crashed_worker" in answer.out
    said = [line for line in answer.err.splitlines() if "hung" in line]
    assert said[0].startswith("web: a worker process hung (")
    assert "over the work unit of a.jsonl and 1 files more, the record" in said[0]
    found = quarantined(tmp_path / "out" / "web" / "train")
    places = [(bad["file"], bad["line"], bad["reason"], bad["raw"][9:25]) for bad in found]
    assert places == [
        ("a.jsonl", 41, "crashed_worker", "this one kills  "),
        ("b.jsonl", 8, "crashed_worker", "this one hangs  "),
    ]
    assert "up to date" in mdsmix("convert", recipe).out
