"""Packs without a conversion: what is read of them is what was put into them, file by file and byte by byte."""

from __future__ import annotations

from dataclasses import asdict
from itertools import permutations
from pathlib import Path

import orjson
import pytest
import xxhash
import zstandard
from zstandard import ZstdCompressor, ZstdDecompressor

from mdsmix.convert.hashes import hashes_name, parse_hashes, stored_hashes
from mdsmix.convert.ledger import FOLDER, UnitRecord
from mdsmix.convert.packs import (
    NAME,
    Pack,
    Place,
    drop_records,
    read_packs,
    rewrite,
    write_fingerprints,
    write_pack,
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
    """Two packs of three units each, and two files of fingerprints that both begin with as many bytes."""
    at = locate(str(tmp_path))
    for keys in (KEYS[:3], KEYS[3:]):
        name, sizes = write_fingerprints(at, [(key, content(key)) for key in keys])
        write_pack(at, Pack({key: line(key) for key in keys}, {name: sizes}))
    return at


def names(folder: Location) -> list[str]:
    return [name for name, _ in (folder / FOLDER).list()]


def test_a_unit_with_a_record_of_its_own_is_not_taken_for_a_packed_one(folder: Location) -> None:
    """It is the newer one, and the next compaction packs it."""
    found = read_packs(folder, names(folder), alone=[KEYS[1], "no record"])
    assert sorted(found.records) == [key for key in KEYS if key != KEYS[1]]
    assert sorted(found.fingerprints) == KEYS


def test_fingerprints_whose_file_is_gone_are_not_known(folder: Location) -> None:
    """Else they would be written never again, and their records not be looked at for duplicates."""
    packed = read_packs(folder, names(folder)).fingerprints
    gone = packed[KEYS[0]].file
    left = read_packs(folder, [name for name in names(folder) if name != gone])
    assert sorted(left.fingerprints) == KEYS[3:]
    assert sorted(left.records) == KEYS


def test_fingerprints_are_read_in_any_order_as_they_were_written(tmp_path: Path) -> None:
    """One key has a file of its own, one has none; only what lies side by side is read at once."""
    at = locate(str(tmp_path))
    told = {key: key[-1].encode() * 5 for key in KEYS[:5]} | {KEYS[5]: None}
    packed = dict[str, Place]()
    for keys in (KEYS[:2], KEYS[2:4]):  # what begins in one file where something of the other ends
        name, _ = write_fingerprints(at, [(key, told[key] or b"") for key in keys])
        packed |= {key: Place(name, 5 * number, 5) for number, key in enumerate(keys)}
    (at / FOLDER / hashes_name(KEYS[4])).write(told[KEYS[4]] or b"")
    for order in permutations(KEYS, 3):
        assert list(stored_hashes(at, order, packed)) == [told[key] for key in order]


def test_of_a_pack_only_the_records_go_that_are_dropped(folder: Location) -> None:
    """And those that have a file of their own."""
    (folder / FOLDER / KEYS[4]).write(line(KEYS[4]))
    drop_records(folder, [KEYS[0], KEYS[4]])
    assert KEYS[4] not in names(folder)
    found = read_packs(folder, names(folder))
    assert sorted(found.records) == [key for key in KEYS if key not in (KEYS[0], KEYS[4])]
    assert sorted(found.fingerprints) == KEYS
    assert list(stored_hashes(folder, KEYS, found.fingerprints)) == list(map(content, KEYS))


def test_what_is_left_of_a_pack_is_there_before_the_pack_goes(folder: Location) -> None:
    """Whoever is killed in between has units twice, and loses none. What is left as it was is the pack itself, and stays."""
    packs, gone = read_packs(folder, names(folder)).packs, list[str]()

    def delete(at: Location) -> None:
        others = read_packs(folder, [name for name in names(folder) if name != at.name])
        assert left.records.keys() <= others.records.keys()
        gone.append(at.name)
        at.delete()

    for name, pack in packs.items():
        left = pack
        rewrite(folder, name, left, delete)
        left = pack.only([*pack.records][1:], ())
        rewrite(folder, name, left, delete)
    assert gone == list(packs)


def test_a_pack_that_was_changed_is_none_though_it_can_be_read(folder: Location) -> None:
    """What it says of a unit would be published without a look at the shards."""
    for name in filter(NAME.fullmatch, names(folder)):
        content = ZstdDecompressor().decompress((folder / FOLDER / name).read())
        other = content.replace(b'"backend":"b"', b'"backend":"c"')
        (folder / FOLDER / name).write(ZstdCompressor(level=3).compress(other))
    assert read_packs(folder, names(folder)).packs == {}


def test_fingerprints_that_cannot_be_read_are_not_taken_for_none(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that fails for a moment: their records would be published as looked at by nobody."""
    packed = read_packs(folder, names(folder)).fingerprints

    def failing(self: LocalPath, *_: int) -> bytes:
        raise Unreachable("for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(LocalPath, "read", failing)
        with pytest.raises(Unreachable, match="for a moment"):
            list(stored_hashes(folder, KEYS, packed))
    (folder / FOLDER / packed[KEYS[0]].file).delete()
    assert list(stored_hashes(folder, KEYS[2:4], packed)) == [None, content(KEYS[3])]


def test_fingerprints_that_are_not_whole_are_none() -> None:
    """Their record would stand beside the fingerprint of another."""
    frame = zstandard.ZstdCompressor(write_checksum=True).compress
    assert parse_hashes(frame(bytes(24))) is None
    found = parse_hashes(frame(bytes(32)))
    assert found is not None
    assert found.shape == (2, 2)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"[]",
        b'{"fingerprints": 3}',
        b'{"fingerprints": {"a": [1]}}',
        b"{}\n\xff" + b"\xff" * 50,
    ],
)
@pytest.mark.parametrize("is_packed", [True, False])
def test_what_is_no_pack_is_none_though_its_name_says_so(
    folder: Location, head: bytes, is_packed: bool
) -> None:
    stored = ZstdCompressor().compress(head) if is_packed else head
    (folder / FOLDER / f"{xxhash.xxh128_hexdigest(stored)}.units.zst").write(stored)
    assert sorted(read_packs(folder, names(folder)).records) == KEYS
