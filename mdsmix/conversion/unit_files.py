"""The records of finished work units: files in `.mdsmix/` beneath the stream that they belong to.

| file | holds | written | goes |
|---|---|---|---|
| `<key>-<place>.unit` | a window: its record, fingerprints and bad records | by its worker, after
its shards | into a segment |
| `<key>.hashes` | the fingerprints of a window, where duplicates are dropped | before the stream is
converted | into a segment |
| `<xxh128>.segment` | all of this of up to 1,000 files | at publication (finished_units.py) | when
no stream needs its units |

All three are of one form: the length of the head in 8 bytes, the head, and the blobs (fingerprints,
bad records) one behind the other. The head, a Zstandard frame with a checksum, names the blobs with
their sizes and has a line for each record. A file never changes; one that is damaged says nothing,
so its units are converted again. A record is written after its unit's shards, so it vouches for
them. So a run that was killed loses only the units that were being worked on, and whoever has the
target can go on, on any machine.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

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
UNIT = re.compile(r"([0-9a-f]{32})-[0-9a-f]{8}\.unit")
FINGERPRINTS = re.compile(r"([0-9a-f]{32})\.hashes")
SEGMENT = re.compile(r"([0-9a-f]{32})\.segment")
EARLIER = re.compile(r"([0-9a-f]{32})(?:-[0-9a-f]{8}\.bad)?")
"Names of the unit files of an earlier commit of mdsmix, fingerprints aside."
KEY_DIGITS = 32
LENGTH = 8
"Bytes of the length of a head."
HEAD_BYTES = 1 << 20
"The first bytes of a file, asked for at once: records of 1,000 units are half a MB."
T = TypeVar("T")
R = TypeVar("R")
_KEY = slice(len(b'{"key":"'), len(b'{"key":"') + 32)
"Where the key stands in the line of a record, whose first field it is."


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
    "Lines or rows of the source in the window. The file's next unit counts on from their sum."
    base: str = ""
    """`lines_key` of the window, which names its fingerprints; blank where it is `key`: nothing is
    dropped and no images are named.
    """
    fetched: dict[str, str] = field(default_factory=dict)
    "URL of an image on a server -> xxh3_128 of its bytes, or the reason code of the failure."
    side_files: list[SideFile] = field(default_factory=list)
    "One for each shard, in order, where records have names."
    leftover: str = ""
    "Concat: the tokens behind the last full row, as bytes in base64; less than one row."

    unwritten: str = ""
    """A bit for each record of the window, the lowest of a byte first, in base64: 1 if it has a
    fingerprint and became no sample. Blank: none.
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


def pack_array(tokens: NDArray[Any]) -> str:
    """Return the bytes of an array in base64."""
    return base64.b64encode(tokens.tobytes()).decode()


@dataclass(frozen=True, slots=True)
class UnitFile:
    """The parsed head of a unit file or segment; empty where it is damaged or cut off."""

    records: Mapping[str, bytes] = field(default_factory=dict)
    "Key -> record as JSON."
    blobs: Mapping[str, slice] = field(default_factory=dict)
    """Place of each blob in the file: `lines_key` of a window -> its fingerprints; `bad_name` ->
    its bad records.
    """


def record_of(line: bytes) -> UnitRecord | None:
    """A record from its JSON; None where it is of another form."""
    return schema.parse_json_if_fit(UnitRecord, line)


def pack(records: Iterable[bytes], blobs: Mapping[str, bytes]) -> bytes:
    """A file of these records, as JSON, and blobs."""
    sizes = orjson.dumps([(name, len(blob)) for name, blob in blobs.items()])
    head = compressed(b"\n".join([sizes, *records]), level=3)
    return b"".join([len(head).to_bytes(LENGTH, "little"), head, *blobs.values()])


def parse(stored: bytes) -> UnitFile:
    """Parses the head of a file; blobs are located, not read."""
    at = LENGTH + int.from_bytes(stored[:LENGTH], "little")
    head, blobs = decompress_frame(stored[LENGTH:at]), dict[str, slice]()
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        sizes, *lines = (head or b"").split(b"\n")
        for name, size in orjson.loads(sizes):
            blobs[name] = slice(at, at + size)
            at += size
        return UnitFile({line[_KEY].decode(): line for line in lines}, blobs)
    return UnitFile()


def read_units(folder: Location, name: str) -> UnitFile:
    """Reads and parses the head of a file; empty where there is no such file."""
    at = folder / FOLDER / name
    try:
        first = at.read(0, HEAD_BYTES)
        is_longer = LENGTH + int.from_bytes(first[:LENGTH], "little") > HEAD_BYTES
        return parse(at.read() if is_longer else first)
    except Unreachable:
        if at.stat():
            raise
        return UnitFile()


def names_in(units: UnitFile, file: str) -> dict[str, str]:
    """Name -> `file`, for everything that a file holds: keys of units, names of bad records, and
    `<key>.hashes` for fingerprints, the name of the file that they have where duplicates are
    dropped.
    """
    bad = [name for name in units.blobs if len(name) > KEY_DIGITS]
    hashes = [f"{name}.hashes" for name in units.blobs.keys() - bad]
    return dict.fromkeys((*units.records, *bad, *hashes), file)


def write_segment(folder: Location, files: Iterable[bytes]) -> dict[str, str]:
    """Joins files into a segment, and returns what it holds (`names_in`). A damaged segment is
    written again, since the files are deleted later.
    """
    records, blobs = dict[str, bytes](), dict[str, bytes]()
    for content in files:
        units = parse(content)
        records |= units.records
        blobs |= {name: content[at] for name, at in units.blobs.items()}
    stored = pack(records.values(), blobs)
    name = f"{xxhash.xxh128_hexdigest(stored)}.segment"
    write_if_changed(folder / FOLDER / name, stored)
    return names_in(parse(stored), name)


def read_blobs(folder: Location, wanted: Sequence[tuple[str, str]]) -> Iterator[bytes]:
    """Blobs by their names and files, as they are stored, in their order; Unreachable where one is
    gone or cut off. A file is read once for all consecutive blobs in it.
    """
    contents = map_in_batches(partial(bytes_of, folder), [f for f, _ in groupby(wanted, FILE)])
    for (file, of), content in zip(groupby(wanted, FILE), contents, strict=True):
        blobs = parse(content).blobs
        for at in (blobs.get(name) for name, _ in of):
            if at is None or at.stop > len(content):
                raise lost(folder, file)
            yield content[at]


FILE = itemgetter(1)


def gathered(items: Iterable[T], size: Callable[[T], float], most: float) -> Iterator[list[T]]:
    """The items in their order, in lists: each ends with the item whose size brings the sum to
    `most`.
    """
    some, held = list[T](), 0.0
    for item in items:
        some.append(item)
        held += size(item)
        if held >= most:
            yield some
            some, held = [], 0.0
    if some:
        yield some


def lost(folder: Location, file: str) -> Unreachable:
    return Unreachable(
        f"{folder / FOLDER / file} is damaged or gone, and it says what work units hold: run the same command with --verify-target, "
        "which does these units again"
    )


def bytes_of(folder: Location, name: str) -> bytes:
    """The bytes of a file; empty where there is no such file."""
    found = (folder / FOLDER / name).fetch()
    return found[1] if found else b""


def compressed(content: bytes, level: int = 1) -> bytes:
    """A Zstandard frame with a checksum, as `decompress_frame` reads it."""
    from zstandard import ZstdCompressor

    return ZstdCompressor(level=level, write_checksum=True).compress(content)
