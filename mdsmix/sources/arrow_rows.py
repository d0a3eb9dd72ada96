"""Rows of columnar files (parquet, arrow) as records: what both formats share once Arrow has read a batch of them.

A row is known by the fields that are read of it, as orjson writes them: neither how a file is compressed, how its rows are
grouped, nor a release of pyarrow changes that. Values that JSON has no form for (times, decimals, bytes) are written with the
name of their type, so that they are not taken for texts.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson

from mdsmix.errors import Unreachable
from mdsmix.sources.format import Block, Decoded, Origin
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = BLOCK_BYTES // 2
"About so many bytes of rows are decoded at once: Arrow's columns, Python's records and their JSON are all held."
MOST_ROWS = 4096
"Rows that are decoded at once, however short."


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive rows as Arrow read them, or of a part of the file that cannot be read."""

    row: int
    "The first one, as its place says it."
    ordinal: int
    "The same as the format counts it."
    rows: pa.RecordBatch | None = None
    damaged: int = 0
    "Rows of which nothing could be read."
    unread: Mapping[str, int | None] = field(default_factory=dict)
    "As `Decoded` has it."
    columns: tuple[str, ...] = ()
    "All that the file has."


@dataclass(slots=True, kw_only=True)
class RowBlock(Block):
    """Consecutive rows of one file in one window, each known by its JSON; of one that could not be read by what there is of it."""

    format: str = "rows"
    row: int
    ordinal: int
    "Of the first row, as in its batch."
    records: list[Any]
    "One for each row, good or bad."
    bad: Mapping[int, str]
    unread: Mapping[str, int | None] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    @property
    def start(self) -> tuple[int, int]:
        return self.ordinal, self.row

    def decode(self) -> Decoded:
        bad = [(i, why) for i, why in sorted(self.bad.items()) if i < self.count]
        records = [r for i, r in enumerate(self.records[: self.count]) if i not in self.bad]
        return Decoded(records=records, bad=bad, blank=[], unread=self.unread)

    def origin(self, index: int) -> Origin:
        number, raw = self.ordinal + index, self.raws[index]
        part = number >> 32
        place = {"row": self.row + index} | ({"batch": part - 1} if part else {})
        return Origin(self.file, number, shown(number), place, len(raw), raw, self.columns)


def later(unread: Mapping[str, int | None]) -> dict[str, int | None]:
    """What is said again of the rows behind the first ones: numbers are of all of them."""
    return {name: filled for name, filled in unread.items() if filled is None}


def in_part(part: int, row: int) -> int:
    """The ordinal of a row in formats that do not tell how many rows stand before a record batch."""
    return (part + 1) << 32 | row


def shown(ordinal: int) -> str:
    """A row for a person."""
    part, row = ordinal >> 32, ordinal & 0xFFFFFFFF
    return f"row {row} of record batch {part - 1}" if part else f"row {ordinal}"


def blocks(file: SourceFile, span: Span, batches: Iterable[Batch]) -> Iterator[RowBlock]:
    """The rows of consecutive batches, cut at the edges of windows and at 8 MB."""
    position = 0
    for batch in batches:
        records, lines, bad = _decoded(batch)
        at = list(accumulate((len(each) + 1 for each in lines), initial=position))
        unread, begin = batch.unread, 0
        for end in _cuts(at, span):
            yield RowBlock(
                file=file.name,
                window=span.window_of(at[begin]),
                row=batch.row + begin,
                ordinal=batch.ordinal + begin,
                records=records[begin:end],
                raws=lines[begin:end],
                bad={i - begin: why for i, why in bad.items() if begin <= i < end} if bad else {},
                unread=unread,
                columns=batch.columns,
            )
            begin, unread = end, later(unread)
        position = at[-1]


def _cuts(at: Sequence[int], span: Span) -> Iterator[int]:
    """Where blocks end: `at` holds where each row begins, and where the last one ends."""
    count = len(at) - 1
    if count and span.window_of(at[-2]) == span.window_of(at[0]) and at[-1] - at[0] <= BLOCK_BYTES:
        yield count
        return
    begin = 0
    for i in range(1, count):
        if (
            span.window_of(at[i]) != span.window_of(at[begin])
            or at[i + 1] - at[begin] > BLOCK_BYTES
        ):
            yield i
            begin = i
    if count:
        yield count


