"""Bad records, counted and kept: where each stood, why it is bad, and its bytes.

A worker counts what became of the records of a window, works on them in pieces that memory allows, and keeps the bad ones with the unit's
record. In formats that count (lines) it numbers them from the unit's start, because it does not know what stands before. At publication
that is known, so the records are written to `quarantine/` beside the shards with the numbers that a text editor shows.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import merge
from io import BufferedReader
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from mdsmix.convert.image_stamps import cut_by_images
from mdsmix.encode.encoded import Encoded
from mdsmix.engines.tasks import CRASHED, Attempt, Reporter, in_work, pieces
from mdsmix.kinds.membership import RecordSample
from mdsmix.shards.counts import NOT_SAMPLED, Records
from mdsmix.shards.lease import Lease
from mdsmix.shards.published import QUARANTINE, read_quarantine
from mdsmix.shards.shard_files import write_if_new
from mdsmix.sources import BadRecord, RecordBatch
from mdsmix.storage import Location, together

MOST_FIELDS = 64
"Names of a record's fields that are kept beside it."
_IMAGE = re.compile(r"[A-Za-z0-9+/_%\\-]{1000,}={0,2}")
r"An image as base64, as JSON and URLs write it, `\/`, `\n` and `%2B` too: no word of a text is as long."
LINE = 40
"Characters of a line of base64, at least; a list of words has shorter ones."
PIECE_BYTES = 8 << 20
"Bytes of lines that are held before they are compressed."


class PackedRecords:
    """Lines of a quarantine, compressed as they are added: in a file that is not JSON at all every line is a bad record, and
    its entry is 80 bytes longer than the line."""

    def __init__(self) -> None:
        self._lines, self._pieces, self._size = bytearray(), list[bytes](), 0

    def __bool__(self) -> bool:
        return self._size > 0

    def add(self, line: bytes) -> None:
        """One line, without its end."""
        self._lines += line
        self._lines += b"\n"
        self._size += len(line) + 1
        if len(self._lines) >= PIECE_BYTES:
            self._pieces.append(_packed(self._lines))
            self._lines = bytearray()

    def frame(self) -> bytes:
        """All of them as one Zstandard frame with a checksum, that says its size, as most readers want it."""
        from zstandard import ZstdCompressor, decompress

        if not self._pieces:
            return _packed(self._lines)
        frame = ZstdCompressor(write_checksum=True).compressobj(size=self._size)
        parts = [frame.compress(decompress(piece)) for piece in self._pieces]
        return b"".join([*parts, frame.compress(self._lines), frame.flush()])


def described(bad: BadRecord, has_images: bool = False) -> bytes:
    """One bad record as JSON; `raw` is its text, or `raw_base64` its bytes where they are no text. Of one that may hold images
    themselves (`has_images`) they are left out."""
    origin = bad.origin
    record = {"file": origin.file, **origin.place, "length": origin.length, "reason": bad.reason}
    if bad.detail:
        record["detail"] = bad.detail
    if bad.reason == "missing_field" and origin.fields:
        record["fields"] = origin.fields[:MOST_FIELDS]
    try:
        text = origin.raw.decode()
        record["raw"] = _IMAGE.sub(_left_out, text) if has_images else text
    except UnicodeDecodeError:
        record["raw_base64"] = base64.b64encode(origin.raw).decode()
    return orjson.dumps(record)


def _left_out(image: re.Match[str]) -> str:
    if len(image[0]) < LINE * image[0].count("\\n"):
        return image[0]
    digest = xxhash.xxh3_128_hexdigest(image[0])
    return f"<{len(image[0])} characters of base64 left out, xxh3_128 {digest}>"


def publish_quarantine(
    folder: Location, name: str, frame: bytes, before: Mapping[str, int]
) -> None:
    """Writes a window's bad records to the quarantine. `before`: for each place key that counts from the unit's start, how
    much of it the file holds before the unit."""
    bad = PackedRecords()
    shift = {key: n for key, n in before.items() if key and n}
    for line in lines_of(frame):
        bad.add(_shifted(line, shift) if shift else line)
    write_if_new(folder / QUARANTINE / f"{name}.jsonl.zst", bad.frame())


def lines_of(frame: bytes) -> Iterator[bytes]:
    """The lines of packed records, without holding them all."""
    from zstandard import ZstdDecompressor

    for line in BufferedReader(ZstdDecompressor().stream_reader(frame)):
        yield line.removesuffix(b"\n")


def first_of(folder: Location, reason: str) -> dict[str, Any] | None:
    """A record of the quarantine that is bad for this reason; None where there is none."""
    records = read_quarantine(folder)
    return next((record for record in records if record["reason"] == reason), None)


def _shifted(line: bytes, before: Mapping[str, int]) -> bytes:
    record = orjson.loads(line)
    return orjson.dumps(record | {key: record[key] + n for key, n in before.items()})


def stale_files(files: Iterable[str], names: Collection[str]) -> list[str]:
    """Quarantine files of other names, left from records that have been mended since."""
    return [file for file in files if file.partition(".")[0] not in names]


def delete_stale_files(folder: Location, names: Collection[str], held: Lease) -> None:
    """Deletes all quarantine files but those of these names."""
    quarantine = folder / QUARANTINE
    stale = stale_files([file for file, _ in quarantine.list()], names)
    together(lambda name: held.delete(quarantine / name), stale)


def _packed(lines: bytearray) -> bytes:
    from zstandard import ZstdCompressor

    return ZstdCompressor(write_checksum=True).compress(lines)


if TYPE_CHECKING:
    from mdsmix.images.reader import ImageReader

MOST_SHRUNK = 6
"Halve a batch of 8 MB at most six times for want of memory: below 128 KB the worker's fixed memory dominates."


class Pace:
    """How many records are in work at once: a batch, or fewer where memory is tight or workers have died of them."""

    def __init__(self, attempt: Attempt, reporter: Reporter, pictures: ImageReader | None) -> None:
        self._attempt, self._reporter, self._shrunk = attempt, reporter, 0
        self._pictures = pictures

    def pieces(self, batch: RecordBatch, without: set[int]) -> Iterator[range]:
        """The positions to work on next. Reports them to the engine, which may make this worker wait."""
        halvings = self._attempt.halvings + self._shrunk
        found = pieces(len(batch.records), halvings, without)
        for piece in cut_by_images(found, self._pictures) if self._pictures else found:
            self._reporter.wait_for_room()
            self._reporter.on_records(in_work(batch, piece))
            yield piece
        self._reporter.on_records(None)
        if self._reporter.is_tight() and self._shrunk < MOST_SHRUNK:
            self._shrunk += 1


class Tally:
    """Counts what became of the records, batch by batch. Written records are counted by their rows, so that the counts do not add up where one is lost."""

    def __init__(
        self, has_many_rows: bool, sample: RecordSample | None = None, has_images: bool = False
    ) -> None:
        self._has_many_rows, self._sample, self._has_images = has_many_rows, sample, has_images
        "A long document is split, any other record is one row."
        self.records, self.bad = Records(), PackedRecords()
        self.size = self.lines = 0
        self._rejected: list[BadRecord] = []
        "Of the batch, in its order."

    def add(self, batch: RecordBatch, piece: range, encoded: Encoded) -> None:
        """Counts what became of the records of a piece."""
        dropped = Counter(r.reason for r in encoded.rejected if r.filtered)
        self._rejected += [
            batch.reject(piece[r.position], r.reason, r.detail)
            for r in encoded.rejected
            if not r.filtered
        ]
        rows, left = len(encoded.lengths), len(piece) - len(encoded.rejected)
        written = min(rows, left) if self._has_many_rows else rows
        self.records += Records(
            read=len(piece),
            written=written,
            filtered=dict(dropped),
        )

    def end(self, batch: RecordBatch, without: Collection[int]) -> None:
        """Keeps the batch's bad records in their order, counts them by reason, and counts as read those that were in no piece."""
        late = [*self._rejected, *(batch.reject(position, CRASHED) for position in without)]
        found = merge(self._of_sample(batch), sorted(late)) if late else self._of_sample(batch)
        reasons = Counter[str]()
        for bad in found:
            reasons[bad.reason] += 1
            self.bad.add(described(bad, self._has_images))
        read = reasons.total() - len(self._rejected)
        self.records += Records(read=read, quarantined=dict(reasons))
        self.size += batch.size
        self.lines += batch.count
        self._rejected = []

    def _of_sample(self, batch: RecordBatch) -> Iterator[BadRecord]:
        """The items that hold no record; those that are not in the sample are counted."""
        for bad in batch.bad:
            if self._sample is None or self._sample.has_raw(bad.origin.raw):
                yield bad
            else:
                self.records += Records(read=1, filtered={NOT_SAMPLED: 1})
