"""Nothing that anything names is deleted, nothing younger than asked for, and nothing that mdsmix
did not name.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.conversion import finished_units, gc
from mdsmix.conversion.gc import Garbage, find_garbage, parse_age
from mdsmix.conversion.unit_files import parse_record, read_unit_file
from mdsmix.errors import RecipeError
from mdsmix.shards import lease as lease_module
from mdsmix.shards.lease import Holder, hold_lease
from mdsmix.storage import Location, locate
from tests.converting import Project, assert_refused, is_intact, mdsmix, read_files, set_age

WEEK = 7 * 86_400.0
TEXTS = [f"Document {n} is about the number {n}. " * 3 for n in range(40)]


@pytest.fixture
def project(project: Project) -> Project:
    project.set_window_size(1500)
    project.write_source([*TEXTS, {"text": 5}])
    return project


@pytest.fixture
def republished(project: Project, request: Any) -> Path:
    """Its first and its last unit were edited, the bad record mended; no line in between begins
    elsewhere. A parameter says how many units are packed together.
    """
    project.patch.setattr(
        finished_units, "FEWEST", getattr(request, "param", finished_units.FEWEST)
    )
    project.run()
    before = {shard.name for shard in project.shards}
    project.write_source([TEXTS[0].upper(), *TEXTS[1:], "good"])
    project.run()
    project.replaced = len(before - {shard.name for shard in project.shards})
    assert project.replaced > 1
    return project.train


def garbage(folder: Path, seconds: float = WEEK) -> list[Garbage]:
    return find_garbage(locate(folder), seconds)


def kinds(folder: Path) -> Counter[str]:
    return Counter(item.kind for item in garbage(folder))


def delete(folder: Path, seconds: float = WEEK) -> set[str]:
    return {item.name for item in gc.delete_garbage(locate(folder), seconds, lambda _: None)}


def test_what_an_edit_left_behind_goes_after_seven_days(
    republished: Path, project: Project
) -> None:
    set_age(republished, 6.9)
    assert garbage(republished) == []
    set_age(republished, 7.1)
    before, found = project.files, garbage(republished)
    # Two units and the last part have other shards; their records, the bad ones of one, the
    # stream's index before.
    assert kinds(republished) == {"shard": project.replaced, "unit record": 2, "old index": 1}
    assert project.files == before, "finding deletes nothing"
    names = {item.name for item in found}
    assert delete(republished) == names == before.keys() - project.files.keys()
    assert sum(item.bytes for item in found) == sum(len(before[name]) for name in names)
    assert is_intact(republished)
    assert project.run().state == "up to date"
    set_age(republished, 100)
    assert delete(republished, 0) == set(), "what was published once has no garbage"
    assert project.convert_into().files == project.files


def test_shards_of_an_index_that_was_just_replaced_stay(
    republished: Path, project: Project
) -> None:
    """They may be months old, and a job that opened the stream an hour ago still reads them."""
    set_age(republished, 100)
    (old,) = [name for name in read_files(republished) if name.endswith(".index")]
    set_age(
        republished, 1, [name for name in read_files(republished) if name.startswith(".mdsmix/")]
    )
    assert not kinds(republished)
    set_age(republished, 100, [n for n in read_files(republished) if n != old])
    assert kinds(republished) == {"unit record": 2}
    delete(republished)
    set_age(republished, 8, [old])
    assert kinds(republished) == {"shard": project.replaced, "old index": 1}
    (republished / old).write_bytes(b"{")
    set_age(republished, 1, [old])
    assert kinds(republished) == {"shard": project.replaced}, "no reader can have a damaged index"


@pytest.mark.parametrize("republished", [100, 1], indirect=True)
def test_a_record_that_stays_keeps_its_shards(republished: Path, project: Project) -> None:
    """A record whose shards were gone would be believed by the next conversion. One that is packed
    stays with those beside it.
    """
    set_age(republished, 100)
    names = [name for name in project.files if name.endswith((".unit", ".segment"))]
    held = {name: read_unit_file(locate(republished), name[8:]).records for name in names}
    stale = {
        name: of.keys() - {*project.keys}
        for name, of in held.items()
        if of.keys() - {*project.keys}
    }
    lines = [held[name][key] for name, keys in stale.items() for key in keys]
    kept = {shard.stored.basename for line in lines for shard in parse_record(line).shards}
    found = {item.name for item in garbage(republished)}
    assert kept <= found
    assert found & stale.keys() == (stale.keys() if finished_units.FEWEST > 1 else set())
    set_age(republished, 1, stale)
    assert delete(republished) == found - kept - stale.keys()
    assert is_intact(republished)
    set_age(republished, 100)
    assert delete(republished) == found & (kept | stale.keys())
    assert project.run().state == "up to date"
    project.write_source([*TEXTS, {"text": 5}])  # a packed record is there, and its shard is not
    assert project.run().done == len(kept) == 2
    assert is_intact(republished)


def test_only_names_that_mdsmix_gives_are_looked_at(project: Project) -> None:
    project.run()
    published = project.train
    value = "0123456789abcdef" * 2
    kinds = ("{0}.mds", "{0}-3.mds.zstd", ".mdsmix/{0}", ".mdsmix/{0}-01234567.bad", ".mdsmix/{0}-01234567.unit", ".mdsmix/part-3-of-64", "quarantine/{0}-01234567.jsonl.zst")  # fmt: skip
    ours = [name.format(value) for name in kinds]
    left = (f"index.json.{value[:16]}.tmp", f".mdsmix/{value}.{value[16:]}.tmp")
    theirs = ("README.md", "shard.00000.mds", f"{value}.mds.bak", f"sub/{value}.mds", f"{value.upper()}.mds", ".mdsmix/mixed", f"quarantine/{value}.txt", "notes.tmp")  # fmt: skip
    outside, link = published.parent / f"{value}.mds", f"{'f' * 32}.mds"
    for path in (outside, *(published / name for name in (*ours, *left, *theirs))):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"1")
    (published / link).symlink_to(outside)
    assert garbage(published) == [], "a write may be at work"
    set_age(published, 8)
    assert delete(published) == {*ours, *left, link}
    assert theirs[-1] in read_files(published)
    assert outside.exists()
    assert is_intact(published)


def test_nothing_is_deleted_while_a_conversion_is_at_work(republished: Path) -> None:
    set_age(republished, 8)
    before = read_files(republished)
    with hold_lease(locate(republished), lambda _: None), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(mdsmix, "gc", republished, "--delete").result()
        assert pool.submit(mdsmix, "gc", republished).result().code == 0
    assert (answer.code, answer.out) == (4, "")
    assert "is being written by process" in answer.err
    assert read_files(republished) == before


def test_who_lost_the_lease_deletes_nothing_more(project: Project, republished: Path) -> None:
    """It stood still for so long that another run took the stream over, and may name what was
    garbage.
    """
    before, found = read_files(republished), gc.find_garbage
    other = Holder(host="another.host", pid=12, since="now", token="b")

    def find(folder: Location, *settings: Any) -> list[Garbage]:
        garbage = found(folder, *settings)
        (republished / ".mdsmix" / "lease").write_bytes(orjson.dumps(asdict(other)))
        project.patch.setattr(lease_module, "BEAT_SECONDS", 0.001)
        return garbage

    project.patch.setattr(gc, "find_garbage", find)
    answer = mdsmix("gc", republished, "--older-than", "0s", "--delete")
    assert (answer.code, "was taken over by another run" in answer.err) == (4, True)
    assert read_files(republished).items() >= before.items()


def test_a_damaged_index_or_manifest_stops_it(republished: Path) -> None:
    set_age(republished, 8)
    for name in ("index.json", "mdsmix.manifest"):
        content = (republished / name).read_bytes()
        (republished / name).write_bytes(content[:-9])
        assert_refused(mdsmix("gc", republished, "--delete"), 4, name)
        (republished / name).write_bytes(content)
    assert garbage(republished)


def test_ages() -> None:
    for text, seconds in {"7d": WEEK, "12h": 43_200, "30m": 1800, "0s": 0}.items():
        assert parse_age(text) == seconds
    for text in ("", "7", "d", "-1d", "1.5d", "7 days"):
        with pytest.raises(RecipeError, match="is not an age: write for example 7d"):
            parse_age(text)


def test_the_command(republished: Path, project: Project) -> None:
    """Dry unless asked; every file with its bytes and age, then the sum; a warning where seven days
    are cut short.
    """
    set_age(republished, 8)
    before = read_files(republished)
    answer = mdsmix("gc", republished.parent)
    *lines, last = answer.out.splitlines()
    assert (answer.code, answer.err, len(lines)) == (0, "", project.replaced + 3)
    assert last.endswith("bytes: nothing is deleted without --delete")
    assert all("8.0 days" in line for line in lines)
    assert read_files(republished) == before
    answer = mdsmix("gc", republished, "--older-than", "1h", "--delete")
    assert answer.out.splitlines()[:-1] == lines
    assert answer.out.endswith("bytes: deleted\n")
    assert "running jobs and caches" in answer.err
    assert len(read_files(republished)) == len(before) - 6
    for wrong in (("--older-than", "soon"), ("--keep", 0)):
        assert mdsmix("gc", republished, *wrong).code == 2
