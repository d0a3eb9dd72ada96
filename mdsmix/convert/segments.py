"""Segments: the unit records and fingerprints of many units in a few files, since a file for each unit is a request for each.

A segment, `.mdsmix/<hash>.segment`, is named by the xxh128 of its bytes and never changes. It holds the length of its head in 8 bytes,
the head, and the fingerprints of its units as their own files held them, one behind the other. The head, a Zstandard frame with a
checksum, says which fingerprints follow and in how many bytes, and has a line for each unit record. A unit may have a record of its
own too, which is then the newer one. A damaged segment counts as none, as a damaged record does: its units are converted again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import orjson
import xxhash

from mdsmix.convert.ledger import FOLDER, UnitRecord, decompressed, parse_record
from mdsmix.errors import Unreachable
from mdsmix.shards.shard_files import write_if_new
from mdsmix.storage import Location, together

NAME = re.compile(r"([0-9a-f]{32})\.segment")
LENGTH = 8
"Bytes of the length of a head."
HEAD_BYTES = 2 << 20
"Of a segment are asked for at once: records of 1,000 units are half a MB."
STRETCH_BYTES = 2 << 20
"Of fingerprints that are asked for at once, if they are of more than one unit."
AT_ONCE = 16
"Stretches that are asked for together."
WHOLE = -1
"The bytes of a place that is a file."
_KEY = slice(len(b'{"key":"'), len(b'{"key":"') + 32)
"Where the key stands in the line of a record, whose first field it is."


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the fingerprints of a unit lie."""

    file: str
    start: int
    bytes: int

    @property
    def end(self) -> int:
        return self.start + self.bytes


@dataclass(frozen=True, slots=True)
class UnitSegment:
    """What a segment holds, or all segments of a stream."""

    records: Mapping[str, bytes] = field(default_factory=dict)
    "Key of a unit -> its record as JSON."
    fingerprints: Mapping[str, Extent] = field(default_factory=dict)

    def record(self, key: str) -> UnitRecord | None:
        line = self.records.get(key)
        return parse_record(line, key) if line else None

    def only(self, keys: Collection[str], bases: Collection[str]) -> UnitSegment:
        """Of it the records with these keys, and the fingerprints with those."""
        return UnitSegment(
            {key: line for key, line in self.records.items() if key in keys},
            {base: at for base, at in self.fingerprints.items() if base in bases},
        )


def read_segments(folder: Location, names: Iterable[str]) -> dict[str, UnitSegment]:
    """The segments among these names of files in the ledger, by their names."""
    wanted = sorted(filter(NAME.fullmatch, names))
    found = zip(wanted, together(partial(_read_segment, folder), wanted), strict=True)
    return {name: segment for name, segment in found if segment}


def joined(segments: Iterable[UnitSegment], own: Collection[str] = ()) -> UnitSegment:
    """All of them as one. `own`: names of files of units, whose records are newer than those of a segment."""
    records, fingerprints = dict[str, bytes](), dict[str, Extent]()
    for segment in segments:
        records |= segment.records
        fingerprints |= segment.fingerprints
    for key in records.keys() & set(own):
        del records[key]
    return UnitSegment(records, fingerprints)


def _read_segment(folder: Location, name: str) -> UnitSegment | None:
    """None where it is missing, or its head is damaged or another's."""
    at = folder / FOLDER / name
    first = _bytes_of(at, 0, HEAD_BYTES) or b""
    size = int.from_bytes(first[:LENGTH], "little")
    if LENGTH + size > len(first) == HEAD_BYTES:
        first += _bytes_of(at, HEAD_BYTES, LENGTH + size - HEAD_BYTES) or b""
    head = decompressed(first[LENGTH : LENGTH + size])
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        said, *lines = (head or b"").split(b"\n")
        sizes = [(base, int(of)) for base, of in orjson.loads(said)]
        starts = accumulate((of for _, of in sizes), initial=LENGTH + size)
        places = zip(sizes, starts, strict=False)
        return UnitSegment(
            {line[_KEY].decode(): line for line in lines},
            {base: Extent(name, start, of) for (base, of), start in places},
        )
    return None


def write_segment(
    folder: Location, records: Iterable[bytes], fingerprints: Sequence[tuple[str, bytes]]
) -> str:
    """Writes these records, as JSON, and the fingerprints of these keys into one segment, where it is not there yet or damaged, since the
    files of its units are deleted then; returns its name."""
    from zstandard import ZstdCompressor

    sizes = orjson.dumps([(base, len(content)) for base, content in fingerprints])
    head = ZstdCompressor(level=3, write_checksum=True).compress(b"\n".join([sizes, *records]))
    stored = b"".join([len(head).to_bytes(LENGTH, "little"), head, *(of for _, of in fingerprints)])
    name = f"{xxhash.xxh128_hexdigest(stored)}.segment"
    write_if_new(folder / FOLDER / name, stored)
    return name


def shrink(
    folder: Location, name: str, left: UnitSegment, delete: Callable[[Location], None]
) -> None:
    """Puts what is left of a segment in its place: written before the other goes, so that a run that is killed loses nothing."""
    kept = zip(left.fingerprints, read_extents(folder, left.fingerprints.values()), strict=True)
    fingerprints = [(base, content) for base, content in kept if content]
    if not (left.records or fingerprints) or name != write_segment(
        folder, left.records.values(), fingerprints
    ):
        delete(folder / FOLDER / name)


def drop_records(folder: Location, keys: Collection[str]) -> None:
    """Deletes the records of these units, those in segments too."""
    together(lambda key: (folder / FOLDER / key).delete(), keys)
    names = [name for name, _ in (folder / FOLDER).list()]
    for name, segment in read_segments(folder, names).items():
        left = segment.only(segment.records.keys() - keys, segment.fingerprints)
        if len(left.records) < len(segment.records):
            shrink(folder, name, left, lambda at: at.delete())


def read_extents(folder: Location, extents: Iterable[Extent]) -> Iterator[bytes | None]:
    """What lies at each, in their order; None where it is gone. Only a few stretches are held."""
    stretches = list(_stretches(extents))
    for begin in range(0, len(stretches), AT_ONCE):
        for found in together(partial(_read, folder), stretches[begin : begin + AT_ONCE]):
            yield from found


def _stretches(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Extents that follow each other in a file, so that one request brings them all."""
    stretch: list[Extent] = []
    for extent in extents:
        if stretch and not _follows(extent, stretch):
            yield stretch
            stretch = []
        stretch.append(extent)
    if stretch:
        yield stretch


def _follows(extent: Extent, stretch: Sequence[Extent]) -> bool:
    first, last = stretch[0], stretch[-1]
    is_next = (extent.file, extent.start) == (last.file, last.end) and last.bytes != WHOLE
    return is_next and extent.end - first.start <= STRETCH_BYTES


def _read(folder: Location, stretch: Sequence[Extent]) -> list[bytes | None]:
    at, start, last = folder / FOLDER / stretch[0].file, stretch[0].start, stretch[-1]
    if last.bytes == WHOLE:
        found = at.fetch()
        return [found[1] if found else None]
    content = _bytes_of(at, start, last.end - start)
    if content is None:
        return [None] * len(stretch)
    return [content[extent.start - start :][: extent.bytes] for extent in stretch]


def _bytes_of(at: Location, start: int, length: int) -> bytes | None:
    """None where there is no such file."""
    try:
        return at.read(start, length)
    except Unreachable:
        if at.stat():
            raise
        return None
