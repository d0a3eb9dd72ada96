"""Packs: the unit records and fingerprints of many units in a few files, since a file for each unit is a request for each.

A pack of records, `.mdsmix/<hash>.units.zst`, holds the lines of unit records, and of fingerprints in which file and where in it
they lie: `.mdsmix/<hash>.fingerprints`, the content of the units' files, one behind the other. Both are named by
the xxh128 of their bytes and never change. A unit may have a record of its own too, which is then the newer one. A damaged pack counts as none, as a damaged
record does: its units are converted again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import orjson
import xxhash

from mdsmix.convert.ledger import FOLDER, UnitRecord, parse_record
from mdsmix.errors import Unreachable
from mdsmix.shards.writing import write_if_new
from mdsmix.storage import Location, together

NAME = re.compile(r"([0-9a-f]{32})\.units\.zst")
FINGERPRINTS = re.compile(r"([0-9a-f]{32})\.fingerprints")
_KEY = slice(len(b'{"key":"'), len(b'{"key":"') + 32)
"Where the key stands in the line of a record, whose first field it is."

Sizes = Sequence[tuple[str, int]]
"Keys of the fingerprints in a file and the bytes of each, in their order."
AT_ONCE = 16
"Files that are asked for together: half a MB each for records of 3 KB, at most 2 MiB of a pack."
WHOLE = -1
"The bytes of a place that is a file."


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
        """Of it the records with these keys, and the files that hold fingerprints with one of those."""
        return Pack(
            {key: line for key, line in self.records.items() if key in keys},
            {
                file: of
                for file, of in self.fingerprints.items()
                if any(key in bases for key, _ in of)
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
    records, fingerprints = dict[str, bytes](), dict[str, Place]()
    for pack in packs.values():
        records |= pack.records
        fingerprints |= _places(pack.fingerprints, there)
    for key in records.keys() & set(alone):
        del records[key]
    return Packed(packs, records, fingerprints)


def _places(files: Mapping[str, Sizes], there: Collection[str]) -> Iterator[tuple[str, Place]]:
    """Of all keys in those of the files that are there."""
    for file, sizes in ((file, of) for file, of in files.items() if file in there):
        starts = accumulate((size for _, size in sizes), initial=0)
        for (key, size), start in zip(sizes, starts, strict=False):
            yield key, Place(file, start, size)


def read_places(folder: Location, places: Iterable[Place]) -> Iterator[bytes | None]:
    """What lies at each, in their order; None where it is gone. Only a few files are held."""
    stretches = list(_stretches(places))
    for begin in range(0, len(stretches), AT_ONCE):
        for found in together(partial(_read, folder), stretches[begin : begin + AT_ONCE]):
            yield from found


def read_stored(
    name: Callable[[str], str], folder: Location, keys: Iterable[str], packed: Mapping[str, Place]
) -> Iterator[bytes | None]:
    """What is stored of all keys, as `read_places`: where `packed` says, or of others the file of that name."""
    return read_places(folder, (packed.get(key) or Place(name(key), 0, WHOLE) for key in keys))


def _stretches(places: Iterable[Place]) -> Iterator[list[Place]]:
    """Places that follow each other in a file, so that one request brings them all."""
    stretch: list[Place] = []
    for place in places:
        if stretch and not place.follows(stretch[-1]):
            yield stretch
            stretch = []
        stretch.append(place)
    if stretch:
        yield stretch


def _read(folder: Location, places: Sequence[Place]) -> list[bytes | None]:
    at, start, last = folder / FOLDER / places[0].file, places[0].start, places[-1]
    if last.bytes == WHOLE:
        found = at.fetch()
        return [found[1] if found else None]
    try:
        content = at.read(start, last.start + last.bytes - start)
    except Unreachable:
        if at.stat():
            raise
        return [None] * len(places)
    return [content[place.start - start :][: place.bytes] for place in places]


def read_pack(folder: Location, name: str) -> Pack | None:
    """None where it is missing, damaged or written by nobody who knows how."""
    from zstandard import ZstdError

    found = (folder / FOLDER / name).fetch()
    if found and name.startswith(xxhash.xxh128_hexdigest(found[1])):
        with suppress(ZstdError, ValueError, LookupError, TypeError, AttributeError):
            return _parsed(found[1])
    return None


def _parsed(content: bytes) -> Pack:
    from zstandard import ZstdDecompressor

    head, *lines = ZstdDecompressor().decompress(content).split(b"\n")
    said = orjson.loads(head)["fingerprints"]
    fingerprints = {file: [(key, size) for key, size in of] for file, of in said.items()}
    return Pack({line[_KEY].decode(): line for line in lines}, fingerprints)


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
            rewrite(folder, name, replace(pack, records=records), lambda at: at.delete())
