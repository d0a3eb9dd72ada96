"""Nothing that anything names is deleted, nothing younger than asked for, and nothing that mdsmix did not name."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.convert import garbage as gc
from mdsmix.convert.garbage import Garbage, find_garbage, seconds_of
from mdsmix.convert.ledger import read_units
from mdsmix.errors import RecipeError
from mdsmix.shards import lease as lease_module
from mdsmix.shards.index import read_index
from mdsmix.shards.lease import Holder, lease
from mdsmix.shards.verification import verify
from mdsmix.storage import Location, locate
from tests.converting import (
    documents,
    files,
    manifest_of,
    mdsmix,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.recording import Disk

WEEK = 7 * 86_400.0
OTHER = Holder(host="another.host", pid=12, since="now", machine="another", started=34, token="b")
OWN = re.compile("[0-9a-f]{32}")
TEXTS = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(40)]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    windows(monkeypatch, 1500)
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, {"text": 5}])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


@pytest.fixture
def published(tmp_path: Path, recipe: Path) -> Path:
    run_recipe(recipe)
    return tmp_path / "out" / "web" / "train"


@pytest.fixture
def republished(published: Path, recipe: Path, tmp_path: Path) -> Path:
    """Its first and its last unit were edited, the bad record mended; no line in between begins elsewhere."""
    edited = [{"text": TEXTS[0]["text"].upper()}, *TEXTS[1:], {"text": "good"}]
    write_jsonl(tmp_path / "a.jsonl", edited)
    run_recipe(recipe)
    return published


def age(folder: Path, days: float, names: Iterable[str] | None = None) -> None:
    """Makes files as old as if they had been written so long ago."""
    then = time.time() - days * 86_400
    for name in names or files(folder):
        os.utime(folder / name, (then, then))


def garbage(folder: Path, seconds: float = WEEK) -> list[Garbage]:
    return find_garbage(locate(folder), seconds)


def kinds(found: list[Garbage]) -> Counter[str]:
    return Counter(item.kind for item in found)


def delete(folder: Path, seconds: float = WEEK) -> list[Garbage]:
    return gc.delete_garbage(locate(folder), seconds, lambda _: None)


def is_whole(folder: Path) -> bool:
    found = verify(locate(folder), quick=False, begin=lambda *_: None, on_progress=lambda *_: None)
    return found.faults == ()


def test_what_an_edit_left_behind_goes_after_seven_days(
    republished: Path, recipe: Path, tmp_path: Path
) -> None:
    age(republished, 6.9)
    assert garbage(republished) == []
    age(republished, 7.1)
    before, found = files(republished), garbage(republished)
    # Two units and the last part have other shards; their records, the bad ones of one, the stream's index before.
    assert kinds(found) == {"shard": 3, "unit record": 2, "old index": 1}
    assert files(republished) == before, "finding deletes nothing"
    deleted = delete(republished)
    assert {item.name for item in deleted} == {item.name for item in found}
    left = files(republished)
    assert before.keys() - left.keys() == {item.name for item in found}
    assert sum(item.bytes for item in found) == sum(len(before[item.name]) for item in found)
    assert is_whole(republished)
    assert run_recipe(recipe)[0].state == "up to date"
    age(republished, 100)
    assert delete(republished, 0) == [], "what was published once has no garbage"
    fresh = run_recipe(recipe, f"local={tmp_path / 'fresh'}")[0]
    assert files(Path(fresh.target)) == left


def test_shards_of_an_index_that_was_just_replaced_stay(republished: Path) -> None:
    """They may be months old, and a job that opened the stream an hour ago still reads them."""
    age(republished, 100)
    (old,) = [name for name in files(republished) if name.endswith(".index")]
    age(republished, 1, [old])
    age(republished, 1, [name for name in files(republished) if name.startswith(".mdsmix/")])
    assert not kinds(garbage(republished))
    age(republished, 100, [n for n in files(republished) if n != old])
    assert kinds(garbage(republished)) == {"unit record": 2}
    delete(republished)
    age(republished, 8, [old])
    assert kinds(garbage(republished)) == {"shard": 3, "old index": 1}
    (republished / old).write_bytes(b"{")
    age(republished, 1, [old])
    assert kinds(garbage(republished)) == {"shard": 3}, "no reader can have a damaged index"


def test_a_unit_record_that_stays_keeps_its_shards(republished: Path, recipe: Path) -> None:
    """A record whose shards were gone would be believed by the next conversion."""
    age(republished, 100)
    current = {part.key for part in manifest_of(republished).parts}
    records = [n for n in files(republished) if n.endswith(".unit")]
    stale = [name for name in records if Path(name).name[:32] not in current]
    age(republished, 1, stale)
    kept = set()
    for name in stale:
        units = read_units(locate(republished), Path(name).name)
        assert units is not None
        (record,) = map(units.record, units.records)
        assert record is not None
        kept |= {shard.stored.basename for shard in record.shards}
    assert kept
    gone = {item.name for item in delete(republished)}
    assert gone
    assert not gone & kept
    assert is_whole(republished)


def test_a_conversion_that_was_killed_is_kept_for_a_while(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index yet: its finished units are worth going on from, and after seven days they are not."""
    target = tmp_path / "out" / "web" / "train"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mdsmix.convert.run.publish", killed)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe)
    assert not (target / "index.json").exists()
    assert mdsmix("gc", target).out.endswith("0 files, 0 bytes: all is in use\n")
    age(target, 8)
    delete(target)
    assert files(target).keys() == {n for n in files(target) if n.startswith("quarantine/")}


