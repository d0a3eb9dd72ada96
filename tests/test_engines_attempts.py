"""However small the pieces in which a unit is done, its bytes are the same; a record that kills workers is named or set aside."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import unit
from mdsmix.engines.tasks import (
    ALONE,
    MOST_DEATHS,
    Attempt,
    End,
    InWork,
    after_death,
    pieces,
)
from mdsmix.errors import MdsmixError
from mdsmix.kinds.pretraining import Pretraining
from tests.converting import (
    chats,
    documents,
    mdsmix,
    pairs,
    quarantined,
    run_recipe,
    write_jsonl,
    write_recipe,
)

pytestmark = pytest.mark.usefixtures("processes")

DEADLY = "this one kills"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("halvings", [0, 1, 3, 30])
def test_pieces_are_all_records_in_order_once(count: int, halvings: int) -> None:
    without = {n for n in (0, 3, 4, 6, 999) if n < count}
    found = list(pieces(count, halvings, without))
    assert max(map(len, pieces(count, halvings, set())), default=0) == min(
        count, max(1, count >> halvings)
    )
    assert [n for piece in found for n in piece] == [n for n in range(count) if n not in without]
    assert all(1 <= len(piece) <= max(1, count >> halvings) for piece in found)


DIED, HUNG = End(how="signal SIGKILL"), End(how="no sign of life for 300 s", hung=True)


def test_a_record_is_blamed_when_it_kills_alone_and_twice() -> None:
    at = InWork(file="a.jsonl", ordinal=7, shown="byte 7", length=3, records=1)
    once = after_death(Attempt(deaths=1, halvings=4), at, DIED, False, "a")
    assert (once.deaths, once.halvings, once.died_at) == (2, ALONE, at)
    elsewhere = InWork(file="a.jsonl", ordinal=8, shown="byte 8", length=3, records=1)
    assert after_death(once, elsewhere, DIED, False, "a").died_at == elsewhere
    with pytest.raises(MdsmixError, match=r"byte 7 of a\.jsonl \(3 bytes\)"):
        after_death(once, at, DIED, False, "a")
    aside = after_death(once, at, DIED, True, "a")
    assert aside == Attempt(deaths=1, halvings=ALONE, skipped=frozenset({("a.jsonl", 7)}))


def test_several_records_are_not_blamed_however_often_they_kill() -> None:
    at = InWork(file="a.jsonl", ordinal=7, shown="byte 7", length=3, records=2)
    attempt = Attempt(deaths=1, died_at=at)
    for deaths in range(2, MOST_DEATHS + 1):
        attempt = after_death(attempt, at, DIED, True, "a")
        assert (attempt.deaths, attempt.skipped) == (deaths, frozenset())
    with pytest.raises(MdsmixError, match=r"die .* over the work unit of a, "):
        after_death(attempt, at, DIED, True, "of a")


def test_after_a_hang_records_are_done_alone_and_other_records_that_are_set_aside_stay_so() -> None:
    """A hang takes minutes to notice: halving down to one record would take hours."""
    many = InWork(file="a.jsonl", ordinal=0, shown="byte 0", length=3, records=4000, size=1 << 23)
    once = after_death(Attempt(skipped=frozenset({("a.jsonl", 1)})), many, HUNG, True, "a")
    assert (len(list(pieces(4000, once.halvings, set()))), once.died_at) == (4000, many)
    one = InWork(file="a.jsonl", ordinal=7, shown="byte 7", length=3, records=1)
    twice = after_death(once, one, HUNG, True, "a")
    with pytest.raises(
        MdsmixError,
        match=r"hang \(no sign of life for 300 s\) over the work unit a, the record at byte 7 of a",
    ):
        after_death(twice, one, HUNG, False, "a")
    aside = after_death(twice, one, HUNG, True, "a")
    assert aside.skipped == {("a.jsonl", 1), ("a.jsonl", 7)}
    assert len(list(pieces(4000, aside.halvings, set()))) == 4000


def test_what_hangs_outside_of_records_is_tried_once_more() -> None:
    once = after_death(Attempt(), None, HUNG, True, "of a.jsonl")
    with pytest.raises(
        MdsmixError, match=r"hang .* over the work unit of a\.jsonl, while no record was in work"
    ):
        after_death(once, None, HUNG, True, "of a.jsonl")


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    text = "some words of the record number"
    streams: dict[str, Any] = {}
    write_jsonl(tmp_path / "web.jsonl", [{"text": f"{text} {n}"} for n in range(300)])
    write_jsonl(tmp_path / "faq.jsonl", [{"prompt": text, "response": f"{n}"} for n in range(300)])
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "one"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns * (1 + n % 3)} for n in range(300)])
    streams = {
        "web": documents(tmp_path / "web.jsonl"),
        "faq": pairs(tmp_path / "faq.jsonl"),
        "chat": chats(tmp_path / "chat.jsonl"),
    }
    return write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)


def test_batches_of_any_size_give_the_same_bytes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest too, with what it counts."""
    run_recipe(recipe)

    def small(count: int, halvings: int, without: set[int]) -> Any:
        return pieces(count, halvings + 5, without)

    monkeypatch.setattr(unit, "pieces", small)
    run_recipe(recipe, f"local={tmp_path / 'small'}")
    for stream in ("web", "faq", "chat"):
        whole = files_of(tmp_path / "out" / stream / "train")
        assert len(whole) >= 3
        assert files_of(tmp_path / "small" / stream / "train") == whole


@pytest.fixture
def deadly(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of one unit; the 41st record of the first kills the process that encodes it, that of the second stands at the
    same byte."""
    encode = Pretraining.encode

    def dying(self: Pretraining, records: list[Any]) -> Any:
        if any(record.text == DEADLY for record in records):
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, records)

    monkeypatch.setattr(Pretraining, "encode", dying)
    texts = [f"text number {n:04}" for n in range(100)]
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in texts])
    texts[40] = DEADLY
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    return write_recipe(
        tmp_path, tokenizer_folder, streams={"web": documents(tmp_path / "*.jsonl")}
    )


def test_a_record_that_kills_workers_is_set_aside(
    deadly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = mdsmix("convert", deadly, "--quarantine-crashes")
    assert answer.code == 0
    assert "quarantined: 1 crashed_worker" in answer.out
    published = tmp_path / "out" / "web" / "train"
    (bad,) = quarantined(published)
    assert (bad["file"], bad["line"], bad["reason"]) == ("a.jsonl", 41, "crashed_worker")
    assert DEADLY in bad["raw"]
    assert "up to date" in mdsmix("convert", deadly).out
    monkeypatch.undo()
