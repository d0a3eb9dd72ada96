"""Memory is a cap: sizes are read as they are written, the least limit counts, and a run stays below what it was given."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from mdsmix.engines import memory
from mdsmix.engines.local_engine import LocalEngine
from mdsmix.engines.memory import MemoryBudget, bytes_of
from mdsmix.engines.tasks import Attempt, Reporter
from mdsmix.errors import RecipeError
from tests.converting import documents, mdsmix, write_jsonl, write_recipe
from tests.processes import watched
from tests.tasks import call, settings, silent

pytestmark = pytest.mark.usefixtures("processes")

GIB = 1 << 30


SIZES = {"2GiB": 2 * GIB, "2G": 2 * GIB, "2gb": 2_000_000_000, "1.5 GiB": 3 * GIB // 2, "256MiB": 256 << 20, "300000 k": 300_000 << 10, "1TB": 10**12, "2147483648": 2 * GIB}  # fmt: skip


def test_sizes_are_what_they_say_and_what_is_none_or_too_little_is_one_sentence() -> None:
    assert {text: bytes_of(text) for text in SIZES} == SIZES
    for sentence, texts in (
        ("is no size: write for example 2GiB", ("", "much", "-2GiB", "2XB", "GiB", "2GiB of it", "9" * 400)),
        ("at least 256MiB", ("0", "12", "100MiB")),
    ):  # fmt: skip
        for text in texts:
            with pytest.raises(RecipeError, match=sentence):
                bytes_of(text)


def test_a_process_that_is_no_worker_has_its_room_before_it_is_there_and_counts_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = MemoryBudget(3 * GIB, aside=GIB)
    alone = MemoryBudget(3 * GIB)
    assert alone.share(1) - budget.share(1) == GIB
    assert (alone.allowed_workers(3), budget.allowed_workers(3)) == (3, 1), "before any has worked"
    for each in (alone, budget):
        each.on_finished_unit([], False)
    assert alone.allowed_workers(64) - budget.allowed_workers(64) in (3, 4), "of 320 MiB each"
    monkeypatch.setattr(memory, "processes", lambda: [os.getpid()])  # any that is there
    seeing = MemoryBudget(3 * GIB)
    seeing.on_finished_unit([], False)
    assert seeing.peak > 1.9 * memory.held(os.getpid())
    assert 0 < seeing.aside < seeing.peak


def test_a_system_that_tells_nothing_is_told_of(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS, and sandboxes without smaps_rollup: the cap is not kept there, and nobody believes that it is."""
    assert memory.is_told()
    monkeypatch.setattr(memory, "_field", lambda path, name: 0)
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"a text, number {n}"} for n in range(9)])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    answer = mdsmix("convert", write_recipe(tmp_path, tokenizer_folder, streams=streams))
    assert answer.code == 0
    assert "--memory is not enforced" in answer.err
    assert "peak memory" not in answer.out


def test_the_first_worker_shows_what_it_takes_where_the_cap_is_tight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "resident", lambda pid: 100 << 20)
    budget = MemoryBudget(2 * GIB)
    assert budget.allowed_workers(4) == 1
    budget.on_finished_unit([], False)
    assert budget.allowed_workers(4) == 4
    assert MemoryBudget(4 * GIB).allowed_workers(4) == 4
    tight = MemoryBudget(512 << 20)
    tight.on_finished_unit([], False)
    assert tight.allowed_workers(8) == 1, "never none"


def test_no_more_workers_go_on_than_fit_if_each_took_what_the_greediest_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {os.getpid(): 100, 1: 150, 2: 700}
    for name in ("resident", "most_own", "held"):
        monkeypatch.setattr(memory, name, lambda pid: sizes[pid])
    budget = MemoryBudget(int(1400 / memory.HEADROOM), _worst=300)
    assert budget.allowed_workers(4) == 1
    budget.on_finished_unit([1], False)
    assert budget.allowed_workers(3) == 3
    assert budget.allowed_workers(8) == 4
    budget._next = 0
    budget.look([1, 2])
    assert budget.allowed_workers(8) == 1
    assert budget.peak == 950
    sizes[1] = 900
    budget.look([1, 2])
    assert budget.peak == 950, "not looked at again yet"
    budget.on_finished_unit([1, 2], True)
    assert budget.peak == 1700, "but before a worn worker ends"
    sizes[1], sizes[2] = 150, 300
    budget.look([1, 2], at_once=True)
    assert budget.allowed_workers(8) == 1, "one has taken 900"


def test_large_documents_stay_within_a_small_cap(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Seven documents of 20 MB in four units, the peak of the whole tree measured from outside. Uncapped it would take more."""
    words = " ".join(f"word{n} and {n * n} of them\n" for n in range(600_000))
    line = orjson.dumps({"text": words[: 20 << 20]}) + b"\n"
    with (tmp_path / "large.jsonl").open("wb") as file:
        file.writelines([line] * 7)
    recipe = write_recipe(
        tmp_path,
        tokenizer_folder,
        max_seq_len=2048,
        streams={"web": documents(tmp_path / "large.jsonl")},
    )
    settings = ("--memory", "1GiB", "--workers", 2)
    printed, peak = watched("convert", recipe, *settings, seconds=300, window=2 * len(line))
    assert "peak memory: " in printed
    assert (1 << 28) < peak < GIB


def test_where_more_than_the_cap_was_held_a_cap_that_would_hold_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And again only where even that was not enough."""
    said, held = list[str](), [200_000_000, 300_000_000, 310_000_000, 900_000_000]
    monkeypatch.setattr(MemoryBudget, "look", lambda budget, *_, **more: None)
    with closing(LocalEngine(replace(settings(1), memory=256 << 20))) as engine:
        for _ in engine.run([call(stay, None)] * 5, silent, said.append):
            engine.budget.peak = held.pop(0) if held else 0
    warning, again = said
    found = re.search(r"pass --memory (\d+MiB), or split the largest records$", warning)
    assert found
    assert 300_000_000 < bytes_of(found[1]) < 360_000_000
    assert "900 MB of memory were held" in again


def stay(until: Path | None, attempt: Attempt, reporter: Reporter) -> int:
    """Returns who did it."""
    while until and not until.exists():
        time.sleep(0.01)
    return os.getpid()


def test_what_a_worker_that_waits_holds_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is done, and waits for the next stream, while the second is at work. The second stays until a look was taken:
    the looks are further apart the slower the machine is."""
    looked: list[set[int]] = []
    seen, waiting = tmp_path / "seen", set[int]()

    def look(budget: MemoryBudget, pids: Sequence[int], at_once: bool = False) -> None:
        if waiting:
            looked.append(set(pids))
            seen.touch()

    monkeypatch.setattr(MemoryBudget, "look", look)
    with closing(LocalEngine(settings(2))) as engine:
        done = engine.run([call(stay, None), call(stay, seen)], silent, print)
        waiting.add(next(done)[1])
        at_work = next(done)[1]
    assert looked[0] == {*waiting, at_work}
