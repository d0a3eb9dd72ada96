"""Versions go only when asked for, the oldest first, never the current one and never one that was replaced a moment ago."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mdsmix.convert.garbage import delete_garbage, find_garbage
from mdsmix.shards.published import current, versions
from mdsmix.storage import locate
from tests.converting import documents, files, mdsmix, run_recipe, write_jsonl, write_recipe
from tests.recording import Disk

WEEK = 7 * 86_400.0


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    streams = {"web": documents(tmp_path / "a.jsonl", layout="document")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, publish="versioned")


@pytest.fixture
def split(tmp_path: Path) -> Path:
    return tmp_path / "out" / "web" / "train"


def publish(recipe: Path, number: int) -> Path:
    write_jsonl(recipe.parent / "a.jsonl", [{"text": f"Version {number}."}])
    (outcome,) = run_recipe(recipe)
    found = current(locate(outcome.target))
    assert found is not None
    return Path(found.url)


def age(split: Path, days: float) -> None:
    """Makes everything as old as if it had been done so much longer ago."""
    for path in split.parent.rglob("*"):
        then = path.stat().st_mtime - days * 86_400
        os.utime(path, (then, then))


@pytest.fixture
def published(recipe: Path, split: Path) -> list[Path]:
    """Four versions, a day apart, the last one now."""
    made = []
    for number in range(4):
        age(split, 1)
        made.append(publish(recipe, number))
    return made


def found(split: Path, keep: int | None, seconds: float = 0) -> list[str]:
    garbage = find_garbage(locate(split), seconds, keep)
    return [item.name for item in garbage if item.kind.endswith("version")]


def listed(split: Path) -> set[Path]:
    return {Path(version.url) for version in versions(locate(split))}


def test_what_a_killed_write_left_in_a_version_goes_and_the_version_stays(
    published: list[Path], split: Path
) -> None:
    half = published[0] / f"mdsmix.manifest.{'0' * 16}.tmp"
    half.write_bytes(b"half of it")
    (left,) = (g for g in find_garbage(locate(split), 0) if g.kind == "unfinished write")
    assert left.name == f"{half.parent.name}/{half.name}"
    left.discard()
    assert not half.exists()
    assert listed(split) == set(published)


def test_all_stay_unless_it_is_said_how_many_do(published: list[Path], split: Path) -> None:
    assert found(split, None) == []
    names = [path.name for path in published]
    assert [found(split, keep) for keep in (1, 2, 3, 4, 9)] == [
        [names[2], names[1], names[0]],
        [names[1], names[0]],
        [names[0]],
        [],
        [],
    ]


def test_a_version_is_kept_for_a_while_after_it_was_replaced(
    published: list[Path], split: Path
) -> None:
    """It may be months old, and a job that opened it yesterday still reads it."""
    first, second, third, _ = (path.name for path in published)
    for path in published[2].iterdir():
        os.utime(path, (0, 0))
    assert found(split, 1, 86_400 * 0.5) == [second, first]
    assert found(split, 1, 86_400 * 1.5) == [first]
    assert found(split, 1, WEEK) == []
    age(split, 5.5)
    assert found(split, 1, WEEK) == [first]
    age(split, 2)
    assert found(split, 1, WEEK) == [third, second, first]


def test_one_that_was_current_again_is_as_new_as_that(
    published: list[Path], recipe: Path, split: Path
) -> None:
    first, second, third, fourth = published
    age(split, 1)
    assert publish(recipe, 0) == first
    age(split, 1)
    assert publish(recipe, 3) == fourth
    assert found(split, 2) == [third.name, second.name]
    assert found(split, 2, 86_400 * 2.5) == [second.name]


def test_what_is_deleted_and_what_is_not(published: list[Path], recipe: Path, split: Path) -> None:
    before = files(split.parent)
    assert mdsmix("gc", split, "--keep", 2).out.endswith("0 files, 0 bytes: all is in use\n")
    age(split, 8)
    strange = published[0] / "notes.txt"
    strange.write_text("not ours")
    delete_garbage(locate(split), WEEK, lambda _: None, 2)
    assert listed(split) == {published[0], *published[2:]}
    assert list(published[0].iterdir()) == [strange]
    kept = (published[2].name, published[3].name)
    left = files(split.parent)
    assert {n for n in before if n.startswith(kept)} == {n for n in left if n.startswith(kept)}
    assert mdsmix("verify", published[2]).code == mdsmix("verify", published[3]).code == 0
    assert len(list((split / ".mdsmix").glob("*.replaced"))) == 1
    assert run_recipe(recipe)[0].state == "up to date"
    assert found(split, 2) == []


def test_an_index_is_gone_for_good_before_a_shard_of_its_version_goes(
    published: list[Path], split: Path, tmp_path: Path
) -> None:
    """After a power cut in between a reader would start on a version that lacks shards."""
    disk = Disk(published[0], tmp_path / "log")
    with disk.recording():
        (version,) = (v for v in find_garbage(locate(split), 0, 1) if v.name == published[0].name)
        version.discard()
    done = [(call.what, call.name) for call in disk.calls]
    begun = done.index(("unlink", "index.json"))
    assert done[begun + 1] == ("sync", "")
    assert {what for what, _ in done[:begun]} <= {"sync"}
    assert not published[0].exists()


def test_a_version_that_was_half_made_or_half_deleted_goes_and_the_current_one_stays(
    published: list[Path], split: Path
) -> None:
    (published[0] / "index.json").unlink()
    (published[3] / "index.json").unlink()
    assert found(split, None) == [published[0].name]
    assert found(split, 2) == [published[1].name, published[0].name]
    assert found(split, 1, time.time()) == []


def test_the_command(published: list[Path], split: Path) -> None:
    answer = mdsmix("gc", published[1], "--keep", 2, "--older-than", "0s")
    lines = [line for line in answer.out.splitlines() if line.startswith("version  ")]
    assert [line.split()[-1] for line in lines] == [published[1].name, published[0].name]
    assert listed(split) == set(published)
    assert answer.out.splitlines()[-1].startswith(f"{split}: ")
    assert mdsmix("gc", split, "--keep", 0).code == 2
    assert mdsmix("gc", split, "--keep", 2, "--older-than", "0s", "--delete").code == 0
    assert listed(split) == set(published[2:])
