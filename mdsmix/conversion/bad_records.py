"""Counts bad records, and stores each with its place, its bytes and the reason.

A worker reads the source of a work unit window by window. It counts how many records of a window
were written, filtered and rejected, and stores the rejected (bad) records with the window's result.
In formats that count lines, it numbers lines from the start of the unit, because it does not know
how many lines come before the unit in the file. This is known at publication: then the bad records
are written to `quarantine/` next to the shards, with the line numbers that a text editor shows.

The recipe's `max_bad` limits the share of bad records in the whole stream. The error message
suggests the most likely fix.
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
from typing import Any, NamedTuple

import orjson

from mdsmix.conversion.job import Job
from mdsmix.conversion.unit_files import make_lost_error
from mdsmix.encode.chat import OTHER_TEMPLATE
from mdsmix.encode.encoded import Encoded
from mdsmix.engines.tasks import CRASHED
from mdsmix.errors import TooManyBadRecords
from mdsmix.kinds.membership import Membership
from mdsmix.messages import find_nearest, format_field, join_counts, make_printable
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
"The most field names that are stored with a bad record."
_IMAGE = re.compile(r"[A-Za-z0-9+/_%\\-]{1000,}={0,2}")
r"""An image in base64, as JSON and URLs write it, with `\/`, `\n` and `%2B`: at least 1,000
characters, more than any word has.
"""
SHORTEST_LINE = 40
"The fewest characters of a line of base64. A list of words has shorter lines."


class PackedRecords:
    """Collects the lines of a quarantine file. Lines are compressed as they are added, since there
    may be many: if a source file is not JSON at all, every line of it is a bad record.
    """

    def __init__(self) -> None:
        """Start without lines."""
        from zstandard import ZstdCompressor

        self._compressor = ZstdCompressor(write_checksum=True).compressobj()
        self._packed = bytearray()

    def add(self, line: bytes) -> None:
        """Add a line, given without its newline."""
        self._packed += self._compressor.compress(line + b"\n")

    def frame(self) -> bytes:
        """Return all lines, compressed to one Zstandard frame (a complete block of compressed data)
        with a checksum.
        """
        return bytes(self._packed + self._compressor.flush())


def format_bad_record(bad: BadRecord, has_images: bool) -> bytes:
    """Return a bad record as a line of JSON: `{"file":"a.jsonl","line":7,"length":12,
    "reason":"not_json","raw":"..."}`.

    The key `raw` has the text of the record. If its bytes are not UTF-8, the key `raw_base64` has
    the bytes instead.

    Args:
        bad: the record, with its place and the reason.
        has_images: whether the stream has images; then images in base64 are left out of `raw`.
    """
    origin = bad.origin
    record = {"file": origin.file, **origin.place, "length": origin.length, "reason": bad.reason}
    if bad.detail:
        record["detail"] = bad.detail
    if bad.reason == "missing_field" and origin.fields:
        record["fields"] = origin.fields[:MOST_FIELDS]
    try:
        text = origin.raw.decode()
        record["raw"] = _IMAGE.sub(_replace_image, text) if has_images else text
    except UnicodeDecodeError:
        record["raw_base64"] = base64.b64encode(origin.raw).decode()
    return orjson.dumps(record)


def _replace_image(match: re.Match[str]) -> str:
    """Return what is stored instead of an image: `<4096 characters of base64 left out>`. A list of
    words that only looks like base64 is returned unchanged.
    """
    text = match[0]
    # JSON writes a line end as \\n. A line of base64 has at least SHORTEST_LINE characters.
    is_list_of_words = len(text) < SHORTEST_LINE * text.count("\\n")
    if is_list_of_words:
        return text
    return f"<{len(text)} characters of base64 left out>"


class QuarantineFile(NamedTuple):
    """A quarantine file, which has the bad records of one window (a slice of a work unit's source).

    A worker counts lines from the start of its work unit. `place_key` and `count_before` serve to
    publish line numbers that are counted from the start of the source file, as a user needs them.
    """

    name: str
    "`name_bad_records` of the window."
    unit_file: str
    "The unit file or segment that contains the bad records."
    place_key: str
    """The JSON key of the position that is counted from the unit's start, such as `line`; empty if
    the format does not count positions.
    """
    count_before: int
    "The number of lines or rows of the source file before the unit."


def publish_quarantine(folder: Location, file: QuarantineFile, frame: bytes) -> None:
    """Write the bad records of a window (a slice of a work unit's source) to the quarantine of a
    stream, with their line numbers counted from the start of the file.

    Raises Unreachable if the stored bad records are damaged.

    Args:
        folder: the folder of the stream.
        file: the quarantine file to write.
        frame: the bad records as the worker stored them: JSON lines, compressed by Zstandard.
    """
    from zstandard import ZstdDecompressor, ZstdError

    lines = PackedRecords()
    try:
        for line in BufferedReader(ZstdDecompressor().stream_reader(frame)):
            if file.place_key and file.count_before:
                record = orjson.loads(line)
                record[file.place_key] += file.count_before
                line = orjson.dumps(record)
            lines.add(line.removesuffix(b"\n"))
    except ZstdError:
        raise make_lost_error(folder, file.unit_file) from None
    write_if_changed(folder / QUARANTINE / f"{file.name}.jsonl.zst", lines.frame())


def select_stale_files(files: Iterable[str], names: Collection[str]) -> list[str]:
    """Return those of `files` that no longer belong in the quarantine (the folder with a stream's
    bad records), because their records have been fixed.

    Args:
        files: names of files in the quarantine.
        names: names, without the suffix, of the files that belong there.
    """
    return [file for file in files if file.partition(".")[0] not in names]


def delete_stale_files(folder: Location, names: Collection[str], held_lease: Lease) -> None:
    """Delete the quarantine files of the stream in `folder` that are no longer needed.

    Args:
        folder: the folder of the stream.
        names: names, without the suffix, of the files to keep.
        held_lease: this run's lease (a write lock) on the stream.
    """
    quarantine = folder / QUARANTINE
    stale = select_stale_files([file for file, _ in quarantine.list()], names)
    map_threads(lambda file: held_lease.delete(quarantine / file), stale)


class Tally:
    """Counts the records of a window (a slice of a work unit's source) batch by batch: written,
    filtered and bad. Written records are counted by the rows that were written. So if a bug loses a
    record, the counts do not add up, and the bug is noticed.
    """

    def __init__(self, has_many_rows: bool, members: Membership, has_images: bool) -> None:
        """Start at zero.

        Args:
            has_many_rows: whether a record may become several rows, such as a long document that
                is split.
            members: decides which records a stream with `sample: 5%` takes. Lines that are not
                JSON contain no record, but `members` decides on them too, by a hash of their bytes:
                a line that is not taken does not count as bad.
            has_images: whether the stream has images; they are left out of the stored bad records.
        """
        self._has_many_rows = has_many_rows
        self._members = members
        self._has_images = has_images
        self.records = Records()
        self.bad = PackedRecords()
        self.size = 0
        "Source bytes of the finished batches."
        self.lines = 0
        "Lines or rows of the finished batches."
        self._rejected: list[BadRecord] = []
        "Bad records of the current batch, in the batch's order."

    def add(self, batch: RecordBatch, piece: range, encoded: Encoded) -> None:
        """Count some records that were encoded together: written, filtered and bad. Bad records are
        kept until `finish_batch` stores them.

        Args:
            batch: records that were read together; some of them were encoded.
            piece: the positions of the encoded records in the batch.
            encoded: the result of encoding these records.
        """
        filtered = Counter[str]()
        for position, reason in encoded.rejected.items():
            if reason in FILTERED:
                filtered[str(reason)] += 1
            else:
                bad = batch.reject(piece[position], str(reason), detail_of(reason))
                self._rejected.append(bad)
        written = len(encoded.lengths)
        if self._has_many_rows:  # a record with several rows counts once
            written = min(written, len(piece) - len(encoded.rejected))
        self.records += Records(read=len(piece), written=written, filtered=dict(filtered))

    def finish_batch(self, batch: RecordBatch, crashed: Collection[int]) -> None:
        """Store the bad records of a batch in order, and count them by reason. Items that were not
        passed to `add` are counted as read here: records that crashed workers, and items that
        contain no record.

        Args:
            batch: the batch.
            crashed: positions of the records that crashed workers.
        """
        rejected = self._rejected + [batch.reject(position, CRASHED) for position in crashed]
        reasons = Counter[str]()
        # Both iterables are sorted by the place in the batch, and so are the stored bad records.
        for bad in merge(self._find_sampled_items(batch), sorted(rejected)):
            reasons[bad.reason] += 1
            self.bad.add(format_bad_record(bad, self._has_images))
        counted_by_add = len(self._rejected)
        self.records += Records(read=reasons.total() - counted_by_add, quarantined=dict(reasons))
        self.size += batch.size
        self.lines += batch.count
        self._rejected = []

    def _find_sampled_items(self, batch: RecordBatch) -> Iterator[BadRecord]:
        """Yield the items of a batch that contain no record, such as lines that aren't JSON. If the
        recipe's key `sample:` leaves an item out, it is counted as filtered and not yielded.
        """
        for bad in batch.bad:
            if self._members.samples_raw(bad.origin.raw):
                yield bad
            else:
                self.records += Records(read=1, filtered={NOT_SAMPLED: 1})


MOST_LOOKED_AT = 1_000
"The most records of the quarantine that are searched for examples."
MOST_EXAMPLES = 3
"The most examples in a message."
MOST_SHOWN = 160
"The most characters of an example."
ARRAY = (
    "A file begins with [, so it is one JSON array, but its name has the suffix of files with one "
    "JSON value per line: rename it to .json, or set source.format: json."
)
SHAPE = "Run mdsmix init SOURCE, which shows which shape and settings read the source's records."
ADVICE = {
    "json_array": ARRAY,
    "missing_field": (
        "Under source, name the field as the records have it; where: exists(FIELD) leaves out "
        "records without it."
    ),
    "invalid_utf8": (
        "mdsmix reads UTF-8: convert files of another encoding, for example with iconv -f LATIN1 "
        "-t UTF-8."
    ),
    "bad_mark": (
        "loss_weights: true reads marks such as 0.5 as loss weights; decimals of a table must be "
        "cast to float."
    ),
    "repeated_role": (
        "consecutive_roles: merge joins consecutive messages of one role if both are trained or "
        "neither is, but no text after calls, and no message with a key such as reasoning_content."
    ),
    "not_prefix_stable": (
        "The chat template changes earlier messages: rewritten_history: last keeps a row for the "
        "last answer of such a conversation, and each, with target_responses: all, one for every "
        "answer."
    ),
    "unknown_role": (
        "shape: sharegpt accepts any role that its tags name (assistant_tag: ...); shape: openai "
        "accepts the role developer."
    ),
    "starts_with_assistant": (
        "shape: openai accepts a greeting as first message, and makes it part of the first prompt."
    ),
    "image_count": (
        "Each image needs one <image> in the text; if no text has one, images.unplaced: first puts "
        "the images before the first question. images.field names the field with the images."
    ),
    "image_not_found": (
        "Image paths are relative to images.root or, if it is not set, to the folder of the file "
        "with the records."
    ),
    "tools_not_printed": f"To train on tools, {OTHER_TEMPLATE}.",
    "not_json": (
        "Each record needs a line of its own, as `jq -c .` writes it, and no comma after it: if "
        "commas separate the records, write [ before the first and ] after the last, and name the "
        "file .json."
    ),
    "field_not_text": SHAPE,
    "bad_message_keys": SHAPE,
    "content_not_text": SHAPE,
    "messages_not_a_list": SHAPE,
}
"Reason code -> the most likely fix."


def refuse_too_many_bad(job: Job, records: Records) -> None:
    """Raise TooManyBadRecords if the whole stream has more bad records than max_bad allows.

    Args:
        job: the job of the stream.
        records: the counts of the whole stream.
    """
    allowed = job.max_bad * records.sampled
    # In a small stream one bad record is more than the default share MAX_BAD. One bad record is
    # allowed in any stream, unless the recipe asks for less than the default.
    if job.max_bad >= read_share(MAX_BAD):
        allowed = max(allowed, Fraction(1))
    if records.bad > allowed:
        reason = f", more than max_bad {format_max_bad(job)}"
        raise make_too_many_bad_error(job, records, reason)


def make_too_many_bad_error(job: Job, records: Records, reason: str) -> TooManyBadRecords:
    """Return the error that ends a conversion without publishing the stream.

    Args:
        job: the job of the stream.
        records: the counts of the records that were converted.
        reason: continues the sentence "2 of 10 records are bad", for example ", more than max_bad
            0.1%".
    """
    return TooManyBadRecords(
        f"stream {job.name}: {records.bad:,} of {records.sampled:,} records are bad "
        f"({join_counts(records.quarantined)}){reason}; nothing new is published, finished units "
        f"are kept. {advise(job, records)} The bad records are in {job.target}/quarantine (mdsmix "
        "quarantine shows them): fix the source, or raise max_bad (1.0 allows any number)."
    )


def format_max_bad(job: Job) -> str:
    """Return the recipe's max_bad as a percentage: `0.1%`."""
    return f"{float(100 * job.max_bad):.4f}".rstrip("0").rstrip(".") + "%"


def _suggest_field(bad: Mapping[str, Any]) -> str:
    """Return a sentence that suggests the field whose name is most similar to the missing field's
    name: ` The recipe names txt: did you mean text?`. Return "" if no field is missing, or if no
    name is similar.

    Args:
        bad: a record of the quarantine.
    """
    missing = _find_missing_field(bad)
    fields = _list_field_names(bad)
    if not missing:
        return ""
    if missing.partition(".")[0] in fields:  # only the inner field of `outer.inner` is missing
        return ""
    similar = find_nearest(missing, fields)
    if not similar:
        return ""
    return f" The recipe names {format_field(missing)}: did you mean {format_field(similar)}?"


def _find_missing_field(bad: Mapping[str, Any]) -> str:
    """Return the name of the field that a record of the quarantine lacks; empty if the record is
    bad for another reason.
    """
    detail = bad.get("detail") or {}
    return str(detail.get("missing", ""))


def _list_field_names(bad: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that a bad record has, if they are known.

    Args:
        bad: the bad record, as the quarantine (the folder of bad records) stores it.
    """
    fields = bad.get("fields")
    if fields:
        return [str(field) for field in fields]
    try:
        record = orjson.loads(bad.get("raw") or "")
    except ValueError:  # the record is not JSON
        return []
    return list(record) if isinstance(record, dict) else []


def advise(job: Job, records: Records) -> str:
    """Return sentences for the user: the most likely fixes, and for up to MOST_EXAMPLES reasons the
    first record that is bad for this reason.

    Args:
        job: the job of the stream; its quarantine is read.
        records: the counts of its records.
    """
    # Several reasons may have the same fix.
    advice = dict.fromkeys(ADVICE[reason] for reason in records.quarantined if reason in ADVICE)
    if "template_error" in records.quarantined and records.nulls:
        keys = " or ".join(records.nulls)
        removal = (
            f"Some records have null entries inside {keys}, and a chat template may fail on such "
            "an entry: source.nulls: drop removes them."
        )
        advice[removal] = None
    # Records are sorted by file and line here, since quarantine files are named by hashes.
    bad_records = list(islice(read_quarantine(job.folder), MOST_LOOKED_AT))
    bad_records.sort(key=lambda bad: (str(bad.get("file")), bad.get("line") or 0))
    examples = dict[str, str]()  # reason code -> sentence
    for bad in bad_records:
        if bad["reason"] not in examples:
            examples[bad["reason"]] = _format_example(bad)
    return " ".join([*advice, *islice(examples.values(), MOST_EXAMPLES)])


def _format_example(bad: Mapping[str, Any]) -> str:
    """Return a sentence about the first bad record with a reason: `The first missing_field, of
    a.jsonl: no field text in txt, url.`

    Args:
        bad: the record as the quarantine stores it.
    """
    detail = bad.get("detail")
    if bad["reason"] == "missing_field":
        detail = f"no field {_find_missing_field(bad)}"
    facts = [detail, bad.get("fields") or bad.get("raw")]
    phrases = list[str]()
    for fact in facts:
        if fact:
            # The text is cut again, since unprintable characters are written as longer escapes.
            text = make_printable(format_grouped(fact)[:MOST_SHOWN])
            phrases.append(text[:MOST_SHOWN])
    description = " in ".join(phrases)
    if description:
        sentence = f"The first {bad['reason']}, of {bad['file']}: {description}."
    else:  # bytes that are not UTF-8 are not shown
        sentence = f"The first {bad['reason']} is in {bad['file']}."
    return sentence + _suggest_field(bad)
