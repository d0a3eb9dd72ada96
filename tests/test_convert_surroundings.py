"""Full and read-only disks, clocks that jump, files that change while they are read: a sentence, or the right bytes."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mdsmix.convert import unit
from mdsmix.convert.garbage import KEEP_SECONDS, find_garbage
from mdsmix.errors import Unreachable
from mdsmix.storage import locate
from tests.converting import (
    Answer,
    documents,
    files,
    mdsmix,
    run_recipe,
    times,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.e2e.test_killed import assert_readable
from tests.small_disk import SmallDisk, in_a_process

HASH = re.compile("[0-9a-f]{32,}")
RECORDS = [{"text": f"Document {n}: " + "the quick brown fox " * (n % 7)} for n in range(60)]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Units of 600 bytes: a plain file, and a compressed one that is one unit of many windows."""
    windows(monkeypatch, 600)
    plain = write_jsonl(tmp_path / "data" / "a.jsonl", RECORDS)
    (tmp_path / "data" / "b.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()[900:]))
    streams = {"web": documents(tmp_path / "data" / "*")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


@pytest.fixture
def whole(recipe: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run publishes."""
    run_recipe(recipe, f"local={tmp_path / 'whole'}")
    return files(tmp_path / "whole")


def refused(answer: Answer, sentence: str) -> None:
    (line,) = answer.err.splitlines()
    assert (answer.code, answer.out) == (4, "")
    assert line.startswith("error: ")
    assert sentence in line


@pytest.mark.parametrize("mounted", [True, False])
def test_a_disk_that_is_full_at_any_moment(
    recipe: Path, whole: dict[str, bytes], tmp_path: Path, mounted: bool
) -> None:
    """One sentence, nothing half; with room again the same command finishes with the same bytes."""
    # One file of each kind, named after what it is and not by its hash; the tokenizer is the largest, and comes first.
    kinds = {HASH.sub("", name): len(content) for name, content in whole.items()}
    sizes = {size for name, size in kinds.items() if not name.startswith("tokenizer-")}
    limits = [*(size - 1 for size in sorted(sizes)), 1 << 20]
    first = sum(len(content) for name, content in whole.items() if name.startswith("tokenizer-"))

    def fill() -> None:
        refusals = 0
        for number in count(1):
            out = tmp_path / f"{number}"
            if not mounted:
                (ready,) = (tmp_path / "whole").glob("tokenizer-*")
                shutil.copytree(ready, out / ready.name)
            room = first - 32_000 + 16_000 * number if mounted else limits[number - 1]
            disk = SmallDisk(out, room, mounted=mounted)
            command = ("convert", recipe, f"local={out}", "--workers", number % 2 + 1)
            answer = mdsmix(*command)
            left = [name for name in files(out) if name.endswith((".tmp", "lease"))]
            assert left == []
            if answer.code:
                refusals += 1
                refused(answer, disk.refusal)
                if (out / "web" / "train" / "index.json").exists():
                    assert_readable(locate(out / "web" / "train"))
            disk.grow()
            if answer.code:
                again = mdsmix(*command)
                assert (again.code, again.err) == (0, ""), "no lease is waited for"
            assert files(out) == whole
            if not answer.code:
                break
        assert refusals > 3

    in_a_process(fill, tmp_path / "report")


def test_an_output_that_is_read_only(recipe: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """What is up to date is read as ever; what is to be written is refused."""

    def publish_and_refuse() -> None:
        disk = SmallDisk(tmp_path / "out", 64 << 20)
        assert mdsmix("convert", recipe).code == 0
        disk.refuse_writes()
        assert "web: up to date" in mdsmix("convert", recipe).out
        assert mdsmix("verify", tmp_path / "out" / "web").code == 0
        write_jsonl(tmp_path / "data" / "c.jsonl", RECORDS)
        answer = mdsmix("convert", recipe)
        refused(answer, "is read-only" if disk.is_mounted else "permission denied")
        assert files(tmp_path / "out") == whole

    in_a_process(publish_and_refuse, tmp_path / "report")


def test_a_cache_that_is_full_costs_a_reading(
    recipe: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What mdsmix remembers of sources and backends is disposable; of the tokenizer it has a snapshot already."""
    known = Path(os.environ["MDSMIX_CACHE"]) / "tokenizers"
    cache = tmp_path / "cache"

    def convert() -> None:
        if SmallDisk(cache, 8 << 20).is_mounted:
            shutil.copytree(known, cache / "tokenizers")
            with pytest.raises(OSError, match="No space"):
                (cache / "filler").write_bytes(bytes(8 << 20))
        else:
            shutil.copytree(known, cache / "tokenizers")
            for name in ("seen", "backends"):
                (cache / name).touch()
        monkeypatch.setenv("MDSMIX_CACHE", str(cache))
        for _ in range(2):
            answer = mdsmix("convert", recipe)
            assert (answer.code, answer.err) == (0, "")
            assert files(tmp_path / "out") == whole
        assert "up to date" in answer.out
        kept = [path for path in (cache / "seen").glob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in kept) == 0

    in_a_process(convert, tmp_path / "report")


@pytest.mark.parametrize("years", [-40, 40])
def test_times_of_another_age_are_only_compared(
    recipe: Path, whole: dict[str, bytes], tmp_path: Path, years: int
) -> None:
    """Sources from before 1990 or from the future: a clock that was wrong when they were written."""
    then = time.time() + years * 365 * 86_400
    source = tmp_path / "data" / "a.jsonl"
    os.utime(source, (then, then))
    run_recipe(recipe)
    assert files(tmp_path / "out") == whole
    assert run_recipe(recipe)[0].state == "up to date"
    source.write_bytes(source.read_bytes().replace(b"Document 5:", b"Document 6:"))
    os.utime(source, (then - 3600, then - 3600))
    assert run_recipe(recipe)[0].done == 1


def test_a_clock_that_jumps_moves_nothing(
    recipe: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps, now = count(1), time.time()
    monkeypatch.setattr(time, "time", lambda: now + (-1) ** next(jumps) * 1e9)
    outcome = run_recipe(recipe)[0]
    assert 0 <= outcome.seconds < 60
    assert files(tmp_path / "out") == whole
    monkeypatch.setattr(time, "time", lambda: now - 1e9)
    assert find_garbage(locate(outcome.target), KEEP_SECONDS) == []


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(packed(path, b'{"text": "a line that came late"}\n'))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = path.parent.parent / path.name
    edited(shutil.copy(path, other))
    other.replace(path)


def edited(path: Path) -> None:
    """In place; of the same size where the file is plain."""
    content = path.read_bytes()
    plain = content if path.suffix == ".jsonl" else zstandard.decompress(content)
    with path.open("r+b") as file:
        file.write(packed(path, plain.replace(b"quick", b"QUICK")))
        file.truncate()


def packed(path: Path, content: bytes) -> bytes:
    return content if ".zst" not in path.name else zstandard.compress(content)


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.zst"])
@pytest.mark.parametrize("change", [appended, cut, replaced, edited])
def test_what_changes_while_it_is_read_is_never_kept(
    recipe: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Path], None],
) -> None:
    """Not even for its first windows, which are finished before the last one is read: the old content may come back."""
    path, really = tmp_path / "data" / name, unit.read
    before = path.read_bytes()

    def read_and_change(part: Any, *settings: Any) -> Any:
        for number, batch in enumerate(really(part, *settings)):
            yield batch
            if part.name.endswith(name) and not number:
                change(path)

    with monkeypatch.context() as patch:
        patch.setattr(unit, "read", read_and_change)
        with pytest.raises(Unreachable, match=f"{name} was changed while it was being read"):
            run_recipe(recipe)
    assert not (tmp_path / "out" / "web" / "train" / "index.json").exists()
    path.write_bytes(before)
    run_recipe(recipe)
    assert files(tmp_path / "out") == whole


def test_a_file_that_grows_all_the_while(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are refused in a sentence; the one after the last line publishes what is there then."""
    path, really = tmp_path / "data" / "a.jsonl", unit.read

    def read_and_grow(*settings: Any) -> Any:
        for batch in really(*settings):
            appended(path)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(unit, "read", read_and_grow)
        for workers in (1, 2):
            answer = mdsmix("convert", recipe, "--workers", workers)
            refused(answer, "a.jsonl was changed while it was being read")
    run_recipe(recipe)
    run_recipe(recipe, f"local={tmp_path / 'quiet'}")
    published, quiet = files(tmp_path / "out"), files(tmp_path / "quiet")
    assert quiet.items() <= published.items()


def test_times_of_what_is_published_are_nobodys_business(recipe: Path, tmp_path: Path) -> None:
    """A target that was copied, or written under another clock, is up to date all the same."""
    run_recipe(recipe)
    for path in times(tmp_path / "out"):
        os.utime(path, (1e6, 4e9))
    assert run_recipe(recipe)[0].state == "up to date"
    assert find_garbage(locate(tmp_path / "out" / "web" / "train"), 0) == []
