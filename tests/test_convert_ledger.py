"""Files of finished units without a conversion: what is read of them is what was put into them, byte by byte. What a record says is believed
without a look at the source, so it is read with care."""

from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
import xxhash
from zstandard import ZstdCompressor

from mdsmix.convert import ledger
from mdsmix.convert.ledger import (
    FOLDER,
    SEGMENT,
    UnitFile,
    UnitRecord,
    pack,
    read_blobs,
    read_units,
    record_of,
    write_segment,
)
from mdsmix.convert.stored import StoredUnits, list_stored
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
        write_segment(at, [pack([line(key)], {key: content(key)}) for key in keys])
    return at


def names(folder: Location) -> list[str]:
    return [name for name, _ in (folder / FOLDER).list()]


def segments(folder: Location) -> dict[str, UnitFile]:
    return {name: read_units(folder, name) for name in filter(SEGMENT.fullmatch, names(folder))}


def places(folder: Location) -> dict[str, str]:
    """The name of each blob in a segment, and that segment."""
    return {blob: name for name, found in segments(folder).items() for blob in found.blobs}


def test_the_file_of_a_unit_is_newer_than_any_segment(folder: Location) -> None:
    own, hashes = f"{KEYS[1]}-01234567.unit", f"{KEYS[2]}.hashes"
    for name in (own, hashes):
        (folder / FOLDER / name).write(pack([line(KEYS[1])], {}))
    found = list_stored(cast(Any, SimpleNamespace(shard_folders=[folder])))
    assert found.keys == {*KEYS}
    assert (found.files[KEYS[1]], found.hashes_of(KEYS[2])) == (own, hashes)
    assert {found.files[KEYS[0]], found.files[KEYS[5]]} == found.segments.keys()


@pytest.mark.parametrize("head_bytes", [9, 2 << 20])
def test_fingerprints_are_read_in_any_order_as_they_were_written(
    folder: Location, monkeypatch: pytest.MonkeyPatch, head_bytes: int
) -> None:
    """Whatever is asked for at once. One key has a file of its own."""
    monkeypatch.setattr(ledger, "HEAD_BYTES", head_bytes)
    own = "f" * 32
    (folder / FOLDER / f"{own}.hashes").write(pack((), {"other": b"1", own: b"own"}))
    for found in segments(folder).values():
        assert {key: record_of(line).key for key, line in found.records.items()} == {
            key: key for key in found.blobs
        }
    file = f"{own}.hashes"
    joined = {f"{key}.hashes": name for key, name in places(folder).items()}
    stored = StoredUnits(files={file: file, **joined})
    assert sorted(joined) == [f"{key}.hashes" for key in KEYS]
    for order in permutations([*KEYS[2:4], own]):
        expected = [b"own" if key == own else content(key) for key in order]
        wanted = [(key, stored.hashes_of(key)) for key in order]
        assert list(read_blobs(folder, wanted)) == expected


def test_a_segment_whose_head_was_changed_says_nothing_else(folder: Location) -> None:
    """What it says of a unit would be published without a look at the shards. A bit that Zstandard does not read changes nothing."""
    for name, whole in segments(folder).items():
        stored = (folder / FOLDER / name).read()
        size, found = 8 + int.from_bytes(stored[:8], "little"), 0
        for at in range(0, size, 5):
            other = bytearray(stored)
            other[at] ^= 1 << at % 8
            (folder / FOLDER / name).write(bytes(other))
            left = read_units(folder, name)
            assert left in (whole, UnitFile()), at
            found += left == whole
        assert found < size // 20
        for length in (0, 5, 8, 20, size - 1):
            (folder / FOLDER / name).write(stored[:length])
            assert read_units(folder, name) == UnitFile()


def test_fingerprints_that_cannot_be_read_are_not_taken_for_none(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that fails for a moment: their records would be published as looked at by nobody."""
    found = places(folder)

    def failing(self: LocalPath, *_: int) -> bytes:
        raise Unreachable("for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(LocalPath, "fetch", failing)
        with pytest.raises(Unreachable, match="for a moment"):
            list(read_blobs(folder, list(found.items())))
    at = folder / FOLDER / found[KEYS[2]]
    for harm in (lambda: at.write(at.read()[:-1]), at.delete):  # behind its head, which is believed
        harm()
        with pytest.raises(Unreachable, match="segment is damaged or gone"):
            list(read_blobs(folder, [(KEYS[2], found[KEYS[2]])]))
    assert list(read_blobs(folder, [(KEYS[3], found[KEYS[3]])])) == [content(KEYS[3])]


def test_what_is_no_segment_is_none_though_its_name_says_so(folder: Location) -> None:
    for head in (b"", b"[]", b"{}", b"3", b"[[1]]", b'[["a", "b"]]', b"\xff" * 50):
        frame = ZstdCompressor(write_checksum=True).compress(head)
        for stored in (head, len(frame).to_bytes(8, "little") + frame):
            name = f"{xxhash.xxh128_hexdigest(stored)}.segment"
            (folder / FOLDER / name).write(stored)
            assert not read_units(folder, name).records
    assert sorted(places(folder)) == KEYS


def test_a_whole_record_of_another_form_is_none(folder: Location) -> None:
    """As an older or a newer mdsmix may have written it."""
    name, key = f"{KEYS[0]}-01234567.unit", b'{"key":"%s"' % KEYS[0].encode()
    for content in (b"[]", b"3", b"{", key + b"}", key + b',"backend":3}'):
        (folder / FOLDER / name).write(pack([content], {}))
        assert record_of(read_units(folder, name).records.get(KEYS[0], b"")) is None
