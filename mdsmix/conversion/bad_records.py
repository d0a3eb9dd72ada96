"""Bad records, counted and kept: where each stood, why it is bad, and its bytes.

A worker counts what became of the records of a window, works on them in pieces that memory allows,
and keeps the bad ones with the unit's record. In formats that count lines it numbers them from the
unit's start, because it does not know how many lines stand before. At publication that is known, so
the records are written to `quarantine/` beside the shards with the numbers that a text editor
shows.

The recipe's `max_bad` limits the share of bad records in all; a refusal says what most likely has
to change.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from heapq import merge
from io import BufferedReader
from itertools import islice
from typing import Any

import orjson

from mdsmix.conversion.job import Job
from mdsmix.conversion.unit_files import lost
from mdsmix.encode.encoded import Encoded
from mdsmix.engines.tasks import CRASHED
from mdsmix.errors import TooManyBadRecords
from mdsmix.kinds.membership import Membership
from mdsmix.messages import find_nearest, join_counts, make_printable
from mdsmix.recipe import MAX_BAD, read_share
from mdsmix.record import FILTERED, detail_of
from mdsmix.shards.counts import NOT_SAMPLED, Records
from mdsmix.shards.lease import Lease
from mdsmix.shards.published import QUARANTINE, read_quarantine
from mdsmix.shards.shard_files import write_if_changed
from mdsmix.sources import BadRecord, RecordBatch
from mdsmix.storage import Location, map_threads
from mdsmix.table import format_grouped

MOST_FIELDS = 64
"At most so many names of a record's fields are kept with it."
_IMAGE = re.compile(r"[A-Za-z0-9+/_%\\-]{1000,}={0,2}")
r"""An image in base64, as JSON and URLs write it, with `\/`, `\n` and `%2B`: 1,000 characters or
more, as no word of a text has.
"""
LINE = 40
"The fewest characters of a line of base64; a list of words has shorter lines."


class PackedRecords:
    """Lines of a quarantine, compressed as they are added: in a file that is not JSON at all every
    line is a bad record, and its entry is 80 bytes longer than the line.
    """

    def __init__(self) -> None:
        from zstandard import ZstdCompressor

        self._stream, self._packed = ZstdCompressor(write_checksum=True).compressobj(), bytearray()

    def add(self, line: bytes) -> None:
        """One line, without its end."""
        self._packed += self._stream.compress(line + b"\n")

    def frame(self) -> bytes:
        """All of them as one Zstandard frame with a checksum."""
        return bytes(self._packed + self._stream.flush())


def described(bad: BadRecord, has_images: bool) -> bytes:
    """One bad record as JSON; `raw` is its text, or `raw_base64` its bytes where they are no text.
    `has_images`: images in base64 are left out of `raw`.
    """
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
    is_words = len(image[0]) < LINE * image[0].count("\\n")
    return image[0] if is_words else f"<{len(image[0])} characters of base64 left out>"


def publish_quarantine(
    folder: Location, of: tuple[str, str], shift: tuple[str, int], frame: bytes
) -> None:
    """Writes a window's bad records to the quarantine, line by line. Unreachable where they are
    damaged. `of`: their name, and the file of finished units that holds them. `shift`: the key of a
    place that is counted from the unit's start, such as `line`, blank where a format counts none;
    and the count of the source file before the unit.
    """
    from zstandard import ZstdDecompressor, ZstdError

    (name, file), (counted, before), bad = of, shift, PackedRecords()
    try:
        for line in BufferedReader(ZstdDecompressor().stream_reader(frame)):
            if counted and before:
                record = orjson.loads(line)
                record[counted] += before
                line = orjson.dumps(record)
            bad.add(line.removesuffix(b"\n"))
    except ZstdError:
        raise lost(folder, file) from None
    write_if_changed(folder / QUARANTINE / f"{name}.jsonl.zst", bad.frame())


def stale_files(files: Iterable[str], names: Collection[str]) -> list[str]:
    """Quarantine files of other names, left from records that have been mended since."""
    return [file for file in files if file.partition(".")[0] not in names]


def delete_stale_files(folder: Location, names: Collection[str], held: Lease) -> None:
    """Deletes all quarantine files but those of these names."""
    quarantine = folder / QUARANTINE
    stale = stale_files([file for file, _ in quarantine.list()], names)
    map_threads(lambda name: held.delete(quarantine / name), stale)


class Tally:
    """Counts what became of the records, batch by batch. Written records are counted by their rows,
    so that the counts do not add up where one is lost.
    """

    def __init__(self, has_many_rows: bool, members: Membership, has_images: bool) -> None:
        """`has_many_rows`: a record may be several rows, as a long document that is split; else it
        is one.
        """
        self._has_many_rows, self._members, self._has_images = has_many_rows, members, has_images
        self.records, self.bad = Records(), PackedRecords()
        self.size = self.lines = 0
        self._rejected: list[BadRecord] = []
        "Bad records of the current batch, in its order."

    def add(self, batch: RecordBatch, piece: range, encoded: Encoded) -> None:
        """Counts what became of the records of a piece."""
        filtered = Counter(str(why) for why in encoded.rejected.values() if why in FILTERED)
        self._rejected += [
            batch.reject(piece[position], str(why), detail_of(why))
            for position, why in encoded.rejected.items()
            if why not in FILTERED
        ]
        rows, left = len(encoded.lengths), len(piece) - len(encoded.rejected)
        self.records += Records(
            read=len(piece),
            written=min(rows, left) if self._has_many_rows else rows,
            filtered=dict(filtered),
        )

    def end(self, batch: RecordBatch, without: Collection[int]) -> None:
        """Keeps the batch's bad records in their order and counts them by reason. Those in no piece
        are counted as read. `without`: positions of records that workers died of.
        """
        late = sorted([*self._rejected, *(batch.reject(position, CRASHED) for position in without)])
        reasons = Counter[str]()
        for bad in merge(self._of_sample(batch), late):
            reasons[bad.reason] += 1
            self.bad.add(described(bad, self._has_images))
        self.records += Records(
            read=reasons.total() - len(self._rejected), quarantined=dict(reasons)
        )
        self.size += batch.size
        self.lines += batch.count
        self._rejected = []

    def _of_sample(self, batch: RecordBatch) -> Iterator[BadRecord]:
        """The items of a batch that hold no record, as a line that is not JSON. Items outside the
        stream's sample are only counted.
        """
        for bad in batch.bad:
            if self._members.samples_raw(bad.origin.raw):
                yield bad
            else:
                self.records += Records(read=1, filtered={NOT_SAMPLED: 1})


MOST_LOOKED_AT = 1_000
MOST_EXAMPLES = 3
MOST_SHOWN = 160
"Characters of an example."
ARRAY = (
    "A file begins with [, so it is one JSON array, and its name says that it holds a JSON value a line: name it .json, or say "
    "source.format: json."
)
SHAPE = "mdsmix init SOURCE says which shape and settings read such records."
ADVICE = {
    "json_array": ARRAY,
    "repeated_role": "consecutive_roles: merge joins messages of one role that follow each other.",
    "unknown_role": "shape: sharegpt takes any role, named in its tags (assistant_tag: ...); shape: openai that of a developer.",
    "starts_with_assistant": "shape: openai takes a greeting first, as a part of the first prompt.",
    "image_count": "Each image has its place in a text by <image>; a field of images is named by images.field.",
    "image_not_found": "Paths begin at images.root, or at the folder of the records.",
    "bad_message_keys": SHAPE,
    "content_not_text": SHAPE,
    "messages_not_a_list": SHAPE,
}
"Reason code -> what most likely mends it."


def refuse_too_many_bad(job: Job, records: Records) -> None:
    """Raise TooManyBadRecords if more records of the whole stream were bad than the recipe's
    max_bad allows. One bad record of a few is not too many for the default, or for a larger share.
    """
    allowed = job.max_bad * records.sampled
    if job.max_bad >= read_share(MAX_BAD):
        allowed = max(allowed, Fraction(1))
    if records.bad > allowed:
        raise too_many_bad(job, records, f", more than max_bad {shown_share(job)}")


def too_many_bad(job: Job, records: Records, why: str) -> TooManyBadRecords:
    reasons = join_counts(records.quarantined)
    return TooManyBadRecords(
        f"stream {job.name}: {records.bad:,} of {records.sampled:,} records are bad ({reasons}){why}; nothing new is published, finished "
        f"units are kept. {advice(job, records)} They lie in {job.target}/quarantine (mdsmix quarantine shows them): mend the source, or "
        "raise max_bad (1.0 allows any number)."
    )


def shown_share(job: Job) -> str:
    """The recipe's max_bad as a percentage."""
    return f"{float(100 * job.max_bad):.4f}".rstrip("0").rstrip(".") + "%"


