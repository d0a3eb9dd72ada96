"""Segments without a conversion: what is read of them is what was put into them, byte by byte."""

from __future__ import annotations

from dataclasses import asdict
from itertools import permutations
from pathlib import Path

import orjson
import pytest
import xxhash
import zstandard
from zstandard import ZstdCompressor

from mdsmix.convert import segments
from mdsmix.convert.hashes import hashes_name, parse_hashes, stored_hashes
from mdsmix.convert.ledger import FOLDER, UnitRecord
from mdsmix.convert.segments import (
    NAME,
    UnitSegment,
    drop_records,
    joined,
    read_segments,
    shrink,
    write_segment,
)
from mdsmix.errors import Unreachable
from mdsmix.shards.counts import Records, Totals
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath

KEYS = [f"{number:032x}" for number in range(6)]


def line(key: str) -> bytes:
    record = UnitRecord(key=key, backend="b", shards=[], totals=Totals(), records=Records())
    return orjson.dumps(asdict(record))


def content(key: str) -> bytes:
    """Of another length for each, and of other bytes."""
    return key[-1].encode() * (3 + int(key[-1]))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    """Two segments of three units each."""
    at = locate(str(tmp_path))
    for keys in (KEYS[:3], KEYS[3:]):
        write_segment(at, map(line, keys), [(key, content(key)) for key in keys])
    return at


def names(folder: Location) -> list[str]:
    return [name for name, _ in (folder / FOLDER).list()]


def all_of(folder: Location) -> UnitSegment:
    return joined(read_segments(folder, names(folder)).values())


def test_a_unit_with_a_record_of_its_own_is_not_taken_for_a_joined_one(folder: Location) -> None:
    """It is the newer one, and the next publication joins it."""
    found = joined(read_segments(folder, names(folder)).values(), own=[KEYS[1], "no record"])
    assert sorted(found.records) == [key for key in KEYS if key != KEYS[1]]
    assert sorted(found.fingerprints) == KEYS


@pytest.mark.parametrize("head_bytes", [9, 64, 2 << 20])
@pytest.mark.parametrize("stretch_bytes", [1, 8, 2 << 20])
def test_fingerprints_are_read_in_any_order_as_they_were_written(
    folder: Location, monkeypatch: pytest.MonkeyPatch, head_bytes: int, stretch_bytes: int
) -> None:
    """Whatever is asked for at once. One key has a file of its own, one has none."""
    monkeypatch.setattr(segments, "HEAD_BYTES", head_bytes)
    monkeypatch.setattr(segments, "STRETCH_BYTES", stretch_bytes)
    own, none = "f" * 32, "e" * 32
    (folder / FOLDER / hashes_name(own)).write(b"own")
    found = all_of(folder)
    assert {key: found.record(key).key for key in KEYS} == {key: key for key in KEYS}
    for order in permutations([*KEYS[1:5], own, none], 4):
        told = {own: b"own", none: None}
        expected = [told[key] if key in told else content(key) for key in order]
        assert list(stored_hashes(folder, order, found.fingerprints)) == expected


def test_of_a_segment_only_the_records_go_that_are_dropped(folder: Location) -> None:
    """And those that have a file of their own."""
    (folder / FOLDER / KEYS[4]).write(line(KEYS[4]))
    drop_records(folder, [KEYS[0], KEYS[4]])
    assert KEYS[4] not in names(folder)
    found = all_of(folder)
    assert sorted(found.records) == [key for key in KEYS if key not in (KEYS[0], KEYS[4])]
    assert sorted(found.fingerprints) == KEYS
    assert list(stored_hashes(folder, KEYS, found.fingerprints)) == list(map(content, KEYS))


def test_what_is_left_of_a_segment_is_there_before_the_segment_goes(folder: Location) -> None:
    """Whoever is killed in between has units twice, and loses none. What is left as it was is the segment itself, and stays."""
    each, gone = read_segments(folder, names(folder)), list[str]()

    def delete(at: Location) -> None:
        others = [name for name in names(folder) if name != at.name]
        found = joined(read_segments(folder, others).values())
        assert left.records.keys() <= found.records.keys()
        assert left.fingerprints.keys() <= found.fingerprints.keys()
        gone.append(at.name)
        at.delete()

    for name, segment in each.items():
        left = segment
        shrink(folder, name, left, delete)
        left = segment.only([*segment.records][1:], [*segment.records][:2])
        shrink(folder, name, left, delete)
    assert gone == list(each)


def test_nothing_is_left_in_place_of_a_segment_that_is_empty(folder: Location) -> None:
    for name in read_segments(folder, names(folder)):
        shrink(folder, name, UnitSegment(), lambda at: at.delete())
    assert names(folder) == []


def test_a_segment_whose_head_was_changed_says_nothing_else(folder: Location) -> None:
    """What it says of a unit would be published without a look at the shards. A bit that Zstandard does not read changes nothing."""
    for name, whole in read_segments(folder, names(folder)).items():
        stored = (folder / FOLDER / name).read()
        size, found = 8 + int.from_bytes(stored[:8], "little"), 0
        for at in range(size):
            other = bytearray(stored)
            other[at] ^= 1 << at % 8
            (folder / FOLDER / name).write(bytes(other))
            left = read_segments(folder, [name])
            assert left.get(name, whole) == whole, at
            found += name in left
        assert found < size // 10


@pytest.mark.parametrize("length", [0, 5, 8, 20, -40])
def test_a_segment_that_was_cut_off_in_its_head_is_none(folder: Location, length: int) -> None:
    (name, *_) = filter(NAME.fullmatch, names(folder))
    stored = (folder / FOLDER / name).read()
    size = 8 + int.from_bytes(stored[:8], "little")
    (folder / FOLDER / name).write(stored[:length] if length >= 0 else stored[: size - 1])
    assert name not in read_segments(folder, names(folder))


def test_fingerprints_that_cannot_be_read_are_not_taken_for_none(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that fails for a moment: their records would be published as looked at by nobody."""
    found = all_of(folder).fingerprints

    def failing(self: LocalPath, *_: int) -> bytes:
        raise Unreachable("for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(LocalPath, "read", failing)
        with pytest.raises(Unreachable, match="for a moment"):
            list(stored_hashes(folder, KEYS, found))
    (folder / FOLDER / found[KEYS[0]].file).delete()
    assert list(stored_hashes(folder, KEYS[2:4], found)) == [None, content(KEYS[3])]


def test_fingerprints_that_are_not_whole_are_none() -> None:
    """Their record would stand beside the fingerprint of another."""
    frame = zstandard.ZstdCompressor(write_checksum=True).compress
    assert parse_hashes(frame(bytes(24))) is None
    found = parse_hashes(frame(bytes(32)))
    assert found is not None
    assert found.shape == (2, 2)


@pytest.mark.parametrize("head", [b"", b"[]", b"{}", b"3", b"[[1]]", b'[["a", "b"]]', b"\xff" * 50])
def test_what_is_no_segment_is_none_though_its_name_says_so(folder: Location, head: bytes) -> None:
    frame = ZstdCompressor(write_checksum=True).compress(head)
    for stored in (head, len(frame).to_bytes(8, "little") + frame):
        name = f"{xxhash.xxh128_hexdigest(stored)}.segment"
        (folder / FOLDER / name).write(stored)
        assert not joined(read_segments(folder, [name]).values()).records
    assert sorted(all_of(folder).records) == KEYS
