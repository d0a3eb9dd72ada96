"""The format of the files in `.mdsmix/` next to a stream's shards: records of finished work units.

`<key>-<place>.unit` contains a window: its record, fingerprints and bad records. Its worker writes
it after the window's shards.

`<key>.hashes` contains the fingerprints of a window, if duplicates are dropped. It is written
before the stream is converted.

`<xxh128>.segment` contains up to 1,000 of these files. It is written at publication
(finished_units.py), and the files in it are deleted. `gc` deletes it when no stream needs its
units.

All three have the same format: the length of the head in 8 bytes, the head, and then the blobs
(fingerprints, bad records). The head is a Zstandard frame with a checksum; its first line is a JSON
list of the blobs' names and sizes, and each further line is a record. A file never changes. A
damaged file counts as empty, so its units are converted again.

A record is written after its unit's shards, so a unit with a record is complete. A killed run
therefore loses only the units that were being converted, and a run on any machine that can read the
target can continue.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from mdsmix import schema
from mdsmix.errors import Unreachable
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_files import decompress_frame, write_if_changed
from mdsmix.shards.side_files import SideFile
from mdsmix.storage import Location, map_in_batches

FOLDER = ".mdsmix"
UNIT_FILE_NAME = re.compile(r"([0-9a-f]{32})-[0-9a-f]{8}\.unit")
FINGERPRINTS = re.compile(r"([0-9a-f]{32})\.hashes")
SEGMENT = re.compile(r"([0-9a-f]{32})\.segment")
EARLIER = re.compile(r"([0-9a-f]{32})(?:-[0-9a-f]{8}\.bad)?")
"Names of the unit files of an earlier commit of mdsmix, except for its fingerprints."
KEY_DIGITS = 32
LENGTH_BYTES = 8
"Bytes that store the length of a head."
HEAD_BYTES = 1 << 20
"The first request for a file reads so many bytes: the records of 1,000 units take half a MB."
_KEY = slice(len(b'{"key":"'), len(b'{"key":"') + KEY_DIGITS)
"The position of the key in a record's JSON: it is the first field."


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRecord:
    """The result of a converted window."""

    key: str
    backend: str
    shards: list[Shard]
    totals: Totals
    records: Records
    size: int = 0
    "Uncompressed source bytes."
    lines: int = 0
    """Lines or rows of the source in the window. The line numbers of the file's next unit continue
    from the sum over this unit's windows.
    """
    base: str = ""
    """`lines_key` of the window, which names its fingerprints; blank if it equals `key`: no record
    is dropped or names an image.
    """
    fetched: dict[str, str] = field(default_factory=dict)
    "URL of an image on a server -> xxh3_128 of its bytes, or the reason code of the failure."
    side_files: list[SideFile] = field(default_factory=list)
    "One per shard, in the same order, if records have names."
    leftover: str = ""
    "Concat: the tokens after the last full row, as bytes in base64; less than one row."
    unwritten: str = ""
    """A bit for each record of the window, the lowest of a byte first, in base64: 1 if it has a
    fingerprint but became no sample. Blank if there is no such record.
    """

    def hashes_of_written(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the fingerprints of the window, uint64 [n, 2], with zeros for the records that
        became no sample.
        """
        if not self.unwritten:
            return hashes
        packed = np.frombuffer(base64.b64decode(self.unwritten), np.uint8)
        bits = np.unpackbits(packed, count=len(hashes), bitorder="little")
        return np.where(bits[:, None] > 0, np.uint64(0), hashes)

    def leftover_tokens(self, dtype: str) -> NDArray[Any]:
        return np.frombuffer(base64.b64decode(self.leftover), dtype)


def pack_array(array: NDArray[Any]) -> str:
    """Return the bytes of an array in base64."""
    return base64.b64encode(array.tobytes()).decode()


@dataclass(frozen=True, slots=True)
class UnitFile:
    """The parsed head of a unit file or segment; empty if the file is damaged or truncated."""

    records: Mapping[str, bytes] = field(default_factory=dict)
    "Key -> record as JSON."
    blobs: Mapping[str, slice] = field(default_factory=dict)
    """Name of a blob -> its bytes in the file. Fingerprints are named by the `lines_key` of their
    window, bad records by `bad_records_name`.
    """


class BlobRef(NamedTuple):
    """A blob (fingerprints or bad records) in a unit file, fingerprint file or segment."""

    name: str
    file: str


