"""Packs: the unit records and the fingerprints of many units in a few files, since a file for each unit is a request for each.

A pack of records, `.mdsmix/<hash>.units.zst`, holds the lines of unit records, and of fingerprints in which file and where in it they
lie: `.mdsmix/<hash>.fingerprints`, what the files of units held, one behind the other. Both are named by the xxh128 of their bytes and
never change. A unit may have a record of its own too, which is then the newer one. A damaged pack counts as none, as a damaged
record does: its units are converted again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import orjson
import xxhash

from mdsmix.convert.ledger import FOLDER, UnitRecord, parse_record
from mdsmix.shards.writing import write_if_new
from mdsmix.storage import Location, together

NAME = re.compile(r"([0-9a-f]{32})\.units\.zst")
FINGERPRINTS = re.compile(r"([0-9a-f]{32})\.fingerprints")
_KEY = slice(len(b'{"key":"'), len(b'{"key":"') + 32)
"Where the key stands in the line of a record, whose first field it is."

Sizes = Sequence[tuple[str, int]]
"Keys of the fingerprints in a file and the bytes of each, in their order."


@dataclass(frozen=True, slots=True)
class Place:
    """Where the fingerprints of a unit lie."""

    file: str
    start: int
    bytes: int

    def follows(self, other: Place) -> bool:
        """Whether it begins where the other ends."""
        return self.file == other.file and self.start == other.start + other.bytes


@dataclass(frozen=True, slots=True)
class Pack:
    """What a pack of records holds."""

    records: Mapping[str, bytes] = field(default_factory=dict)
    "Key of a unit -> its record as JSON."
    fingerprints: Mapping[str, Sizes] = field(default_factory=dict)
    "File of fingerprints -> what it holds."

    def __bool__(self) -> bool:
        return bool(self.records or self.fingerprints)

    def only(self, keys: Collection[str], bases: Collection[str]) -> Pack:
        """Of it the records with these keys, and the files that hold fingerprints with one of these keys."""
        return Pack(
            {key: line for key, line in self.records.items() if key in keys},
            {
                file: sizes
                for file, sizes in self.fingerprints.items()
                if any(key in bases for key, _ in sizes)
            },
        )

    def to_bytes(self) -> bytes:
        from zstandard import ZstdCompressor

        head = orjson.dumps({"fingerprints": self.fingerprints})
        return ZstdCompressor(level=3).compress(b"\n".join([head, *self.records.values()]))


@dataclass(frozen=True, slots=True)
class Packed:
    """What all packs of a stream hold."""

    packs: Mapping[str, Pack] = field(default_factory=dict)
    "By their names."
    records: Mapping[str, bytes] = field(default_factory=dict)
    fingerprints: Mapping[str, Place] = field(default_factory=dict)

    def record(self, key: str) -> UnitRecord | None:
        line = self.records.get(key)
        return parse_record(line, key) if line else None


def read_packs(folder: Location, names: Iterable[str], alone: Collection[str] = ()) -> Packed:
    """The packs among these names of files in the ledger. `alone`: names of files of units that are newer than any pack."""
    there = set(names)
    wanted = sorted(filter(NAME.fullmatch, there))
    found = zip(wanted, together(lambda name: read_pack(folder, name), wanted), strict=True)
    packs = {name: pack for name, pack in found if pack}
    records, places = dict[str, bytes](), dict[str, Place]()
    for pack in packs.values():
        records |= pack.records
        for file, sizes in ((f, s) for f, s in pack.fingerprints.items() if f in there):
            starts = accumulate((size for _, size in sizes), initial=0)
            for (key, size), start in zip(sizes, starts, strict=False):
                places[key] = Place(file, start, size)
    for key in records.keys() & set(alone):
        del records[key]
    return Packed(packs, records, places)


def read_pack(folder: Location, name: str) -> Pack | None:
    """None where it is missing or damaged."""
    from zstandard import ZstdDecompressor

    found = (folder / FOLDER / name).fetch()
    if found is None or not name.startswith(xxhash.xxh128_hexdigest(found[1])):
        return None
    head, *lines = ZstdDecompressor().decompress(found[1]).split(b"\n")
    files = {
        file: [(key, size) for key, size in sizes]
        for file, sizes in orjson.loads(head)["fingerprints"].items()
    }
    return Pack({line[_KEY].decode(): line for line in lines}, files)


@lru_cache(maxsize=64)
def _held(folder: Location, name: str) -> Pack | None:
    """A pack never changes, so whoever asks for one unit after the other need not read it again."""
    return read_pack(folder, name)


def packed_record(folder: Location, key: str) -> UnitRecord | None:
    """A record from the packs that lie there now: for a process that knows of no listing, and for a unit that another
    run has packed since it was listed."""
    for name, _ in (folder / FOLDER).list():
        pack = _held(folder, name) if NAME.fullmatch(name) else None
        if pack and key in pack.records:
            return parse_record(pack.records[key], key)
    return None


def decompressed(stored: bytes | None) -> bytes | None:
    """What a frame with a checksum holds; None where there is none, or a damaged one, whatever size it claims to hold."""
    from zstandard import ZstdDecompressor, ZstdError

    if stored is None:
        return None
    frame = ZstdDecompressor().decompressobj()
    try:
        content = frame.decompress(stored)
    except ZstdError:
        return None
    return content if frame.eof else None


def write_pack(folder: Location, pack: Pack) -> str:
    """Writes it where it is not there yet, or damaged, since the files of its units are deleted then; returns its name."""
    content = pack.to_bytes()
    name = f"{xxhash.xxh128_hexdigest(content)}.units.zst"
    write_if_new(folder / FOLDER / name, content)
    return name


def write_fingerprints(
    folder: Location, contents: Sequence[tuple[str, bytes]]
) -> tuple[str, Sizes]:
    """Writes the fingerprints of these keys into one file; returns its name and what it holds."""
    joined = b"".join(content for _, content in contents)
    name = f"{xxhash.xxh128_hexdigest(joined)}.fingerprints"
    write_if_new(folder / FOLDER / name, joined)
    return name, [(key, len(content)) for key, content in contents]


def rewrite(folder: Location, name: str, left: Pack, delete: Callable[[Location], None]) -> None:
    """Puts what is left of a pack in its place: written before the other goes, so that a run that is killed loses nothing."""
    if not left or write_pack(folder, left) != name:
        delete(folder / FOLDER / name)


def drop_records(folder: Location, keys: Collection[str]) -> None:
    """Deletes the records of these units, packed or not."""
    together(lambda key: (folder / FOLDER / key).delete(), keys)
    for name, pack in read_packs(folder, [n for n, _ in (folder / FOLDER).list()]).packs.items():
        left = pack.records.keys() - keys
        if len(left) < len(pack.records):
            records = {key: line for key, line in pack.records.items() if key in left}
            rewrite(folder, name, Pack(records, pack.fingerprints), lambda at: at.delete())