def _decoded(batch: Batch) -> tuple[list[Any], list[bytes], dict[int, str]]:
    """Records, their JSON, and which rows are none."""
    if batch.rows is None:
        count = batch.damaged
        return [None] * count, [b""] * count, dict.fromkeys(range(count), "damaged_rows")
    rows, bad = _readable(batch.rows), dict[int, str]()
    try:
        records = rows.to_pylist()
    except Exception:  # a row that is none: each is looked at
        records = [_row(rows, i, bad) for i in range(rows.num_rows)]
    lines = list(map(line, records))
    for i in bad:
        lines[i] = _raw(rows, i)
    return records, lines, bad


def _row(rows: pa.RecordBatch, index: int, bad: dict[int, str]) -> Any:
    try:
        return rows.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError:
        bad[index] = "invalid_utf8"
    except (ValueError, OverflowError):  # a year that Python has no date for
        bad[index] = "unreadable_value"
    return None


def _raw(rows: pa.RecordBatch, index: int) -> bytes:
    """What there is of a row that is no record: the bytes of its texts, or all of it as Arrow writes it."""
    import pyarrow as pa

    row = rows.slice(index, 1)
    if not all(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in row.schema.types
    ):
        return bytes(row.serialize())
    texts = [column.cast(pa.large_binary())[0].as_py() for column in row.columns]
    return b"\n".join(text or b"" for text in texts)


_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_NON_STR_KEYS


def line(record: Any) -> bytes:
    """A record as JSON, the same from every release of what read it."""
    return orjson.dumps(record, _said, _OPTIONS)


def _said(value: Any) -> Any:
    """A value that JSON has no form for."""
    said = base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
    return {type(value).__name__: said}


def _readable(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Times of nanoseconds as microseconds, which is all that Python's own have."""
    import pyarrow as pa

    wanted = [coarse(kind) for kind in rows.schema.types]
    if wanted == rows.schema.types:
        return rows
    columns = [c.cast(kind, safe=False) for c, kind in zip(rows.columns, wanted, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def coarse(kind: pa.DataType) -> pa.DataType:
    """An Arrow type with microseconds for nanoseconds, wherever in it they stand."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC") if kind.unit == "ns" or kind.tz else kind
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_struct(kind):
        return pa.struct(
            [kind.field(i).with_type(coarse(kind.field(i).type)) for i in range(kind.num_fields)]
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(coarse(kind.value_type)))
    return kind


def columns_read(file: SourceFile, names: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Those of the file's columns that are wanted; Unreachable where two of them have one name."""
    read = [name for name in names if not fields or name in fields]
    if len(set(read)) < len(read):
        twice = next(name for name in read if read.count(name) > 1)
        raise Unreachable(
            f"{file.location.url} has two columns {twice}, and which of them is meant nothing tells: rename one"
        )
    return read


def rows_at_once(rows: int, size: int) -> int:
    """How many rows to decode at once, of so many that take so many bytes."""
    return max(1, min(MOST_ROWS, BATCH_BYTES * rows // max(size, 1)))


_MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1": "an arrow file",
    b"\xff\xff\xff\xff": "an arrow stream",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "zip",
    b"{": "JSON Lines",
    b"[": "JSON",
}


def begins_as(file: SourceFile) -> str:
    """What a file is by its first bytes, as a person calls it; empty where they do not tell."""
    with file.open() as stored:
        head = stored.read(8)
    return next((name for magic, name in _MAGIC.items() if head.lstrip().startswith(magic)), "")


def no_such_file(file: SourceFile, what: str, error: Exception) -> Unreachable:
    """A file that is not what it is read as, or not whole."""
    looks = begins_as(file)
    hint = f"; it begins as {looks} does" if looks and looks not in what else ""
    reason = " ".join(str(error).split()).rstrip(".")
    return Unreachable(
        f"{file.location.url} is no whole {what} ({reason[:200]}{hint}), so none of its records can be read: copy it again, or "
        "name it by what it is"
    )
