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
from tests.converting import Web, age, files, is_whole, mdsmix, refused

WEEK = 7 * 86_400.0
TEXTS = [f"Document {n} is about the number {n}. " * 3 for n in range(40)]


@pytest.fixture
def web(web: Web) -> Web:
    web.windows(1500)
    web.holds([*TEXTS, {"text": 5}])
    return web


@pytest.fixture
def republished(web: Web, request: Any) -> Path:
    """Its first and its last unit were edited, the bad record mended; no line in between begins
    elsewhere. A parameter says how many units are packed together.
    """
    web.patch.setattr(finished_units, "FEWEST", getattr(request, "param", finished_units.FEWEST))
    web.run()
    before = {shard.name for shard in web.shards}
    web.holds([TEXTS[0].upper(), *TEXTS[1:], "good"])
    web.run()
    web.replaced = len(before - {shard.name for shard in web.shards})
    assert web.replaced > 1
    return web.train


def garbage(folder: Path, seconds: float = WEEK) -> list[Garbage]:
    return find_garbage(locate(folder), seconds)


def kinds(folder: Path) -> Counter[str]:
    return Counter(item.kind for item in garbage(folder))


def delete(folder: Path, seconds: float = WEEK) -> set[str]:
    return {item.name for item in gc.delete_garbage(locate(folder), seconds, lambda _: None)}


def test_what_an_edit_left_behind_goes_after_seven_days(republished: Path, web: Web) -> None:
    age(republished, 6.9)
    assert garbage(republished) == []
    age(republished, 7.1)
    before, found = web.files, garbage(republished)
    # Two units and the last part have other shards; their records, the bad ones of one, the
    # stream's index before.
    assert kinds(republished) == {"shard": web.replaced, "unit record": 2, "old index": 1}
    assert web.files == before, "finding deletes nothing"
    names = {item.name for item in found}
    assert delete(republished) == names == before.keys() - web.files.keys()
    assert sum(item.bytes for item in found) == sum(len(before[name]) for name in names)
    assert is_whole(republished)
    assert web.run().state == "up to date"
    age(republished, 100)
    assert delete(republished, 0) == set(), "what was published once has no garbage"
    assert web.anew().files == web.files


def test_shards_of_an_index_that_was_just_replaced_stay(republished: Path, web: Web) -> None:
    """They may be months old, and a job that opened the stream an hour ago still reads them."""
    age(republished, 100)
    (old,) = [name for name in files(republished) if name.endswith(".index")]
    age(republished, 1, [name for name in files(republished) if name.startswith(".mdsmix/")])
    assert not kinds(republished)
    age(republished, 100, [n for n in files(republished) if n != old])
    assert kinds(republished) == {"unit record": 2}
    delete(republished)
    age(republished, 8, [old])
    assert kinds(republished) == {"shard": web.replaced, "old index": 1}
    (republished / old).write_bytes(b"{")
    age(republished, 1, [old])
    assert kinds(republished) == {"shard": web.replaced}, "no reader can have a damaged index"


@pytest.mark.parametrize("republished", [100, 1], indirect=True)
def test_a_record_that_stays_keeps_its_shards(republished: Path, web: Web) -> None:
    """A record whose shards were gone would be believed by the next conversion. One that is packed
    stays with those beside it.
    """
    age(republished, 100)
    names = [name for name in web.files if name.endswith((".unit", ".segment"))]
    held = {name: read_unit_file(locate(republished), name[8:]).records for name in names}
    stale = {name: of.keys() - {*web.keys} for name, of in held.items() if of.keys() - {*web.keys}}
    lines = [held[name][key] for name, keys in stale.items() for key in keys]
    kept = {shard.stored.basename for line in lines for shard in parse_record(line).shards}
    found = {item.name for item in garbage(republished)}
    assert kept <= found
    assert found & stale.keys() == (stale.keys() if finished_units.FEWEST > 1 else set())
    age(republished, 1, stale)
    assert delete(republished) == found - kept - stale.keys()
    assert is_whole(republished)
    age(republished, 100)
    assert delete(republished) == found & (kept | stale.keys())
    assert web.run().state == "up to date"
    web.holds([*TEXTS, {"text": 5}])  # a packed record is there, and its shard is not
    assert web.run().done == len(kept) == 2
    assert is_whole(republished)


def test_only_names_that_mdsmix_gives_are_looked_at(web: Web) -> None:
    web.run()
    published = web.train
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
    age(published, 8)
    assert delete(published) == {*ours, *left, link}
    assert theirs[-1] in files(published)
    assert outside.exists()
    assert is_whole(published)


def test_nothing_is_deleted_while_a_conversion_is_at_work(republished: Path) -> None:
    age(republished, 8)
    before = files(republished)
    with hold_lease(locate(republished), lambda _: None), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(mdsmix, "gc", republished, "--delete").result()
        assert pool.submit(mdsmix, "gc", republished).result().code == 0
    assert (answer.code, answer.out) == (4, "")
    assert "is being written by process" in answer.err
    assert files(republished) == before


def test_who_lost_the_lease_deletes_nothing_more(web: Web, republished: Path) -> None:
    """It stood still for so long that another run took the stream over, and may name what was
    garbage.
    """
    before, found = files(republished), gc.find_garbage
    other = Holder(host="another.host", pid=12, since="now", token="b")

    def find(folder: Location, *settings: Any) -> list[Garbage]:
        garbage = found(folder, *settings)
        (republished / ".mdsmix" / "lease").write_bytes(orjson.dumps(asdict(other)))
        web.patch.setattr(lease_module, "BEAT_SECONDS", 0.001)
        return garbage

    web.patch.setattr(gc, "find_garbage", find)
    answer = mdsmix("gc", republished, "--older-than", "0s", "--delete")
    assert (answer.code, "was taken over by another run" in answer.err) == (4, True)
    assert files(republished).items() >= before.items()


def test_a_damaged_index_or_manifest_stops_it(republished: Path) -> None:
    age(republished, 8)
    for name in ("index.json", "mdsmix.manifest"):
        content = (republished / name).read_bytes()
        (republished / name).write_bytes(content[:-9])
        refused(mdsmix("gc", republished, "--delete"), 4, name)
        (republished / name).write_bytes(content)
    assert garbage(republished)


def test_ages() -> None:
    for text, seconds in {"7d": WEEK, "12h": 43_200, "30m": 1800, "0s": 0}.items():
        assert parse_age(text) == seconds
    for text in ("", "7", "d", "-1d", "1.5d", "7 days"):
        with pytest.raises(RecipeError, match="is not an age: write for example 7d"):
            parse_age(text)


def test_the_command(republished: Path, web: Web) -> None:
    """Dry unless asked; every file with its bytes and age, then the sum; a warning where seven days
    are cut short.
    """
    age(republished, 8)
    before = files(republished)
    answer = mdsmix("gc", republished.parent)
    *lines, last = answer.out.splitlines()
    assert (answer.code, answer.err, len(lines)) == (0, "", web.replaced + 3)
    assert last.endswith("bytes: nothing is deleted without --delete")
    assert all("8.0 days" in line for line in lines)
    assert files(republished) == before
    answer = mdsmix("gc", republished, "--older-than", "1h", "--delete")
    assert answer.out.splitlines()[:-1] == lines
    assert answer.out.endswith("bytes: deleted\n")
    assert "running jobs and caches" in answer.err
    assert len(files(republished)) == len(before) - 6
    for wrong in (("--older-than", "soon"), ("--keep", 0)):
        assert mdsmix("gc", republished, *wrong).code == 2
