"""`gc` deletes no file that anything refers to, none younger than asked for, and none that mdsmix
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
    """A stream published twice: the first and the last unit were edited, and the bad record fixed.
    The lines between have the same offsets. The parameter sets from how many units on files are
    joined into segments.
    """
    project.patch.setattr(
        finished_units, "FEWEST_TO_JOIN", getattr(request, "param", finished_units.FEWEST_TO_JOIN)
    )
    project.run()
    before = {shard.name for shard in project.shards}
    project.write_source([TEXTS[0].upper(), *TEXTS[1:], "good"])
    project.run()
    project.replaced = len(before - {shard.name for shard in project.shards})
    assert project.replaced > 1
    return project.train


def list_garbage(folder: Path, seconds: float = WEEK) -> list[Garbage]:
    return find_garbage(locate(folder), seconds)


def count_kinds(folder: Path) -> Counter[str]:
    return Counter(item.kind for item in list_garbage(folder))


def test_files_that_are_published_while_gc_lists_them_are_kept(
    republished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may have taken the lease over, and published finished units of long ago."""
    listed = [item.name for item in list_garbage(republished, 0)]
    index, manifest = (republished / name for name in ("index.json", "mdsmix.manifest"))
    contents = [file.read_bytes() for file in (index, manifest)]
    list_all = gc._list_named_files

    def list_and_publish(folder: Location) -> list[Garbage]:
        files = [*list_all(folder)]
        for file, content in zip((index, manifest), contents, strict=True):
            file.write_bytes(content)
        return files

    for file in (index, manifest):
        file.unlink()
    monkeypatch.setattr(gc, "_list_named_files", list_and_publish)
    assert [item.name for item in list_garbage(republished, 0)] == listed


def delete_garbage(folder: Path, seconds: float = WEEK) -> set[str]:
    return {item.name for item in gc.delete_garbage(locate(folder), seconds, lambda _: None)}


def test_replaced_files_are_deleted_after_seven_days(republished: Path, project: Project) -> None:
    set_age(republished, 6.9)
    assert list_garbage(republished) == []
    set_age(republished, 7.1)
    before, items = project.files, list_garbage(republished)
    # Two units and the leftovers have new shards; two units have new records; one index was
    # replaced.
    assert count_kinds(republished) == {"shard": project.replaced, "unit record": 2, "old index": 1}
    assert project.files == before, "finding deletes nothing"
    names = {item.name for item in items}
    assert delete_garbage(republished) == names == before.keys() - project.files.keys()
    assert sum(item.bytes for item in items) == sum(len(before[name]) for name in names)
    assert is_intact(republished)
    assert project.run().state == "up to date"
    set_age(republished, 100)
    assert delete_garbage(republished, 0) == set(), (
        "a stream that was published once has no garbage"
    )
    assert project.convert_into().files == project.files


def test_shards_of_a_recently_replaced_index_are_kept(republished: Path, project: Project) -> None:
    """They may be months old, but a job that opened the stream an hour ago still reads them."""
    set_age(republished, 100)
    (old,) = [name for name in read_files(republished) if name.endswith(".index")]
    set_age(
        republished, 1, [name for name in read_files(republished) if name.startswith(".mdsmix/")]
    )
    assert not count_kinds(republished)
    set_age(republished, 100, [n for n in read_files(republished) if n != old])
    assert count_kinds(republished) == {"unit record": 2}
    delete_garbage(republished)
    set_age(republished, 8, [old])
    assert count_kinds(republished) == {"shard": project.replaced, "old index": 1}
    (republished / old).write_bytes(b"{")
    set_age(republished, 1, [old])
    assert count_kinds(republished) == {"shard": project.replaced}, (
        "no reader can use a damaged index"
    )


@pytest.mark.parametrize("republished", [100, 1], indirect=True)
def test_a_record_that_is_kept_keeps_its_shards(republished: Path, project: Project) -> None:
    """The next conversion would trust a record whose shards are gone. A record in a segment is kept
    as long as the others in it.
    """
    set_age(republished, 100)
    published = {*project.keys}
    stale_files = set[str]()  # unit files and segments with a record that is not published
    kept_shards = set[str]()
    for name in project.files:
        if name.endswith((".unit", ".segment")):
            records = read_unit_file(locate(republished), name.removeprefix(".mdsmix/")).records
            for key in records.keys() - published:
                stale_files.add(name)
                shards = parse_record(records[key]).shards
                kept_shards |= {shard.stored.basename for shard in shards}
    garbage = {item.name for item in list_garbage(republished)}
    assert kept_shards <= garbage
    assert garbage & stale_files == (stale_files if finished_units.FEWEST_TO_JOIN > 1 else set())
    set_age(republished, 1, stale_files)
    assert delete_garbage(republished) == garbage - kept_shards - stale_files
    assert is_intact(republished)
    set_age(republished, 100)
    assert delete_garbage(republished) == garbage & (kept_shards | stale_files)
    assert project.run().state == "up to date"
    project.write_source([*TEXTS, {"text": 5}])  # a segment has its record, but its shard is gone
    assert project.run().done == len(kept_shards) == 2
    assert is_intact(republished)