def parse_record(line: bytes) -> UnitRecord | None:
    """Parse a record's JSON. Return None if its fields are not those of a UnitRecord."""
    return schema.parse_json_if_fit(UnitRecord, line)


def pack_unit_file(records: Iterable[bytes], blobs: Mapping[str, bytes]) -> bytes:
    """Return the content of a file with these records (JSON) and blobs."""
    sizes = orjson.dumps([(name, len(blob)) for name, blob in blobs.items()])
    head = compress_with_checksum(b"\n".join([sizes, *records]), level=3)
    length = len(head).to_bytes(LENGTH_BYTES, "little")
    return b"".join([length, head, *blobs.values()])


def parse_unit_file(content: bytes) -> UnitFile:
    """Parse the head of a file. Blobs are only located, so `content` may end after the head."""
    head_end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    head = decompress_frame(content[LENGTH_BYTES:head_end]) or b""
    blobs = dict[str, slice]()
    offset = head_end
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        sizes, *lines = head.split(b"\n")
        for name, size in orjson.loads(sizes):
            blobs[name] = slice(offset, offset + size)
            offset += size
        return UnitFile({line[_KEY].decode(): line for line in lines}, blobs)
    return UnitFile()


def read_unit_file(folder: Location, name: str) -> UnitFile:
    """Read and parse the head of a file. A missing file counts as empty."""
    location = folder / FOLDER / name
    try:
        content = location.read(0, HEAD_BYTES)
        head_end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
        if head_end > HEAD_BYTES:
            content = location.read()
        return parse_unit_file(content)
    except Unreachable:
        if location.stat():
            raise
        return UnitFile()


def map_names_to_file(unit_file: UnitFile, file_name: str) -> dict[str, str]:
    """Map the name of everything that a file contains to `file_name`.

    The names are the keys of units, the names of bad records, and `<key>.hashes` for fingerprints.
    """
    bad_records = [name for name in unit_file.blobs if len(name) > KEY_DIGITS]
    fingerprints = [f"{name}.hashes" for name in unit_file.blobs.keys() - bad_records]
    return dict.fromkeys((*unit_file.records, *bad_records, *fingerprints), file_name)


def write_segment(folder: Location, contents: Iterable[bytes]) -> dict[str, str]:
    """Join the contents of files into a segment, and return the names in it (`map_names_to_file`).
    A damaged segment of that name is written again, since the joined files are deleted later.
    """
    records = dict[str, bytes]()
    blobs = dict[str, bytes]()
    for content in contents:
        unit_file = parse_unit_file(content)
        records |= unit_file.records
        blobs |= {name: content[position] for name, position in unit_file.blobs.items()}
    segment = pack_unit_file(records.values(), blobs)
    name = f"{xxhash.xxh128_hexdigest(segment)}.segment"
    write_if_changed(folder / FOLDER / name, segment)
    return map_names_to_file(parse_unit_file(segment), name)


def read_blobs(folder: Location, refs: Sequence[BlobRef]) -> Iterator[bytes]:
    """Yield these blobs as they are stored, in this order. A file is read once for all consecutive
    blobs in it.

    Raises Unreachable if a blob is missing or truncated.
    """
    by_file = [(file, list(group)) for file, group in groupby(refs, attrgetter("file"))]
    contents = map_in_batches(partial(read_if_exists, folder), [file for file, _ in by_file])
    for (file, group), content in zip(by_file, contents, strict=True):
        blobs = parse_unit_file(content).blobs
        for ref in group:
            position = blobs.get(ref.name)
            if position is None or position.stop > len(content):
                raise make_lost_error(folder, file)
            yield content[position]


def make_lost_error(folder: Location, file: str) -> Unreachable:
    return Unreachable(
        f"{folder / FOLDER / file}, which has the results of finished work units, is damaged or "
        "missing: run the same command with --verify-target, which converts these units again"
    )


def read_if_exists(folder: Location, name: str) -> bytes:
    """Return the bytes of a file of the stream in `folder`; empty if there is no such file."""
    fetched = (folder / FOLDER / name).fetch()
    return fetched[1] if fetched else b""


def compress_with_checksum(content: bytes, level: int = 1) -> bytes:
    """Return a Zstandard frame with a checksum, which `decompress_frame` verifies."""
    from zstandard import ZstdCompressor

    return ZstdCompressor(level=level, write_checksum=True).compress(content)