def test_an_interrupted_publication_keeps_both_versions(
    published: Path, recipe: Path, tmp_path: Path
) -> None:
    index = (published / "index.json").read_bytes()
    write_jsonl(tmp_path / "a.jsonl", [{"text": "Quite another text. " * 5}, *TEXTS[1:]])
    run_recipe(recipe)
    (published / "index.json").write_bytes(index)
    age(published, 100)
    delete(published, 0)
    for shard in read_index(locate(published)).shards:
        assert (published / shard.stored.basename).exists()
    assert run_recipe(recipe)[0].done == 0
    assert is_whole(published)


def test_only_names_that_mdsmix_gives_are_looked_at(published: Path) -> None:
    value = "0123456789abcdef" * 2
    kinds = ("{0}.mds", "{0}-3.mds.zstd", ".mdsmix/{0}", ".mdsmix/{0}-01234567.bad", ".mdsmix/{0}-01234567.unit", ".mdsmix/run-0123456789abcdef", ".mdsmix/part-3-of-64", "quarantine/{0}-01234567.jsonl.zst")  # fmt: skip
    ours = [name.format(value) for name in kinds]
    left = (f"index.json.{value[:16]}.tmp", f".mdsmix/{value}.{value[16:]}.tmp")
    theirs = ("README.md", "shard.00000.mds", f"{value}.mds.bak", f"sub/{value}.mds", f"{value.upper()}.mds", ".mdsmix/mixed", f"quarantine/{value}.txt", "notes.tmp")  # fmt: skip
    for name in (*ours, *left, *theirs):
        (published / name).parent.mkdir(exist_ok=True)
        (published / name).write_bytes(b"1")
    outside = published.parent / f"{value}.mds"
    outside.write_bytes(b"1")
    (published / f"{'f' * 32}.mds").symlink_to(outside)
    assert garbage(published) == [], "a write may be at work"
    age(published, 8)
    assert {item.name for item in delete(published)} == {*ours, *left, f"{'f' * 32}.mds"}
    assert theirs[-1] in files(published)
    assert outside.exists()
    assert is_whole(published)


def test_nothing_is_deleted_while_a_conversion_is_at_work(republished: Path) -> None:
    age(republished, 8)
    before = files(republished)
    with lease(locate(republished), lambda _: None), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(mdsmix, "gc", republished, "--delete").result()
        listed = pool.submit(mdsmix, "gc", republished).result()
    assert (answer.code, answer.out) == (4, "")
    assert "is being written by process" in answer.err
    assert listed.code == 0
    assert files(republished) == before


def test_who_lost_the_lease_deletes_nothing_more(
    republished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for so long that another run took the stream over, and may name what was garbage."""
    before = files(republished)
    found = gc.find_garbage

    def find(folder: Location, *settings: Any) -> list[Garbage]:
        garbage = found(folder, *settings)
        (republished / ".mdsmix" / "lease").write_bytes(orjson.dumps(asdict(OTHER)))
        monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.001)
        return garbage

    monkeypatch.setattr(gc, "find_garbage", find)
    answer = mdsmix("gc", republished, "--older-than", "0s", "--delete")
    assert answer.code == 4
    assert "was taken over by another run" in answer.err
    assert files(republished).items() >= before.items()


def test_unit_records_are_gone_for_good_before_their_shards_go(
    republished: Path, tmp_path: Path
) -> None:
    """After a power cut in between a record would be there again, and be believed without its shards."""
    age(republished, 8)
    disk = Disk(republished, tmp_path / "log")
    with disk.recording():
        assert delete(republished)
    done = [(call.what, call.name) for call in disk.calls]
    gone = [at for at, (what, name) in enumerate(done) if what == "unlink" and OWN.search(name)]
    shards = [at for at in gone if done[at][1].endswith(".mds")]
    records = [at for at in gone if done[at][1].startswith(".mdsmix/")]
    assert ("sync", ".mdsmix") in done[max(records) : min(shards)]


def test_a_damaged_index_or_manifest_stops_it(republished: Path) -> None:
    """What is in use cannot be known then."""
    age(republished, 8)
    for name in ("index.json", "mdsmix.manifest"):
        content = (republished / name).read_bytes()
        (republished / name).write_bytes(content[:-9])
        answer = mdsmix("gc", republished, "--delete")
        assert answer.code == 4
        assert name in answer.err
        (republished / name).write_bytes(content)
    assert garbage(republished)


@pytest.mark.parametrize(("text", "seconds"), [
    ("7d", WEEK), ("12h", 43_200), ("30m", 1800), ("0s", 0),
    ("", None), ("7", None), ("d", None), ("-1d", None), ("1.5d", None), ("7 days", None),
])  # fmt: skip
def test_ages(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert seconds_of(text) == seconds
    else:
        with pytest.raises(RecipeError, match="is no age: write for example 7d"):
            seconds_of(text)


def test_the_command(republished: Path) -> None:
    """Dry unless asked; every file with its bytes and age, then the sum; a warning where seven days are cut short."""
    assert mdsmix("gc", republished).out == f"{republished}: 0 files, 0 bytes: all is in use\n"
    age(republished, 8)
    before = files(republished)
    answer = mdsmix("gc", republished.parent)
    *lines, last = answer.out.splitlines()
    assert (answer.code, answer.err, len(lines)) == (0, "", 6)
    assert last.endswith("bytes: nothing is deleted without --delete")
    assert all("8.0 days" in line for line in lines)
    assert files(republished) == before
    answer = mdsmix("gc", republished, "--older-than", "1h", "--delete")
    assert answer.out.splitlines()[:-1] == lines
    assert answer.out.endswith("bytes: deleted\n")
    assert "running jobs and caches" in answer.err
    assert len(files(republished)) == len(before) - 6
    assert mdsmix("gc", republished / "nowhere").code == 4
    assert mdsmix("gc", republished, "--older-than", "soon").code == 2