def test_only_files_with_names_of_mdsmix_are_deleted(project: Project) -> None:
    project.run()
    published = project.train
    value = "0123456789abcdef" * 2
    ours = [
        f"{value}.mds",
        f"{value}-3.mds.zstd",
        f".mdsmix/{value}",
        f".mdsmix/{value}-01234567.bad",
        f".mdsmix/{value}-01234567.unit",
        ".mdsmix/part-3-of-64",
        f"quarantine/{value}-01234567.jsonl.zst",
    ]
    unfinished = (f"index.json.{value[:16]}.tmp", f".mdsmix/{value}.{value[16:]}.tmp")
    others = (
        "README.md",
        "shard.00000.mds",
        f"{value}.mds.bak",
        f"sub/{value}.mds",
        f"{value.upper()}.mds",
        ".mdsmix/mixed",
        f"quarantine/{value}.txt",
        "notes.tmp",
    )
    outside, link = published.parent / f"{value}.mds", f"{'f' * 32}.mds"
    for path in (outside, *(published / name for name in (*ours, *unfinished, *others))):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"1")
    (published / link).symlink_to(outside)
    assert list_garbage(published) == [], "a write may be in progress"
    set_age(published, 8)
    assert delete_garbage(published) == {*ours, *unfinished, link}
    assert others[-1] in read_files(published)
    assert outside.exists()
    assert is_intact(published)


def test_nothing_is_deleted_while_a_conversion_runs(republished: Path) -> None:
    set_age(republished, 8)
    before = read_files(republished)
    with hold_lease(locate(republished), lambda _: None), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(mdsmix, "gc", republished, "--delete").result()
        assert pool.submit(mdsmix, "gc", republished).result().code == 0
    assert (answer.code, answer.out) == (4, "")
    assert "is being written by process" in answer.err
    assert read_files(republished) == before


def test_a_run_that_lost_the_lease_deletes_nothing_more(
    project: Project, republished: Path
) -> None:
    """It paused for so long that another run took the stream over, which may use the files."""
    before = read_files(republished)
    find_real = gc.find_garbage
    other = Holder(host="another.host", pid=12, since="now", token="b")

    def find_and_lose_lease(folder: Location, *settings: Any) -> list[Garbage]:
        garbage = find_real(folder, *settings)
        (republished / ".mdsmix" / "lease").write_bytes(orjson.dumps(asdict(other)))
        project.patch.setattr(lease_module, "BEAT_SECONDS", 0)
        return garbage

    # No beat comes before the loss, and after it no confirmation is recent.
    project.patch.setattr(lease_module, "BEAT_SECONDS", 3600)
    project.patch.setattr(gc, "find_garbage", find_and_lose_lease)
    answer = mdsmix("gc", republished, "--older-than", "0s", "--delete")
    assert (answer.code, "was taken over by another run" in answer.err) == (4, True)
    assert read_files(republished).items() >= before.items()


def test_gc_stops_at_a_damaged_index_or_manifest(republished: Path) -> None:
    set_age(republished, 8)
    for name in ("index.json", "mdsmix.manifest"):
        content = (republished / name).read_bytes()
        (republished / name).write_bytes(content[:-9])
        assert_refused(mdsmix("gc", republished, "--delete"), 4, name)
        (republished / name).write_bytes(content)
    assert list_garbage(republished)


def test_ages_are_parsed() -> None:
    for text, seconds in {"7d": WEEK, "12h": 43_200, "30m": 1800, "0s": 0}.items():
        assert parse_age(text) == seconds
    for text in ("", "7", "d", "-1d", "1.5d", "7 days"):
        with pytest.raises(RecipeError, match="is not an age: write for example 7d"):
            parse_age(text)


def test_the_command_lists_files_and_deletes_them_if_asked(
    republished: Path, project: Project
) -> None:
    """It lists each file with bytes and age, then the sum, and warns of ages below seven days."""
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
    answer = mdsmix("gc", republished, "--older-than", "1h", "--delete")
    assert answer.out.endswith("0 files, 0 bytes: nothing to delete\n")
    for options in (("--older-than", "soon"), ("--keep", 0)):
        assert mdsmix("gc", republished, *options).code == 2