def _nearest(bad: Mapping[str, Any]) -> str:
    """Return a question that names the field most like the missing one of a bad record; empty
    without such a field.
    """
    missing = _missing_field(bad)
    fields = _fields_of(bad)
    if not missing or missing.partition(".")[0] in fields:
        return ""
    near = find_nearest(missing, fields)
    return (
        f" The recipe names {make_printable(missing)}: did you mean {make_printable(near)}?"
        if near
        else ""
    )


def _missing_field(bad: Mapping[str, Any]) -> str:
    """Return the name of the field that a bad record lacks; empty if its reason is another."""
    detail = bad.get("detail") or {}
    return str(detail.get("missing", ""))


def _fields_of(bad: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields of a record in the quarantine, if they are known."""
    if fields := bad.get("fields"):
        return [*map(str, fields)]
    try:
        record = orjson.loads(bad.get("raw") or "")
    except ValueError:
        return []
    return [*record] if isinstance(record, dict) else []


def advice(job: Job, records: Records) -> str:
    """Return sentences on what most likely has to change, with the first record of some reasons as
    examples.

    Records are ordered by file and line: the names of quarantine files are hashes.
    """
    first = dict[str, str]()
    looked_at = islice(read_quarantine(job.folder), MOST_LOOKED_AT)
    for bad in sorted(looked_at, key=lambda bad: (str(bad.get("file")), bad.get("line") or 0)):
        told = [bad.get("detail"), bad.get("fields") or bad.get("raw")]
        about = " in ".join(
            make_printable(format_grouped(of)[:MOST_SHOWN])[:MOST_SHOWN] for of in told if of
        )
        first.setdefault(
            bad["reason"], f"The first {bad['reason']}, of {bad['file']}: {about}.{_nearest(bad)}"
        )
    said = dict.fromkeys(ADVICE[reason] for reason in records.quarantined if reason in ADVICE)
    return " ".join([*said, *islice(first.values(), MOST_EXAMPLES)])
