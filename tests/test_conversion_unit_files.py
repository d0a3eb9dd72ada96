"""Files of finished units: what is read of them is what was put into them, byte by byte, and with
care, since what a record says is believed without a look at the source. What is packed is found
again, whatever the moment at which a run ends; and no published byte tells of it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import count, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import orjson
import pytest
import xxhash
from zstandard import ZstdCompressor

from mdsmix.conversion import finished_units, unit_files
from mdsmix.conversion.finished_units import StoredUnits, list_stored
from mdsmix.conversion.planning import ArrayPart, Options
from mdsmix.conversion.run import convert_part
from mdsmix.conversion.unit_files import (
    FOLDER,
    SEGMENT,
    BlobRef,
    UnitFile,
    pack_unit_file,
    parse_record,
    read_blobs,
    read_unit_file,
)
from mdsmix.errors import Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.lease import Lease
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath
from tests.converting import Told, Web, flip, is_whole, public

KEYS = [f"{number:032x}" for number in range(6)]


def line(key: str) -> bytes:
    record = unit_files.UnitRecord(
        key=key, backend="b", shards=[], totals=Totals(), records=Records()
    )
    return orjson.dumps(asdict(record))


def content(key: str) -> bytes:
    """Of another length for each, and of other bytes."""
    return key[-1].encode() * (3 + int(key[-1]))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    """Two segments of three units each."""
    at = locate(str(tmp_path))
    for keys in (KEYS[:3], KEYS[3:]):
        unit_files.write_segment(
            at, [pack_unit_file([line(key)], {key: content(key)}) for key in keys]
        )
    return at


def segments(folder: Location) -> dict[str, UnitFile]:
    names = [name for name, _ in (folder / FOLDER).list()]
    return {name: read_unit_file(folder, name) for name in filter(SEGMENT.fullmatch, names)}


def places(folder: Location) -> dict[str, str]:
    """The name of each blob in a segment, and that segment."""
    return {blob: name for name, found in segments(folder).items() for blob in found.blobs}


def test_the_file_of_a_unit_is_newer_than_any_segment(folder: Location) -> None:
    own, hashes = f"{KEYS[1]}-01234567.unit", f"{KEYS[2]}.hashes"
    for name in (own, hashes):
        (folder / FOLDER / name).write(pack_unit_file([line(KEYS[1])], {}))
    found = list_stored(cast(Any, SimpleNamespace(shard_folders=[folder])))
    assert {name for name in found.files if len(name) == 32} == {*KEYS}
    assert (found.files[KEYS[1]], found.find_hashes_file(KEYS[2])) == (own, hashes)
    assert {found.files[KEYS[0]], found.files[KEYS[5]]} == found.segments.keys()


def test_fingerprints_are_read_in_any_order_as_they_were_written(folder: Location) -> None:
    """Whatever is asked for at once. One key has a file of its own."""
    own = "f" * 32
    (folder / FOLDER / f"{own}.hashes").write(pack_unit_file((), {"other": b"1", own: b"own"}))
    for found in segments(folder).values():
        keys = {key: parse_record(line).key for key, line in found.records.items()}
        assert keys == {key: key for key in found.blobs}
    file, joined = f"{own}.hashes", places(folder)
    assert sorted(joined) == KEYS
    files = {file: file, **{f"{key}.hashes": name for key, name in joined.items()}}
    for order in permutations([*KEYS[2:4], own]):
        expected = [b"own" if key == own else content(key) for key in order]
        wanted = [BlobRef(key, StoredUnits(files=files).find_hashes_file(key)) for key in order]
        for head_bytes in (9, 2 << 20):
            with mock.patch.object(unit_files, "HEAD_BYTES", head_bytes):
                assert list(read_blobs(folder, wanted)) == expected


def test_a_segment_whose_head_was_changed_says_nothing_else(folder: Location) -> None:
    """What it says of a unit would be published without a look at the shards. A bit that Zstandard
    does not read changes nothing.
    """
    for name, whole in segments(folder).items():
        held = (folder / FOLDER / name).read()
        size, found = 8 + int.from_bytes(held[:8], "little"), 0
        for at in range(0, size, 5):
            other = bytearray(held)
            other[at] ^= 1 << at % 8
            (folder / FOLDER / name).write(bytes(other))
            left = read_unit_file(folder, name)
            assert left in (whole, UnitFile()), at
            found += left == whole
        assert found < size // 20
        for length in (0, 5, 8, 20, size - 1):
            (folder / FOLDER / name).write(held[:length])
            assert read_unit_file(folder, name) == UnitFile()


def test_fingerprints_that_cannot_be_read_are_not_taken_for_none(folder: Location) -> None:
    """A store that fails for a moment: their records would be published as looked at by nobody."""
    found, failing = places(folder), Unreachable("for a moment")
    with (
        mock.patch.object(LocalPath, "fetch", side_effect=failing),
        pytest.raises(Unreachable, match="for a moment"),
    ):
        list(read_blobs(folder, [BlobRef(*blob) for blob in found.items()]))
    at = folder / FOLDER / found[KEYS[2]]
    for harm in (lambda: at.write(at.read()[:-1]), at.delete):  # behind its head, which is believed
        harm()
        with pytest.raises(Unreachable, match="segment is damaged or missing"):
            list(read_blobs(folder, [BlobRef(KEYS[2], found[KEYS[2]])]))
    assert list(read_blobs(folder, [BlobRef(KEYS[3], found[KEYS[3]])])) == [content(KEYS[3])]


def test_what_is_no_segment_or_record_is_none_though_its_name_says_so(folder: Location) -> None:
    """As an older or a newer mdsmix may have written it."""
    for head in (b"", b"[]", b"{}", b"3", b"[[1]]", b'[["a", "b"]]', b"\xff" * 50):
        frame = ZstdCompressor(write_checksum=True).compress(head)
        for written in (head, len(frame).to_bytes(8, "little") + frame):
            name = f"{xxhash.xxh128_hexdigest(written)}.segment"
            (folder / FOLDER / name).write(written)
            assert not read_unit_file(folder, name).records
    assert sorted(places(folder)) == KEYS
    name, key = f"{KEYS[0]}-01234567.unit", b'{"key":"%s"' % KEYS[0].encode()
    for content in (b"[]", b"3", b"{", key + b"}", key + b',"backend":3}'):
        (folder / FOLDER / name).write(pack_unit_file([content], {}))
        assert parse_record(read_unit_file(folder, name).records.get(KEYS[0], b"")) is None


TEXTS = [f"Document {n:02} is about the number {n:02}. " * 3 for n in range(21)]
LATER = [*TEXTS, {"text": 5}, "One more, which two others equal."]
FILES = re.compile(r"[0-9a-f]{32}.*\.(segment|unit|hashes)")
DROP = "streams.web.duplicates=drop"


@pytest.fixture
def web(web: Web) -> Web:
    """Seven units; two of them are packed together, and their fingerprints in files of a few."""
    web.windows(400)
    web.patch.setattr(finished_units, "FEWEST", 3)
    web.patch.setattr(finished_units, "MOST_FILES", 2)
    web.holds(TEXTS)
    return web


def kept(web: Web, pattern: re.Pattern[str] = FILES) -> list[str]:
    return list(filter(pattern.fullmatch, os.listdir(web.train / FOLDER)))


def together(web: Web) -> dict[str, bytes]:
    """The records that segments hold."""
    found = segments(locate(web.train)).values()
    return {key: line for of in found for key, line in of.records.items()}


def unpacked(web: Web, *overrides: str) -> dict[str, bytes]:
    """What is published of the same source where nothing is packed."""
    with web.patch.context() as patch:
        patch.setattr(finished_units, "FEWEST", 1000)
        return public(web.anew(*overrides).train)


@pytest.mark.parametrize("override", ["publish=versioned", DROP])
def test_units_are_packed_when_they_are_published_and_known_again(web: Web, override: str) -> None:
    outcome = web.run(override)
    assert (outcome.units, outcome.reused) == (7, 0)
    assert kept(web) == kept(web, SEGMENT)
    assert len(kept(web)) == (7 if override == DROP else 4)
    assert web.run(override).state == "up to date"
    web.holds([*LATER, LATER[-1], TEXTS[0]])
    assert web.run(override).reused == 6
    web.elsewhere("another")
    outcome = web.run(override)
    assert outcome.reused == outcome.units
    assert web.manifest.records.duplicates == (0 if override == DROP else 2)
    assert unpacked(web, override).items() <= public(web.train).items()
    if override == DROP:  # a part reads no source for duplicates whose fingerprints are packed
        told, recipe = Told(), open_recipe(web.recipe, [DROP])
        (part,) = convert_part(recipe, Options(part=ArrayPart(1, 2)), told)
        assert (part.units, part.reused, told.said) == (4, 4, [])


def test_wherever_joining_ends_nothing_is_lost_and_nothing_done_again(web: Web) -> None:
    """The second publication packs what the first left, and takes from a pack a unit that was done
    again since.
    """
    web.holds(TEXTS[:12])
    web.run()
    packed = parse_record(next(iter(together(web).values())))
    (web.train / packed.shards[0].stored.basename).unlink()
    web.holds(LATER)
    old, whole = web.files["index.json"], unpacked(web)
    before = shutil.copytree(web.out, web.folder / "before")
    for number in count():
        shutil.rmtree(web.out)
        shutil.copytree(before, web.out)
        with web.patch.context() as patch:
            ended = killed_at(patch, number)
            try:
                web.run()
            except KeyboardInterrupt:
                assert ended()
        assert web.files["index.json"] in (old, whole["index.json"])
        assert not web.run().done, "what was done before the end is not done again"
        assert whole.items() <= public(web.train).items()
        if not ended():
            break
    web.holds([*LATER, "And the last one."])
    outcome = web.run()
    assert (outcome.units, outcome.reused) in ((8, 7), (7, 6))
    assert is_whole(web.train)
    assert number > 6


def killed_at(patch: pytest.MonkeyPatch, number: int) -> Callable[[], bool]:
    """Joining ends before its write or deletion of this number; tells whether there was one."""
    calls = list[str]()

    def counting(change: Callable[..., Any], names: re.Pattern[str]) -> Callable[..., Any]:
        def one(self: LocalPath, *args: Any) -> Any:
            if self.parent.name == FOLDER and names.fullmatch(self.name):
                calls.append(self.name)
                if len(calls) > number:
                    raise KeyboardInterrupt
            return change(self, *args)

        return one

    patch.setattr(LocalPath, "write", counting(LocalPath.write, SEGMENT))
    patch.setattr(LocalPath, "delete", counting(LocalPath.delete, FILES))
    return lambda: len(calls) > number


def test_damaged_packs_are_written_anew_and_their_units_done_again_once(web: Web) -> None:
    """First one alone, then all; the new packs have the names of the damaged ones, and their sizes
    too.
    """
    web.run()
    for name, segment in segments(locate(web.train)).items():
        flip(web.train / FOLDER / name, 20)
        (web.train / "index.json").unlink()
        assert web.run().done == len(segment.records)
    for name in kept(web, SEGMENT):
        flip(web.train / FOLDER / name, 20)
    for machine, reused in (("another", 0), ("a third", 7)):
        web.elsewhere(machine)
        (web.train / "index.json").unlink()
        assert web.run().reused == reused


def test_where_duplicates_are_dropped_a_damaged_pack_is_told_and_made_anew(web: Web) -> None:
    web.run(DROP)
    packs, key = segments(locate(web.train)), web.keys[0]
    ((name, at),) = [(n, of.blobs[key]) for n, of in packs.items() if key in of.blobs]
    flip(web.train / FOLDER / name, (at.start + at.stop) // 2)
    web.holds(LATER)
    with pytest.raises(Unreachable, match=r"segment is damaged or missing.* --verify-target"):
        web.run(DROP)
    assert 0 < web.run(DROP, verify_target=True).reused < 6
    web.holds([*LATER, TEXTS[0]])
    assert web.run(DROP).reused == 6
    assert unpacked(web, DROP).items() <= public(web.train).items()


def test_a_run_that_lost_its_lease_deletes_none_of_the_files_that_it_has_packed(web: Web) -> None:
    """By then they may be another run's."""
    web.patch.setattr(Lease, "is_held_recently", lambda _: False)
    web.run()
    assert len(kept(web, unit_files.UNIT)) == len(together(web)) == 7
