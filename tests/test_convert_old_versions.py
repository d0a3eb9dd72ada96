"""Versions go only when asked for, the oldest first, never the current one and never one that was replaced a moment ago."""

import os
import time
from pathlib import Path

import pytest

from mdsmix.convert.garbage import find_garbage
from mdsmix.shards.published import versions
from mdsmix.storage import locate
from tests.converting import Web, documents, files, mdsmix

DAY = 86_400.0


def publish(web: Web, number: int) -> Path:
    web.holds([f"Version {number}."])
    web.run()
    return web.shards[0].parent


def age(web: Web, days: float) -> None:
    """Makes everything as old as if it had been done so much longer ago."""
    for path in web.out.rglob("*"):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


@pytest.fixture
def published(web: Web) -> list[Path]:
    """Four versions, a day apart, the last one now."""
    web.says(documents("a.jsonl", layout="document"), publish="versioned")
    made = []
    for number in range(4):
        age(web, 1)
        made.append(publish(web, number))
    return made


def found(web: Web, keep: int | None, days: float = 0) -> list[str]:
    garbage = find_garbage(locate(web.train), days * DAY, keep)
    return [item.name for item in garbage if item.kind.endswith("version")]


def listed(web: Web) -> set[Path]:
    return {Path(version.url) for version in versions(locate(web.train))}


def test_what_a_killed_write_left_in_a_version_goes_and_the_version_stays(
    published: list[Path], web: Web
) -> None:
    half = published[0] / f"mdsmix.manifest.{'0' * 16}.tmp"
    half.write_bytes(b"half of it")
    (left,) = (g for g in find_garbage(locate(web.train), 0) if g.kind == "unfinished write")
    assert left.name == f"{half.parent.name}/{half.name}"
    left.discard()
    assert not half.exists()
    assert listed(web) == set(published)


def test_versions_stay_unless_it_is_said_how_many_do_and_for_a_while_after_they_were_replaced(
    published: list[Path], web: Web
) -> None:
    """One may be months old, and a job that opened it yesterday still reads it."""
    first, second, third, _ = (path.name for path in published)
    kept = [(None, []), (1, [third, second, first]), (2, [second, first]), (3, [first]), (4, [])]
    for keep, names in kept:
        assert found(web, keep) == names
    for path in published[2].iterdir():
        os.utime(path, (0, 0))
    ages = [(0, 0.5, [second, first]), (0, 1.5, [first]), (0, 7, []), (5.5, 7, [first])]
    for days, least, names in [*ages, (2, 7, [third, second, first])]:
        age(web, days)
        assert found(web, 1, least) == names


def test_one_that_was_current_again_is_as_new_as_that(published: list[Path], web: Web) -> None:
    first, second, third, fourth = published
    for number, version in ((0, first), (3, fourth)):
        age(web, 1)
        assert publish(web, number) == version
    assert found(web, 2) == [third.name, second.name]
    assert found(web, 2, 2.5) == [second.name]


def test_what_is_deleted_and_what_is_not(published: list[Path], web: Web) -> None:
    before = files(web.train.parent)
    assert mdsmix("gc", web.train, "--keep", 2).out.endswith("0 files, 0 bytes: all is in use\n")
    age(web, 8)
    strange = published[0] / "notes.txt"
    strange.write_text("not ours")
    command = ("gc", published[1], "--keep", 2)
    assert f"days  {published[1].name}\n" in mdsmix(*command).out
    assert listed(web) == set(published)
    assert mdsmix(*command, "--delete").code == 0
    assert listed(web) == {published[0], *published[2:]}
    assert list(published[0].iterdir()) == [strange]
    kept = (published[2].name, published[3].name)
    left = files(web.train.parent)
    assert {n for n in before if n.startswith(kept)} == {n for n in left if n.startswith(kept)}
    assert mdsmix("verify", published[2]).code == mdsmix("verify", published[3]).code == 0
    assert len(list((web.train / ".mdsmix").glob("*.replaced"))) == 1
    assert web.run().state == "up to date"
    assert found(web, 2) == []


def test_a_version_that_was_half_made_or_half_deleted_goes_and_the_current_one_stays(
    published: list[Path], web: Web
) -> None:
    for half in (published[0], published[3]):
        (half / "index.json").unlink()
    assert found(web, None) == [published[0].name]
    assert found(web, 2) == [published[1].name, published[0].name]
    assert found(web, 1, time.time()) == []
