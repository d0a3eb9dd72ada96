"""Arrow's own files: IPC files (Feather too), which have a directory of their record batches, and
streams, which have none. Functions on rows that Arrow has read, which parquet uses too, stand here
as well.

`datasets` keeps its data as streams (`save_to_disk`, its cache). On a disk these are mapped and
never held whole: only the rows that are being decoded are touched. A row's number in the file is
known only after all earlier rows were read, so a row is told by its batch, and its number is
counted at publication.

A row's digest covers the fields that are read of it, as orjson writes them: compression, the
grouping of rows and the release of pyarrow do not change it. Values that JSON has no form for
(times, decimals, bytes) are written with the name of their type, so that they are not taken for
texts. JSON texts and maps are decoded first (`arrow_values.py`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from mdsmix.errors import Unreachable
from mdsmix.json_values import write_json
from mdsmix.messages import flatten_error, join_names
from mdsmix.record import RecordRefused
from mdsmix.sources.arrow_values import MAP_REASONS, Decode, decode_record, decoders_of
from mdsmix.sources.format import ROWS, Block, Format, Item, Splits, item_blocks
from mdsmix.sources.sniff import ARROW_FILE_MAGIC, ARROW_MESSAGE_START
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span, Unit

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = BLOCK_BYTES // 2
"""About the bytes of rows that are decoded at once: Arrow's columns, Python's records and their
JSON are all held.
"""
MOST_ROWS = 4096
"The most rows that are decoded at once, however short they are."
_END = b"\0\0\0\0"
"The last bytes of a whole stream. Cut off behind a message, a stream may end so too."


class Arrow(Format):
    """`*.arrow` and `*.feather`. Its ordinals are record batches and rows in them."""

    version = 2  # JSON texts and maps are decoded
    reads_fields = True
    counted = "row"
    reasons = MAP_REASONS

    def prepare(self) -> None:
        import pyarrow.ipc  # noqa: F401

    def version_for(self, file: SourceFile, fields: tuple[str, ...]) -> int:
        """Return 1: the lines of rows with JSON texts or maps, and so their digests, changed with
        the decoding, and no others.
        """
        return 1

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        with _opened(file, fields) as (reader, *_):
            parts = getattr(reader, "num_record_batches", 1)
        most = max(1, parts * window_bytes // file.stat.size)
        starts = [0, *(in_part(n, 0) for n in range(most, parts, most))]
        return zip(starts, [*starts[1:], None], strict=True)

    def records(self, file: SourceFile) -> int | None:
        """None for a file in a store: counting would read all of its batches."""
        if file.location.is_store:
            return None
        with _opened(file, ()) as (reader, *_):
            span = Unit(files=(file,)).span()
            return sum(int(batch.num_rows) for _, batch in _parts(reader, span))

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with _opened(file, span.unit.fields) as (reader, columns, others):
            yield from item_blocks(file, span, ROWS, _rows(reader, span, columns, others), others)


def in_part(part: int, row: int) -> int:
    """The ordinal of row `row` in record batch `part`: the number of rows before the batch is
    unknown.
    """
    return (part + 1) << 32 | row


@contextmanager
def _opened(
    file: SourceFile, fields: tuple[str, ...]
) -> Iterator[tuple[Any, list[str], list[str]]]:
    """A reader of the wanted columns, their names, and the names of the other columns. Arrow's
    errors become Unreachable with the file.
    """
    import pyarrow as pa

    try:
        with file.open_random() as stored:
            head = stored.read(len(ARROW_FILE_MAGIC))
            is_file = head == ARROW_FILE_MAGIC
            if not is_file:
                end = ARROW_MESSAGE_START + _END if head.startswith(ARROW_MESSAGE_START) else _END
                stored.seek(max(0, file.stat.size - len(end)))
                if stored.read() != end:
                    raise EOFError("its end mark is missing, so its writing was not finished")
            source = stored if file.location.is_store else pa.memory_map(file.location.url)
            make = pa.ipc.open_file if is_file else pa.ipc.open_stream
            source.seek(0)
            names = make(source).schema.names
            wanted = columns_read(file, names, fields)
            # An empty list means all columns to Arrow; columns too many are left out later.
            numbers = [names.index(name) for name in wanted]
            source.seek(0)
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=numbers)
            yield make(source, options=options), wanted, sorted(set(names) - set(wanted))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, EOFError) as error:
        raise no_such_file(file, "arrow file", error) from None


def _rows(reader: Any, span: Span, columns: list[str], others: list[str]) -> Iterator[Item]:
    """The rows of the record batches in the span."""
    row, decoders = 0, decoders_of(reader.schema)
    for part, batch in _parts(reader, span):
        batch = _checked(batch.select(columns))
        step = rows_at_once(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, step):
            piece = batch.slice(start, step)
            place = {"row": row + start, "batch": part}
            yield from row_items(piece, in_part(part, start), place, (*columns, *others), decoders)
        row += batch.num_rows


def _parts(reader: Any, span: Span) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The record batches in the span, each with its number."""
    if not hasattr(reader, "num_record_batches"):
        yield from enumerate(reader)
        return
    for part in range(reader.num_record_batches):
        if span.holds(in_part(part, 0)):
            yield part, reader.get_batch(part)


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, checked: its offsets must not lead outside of it, which Arrow itself does not
    check. Invalid UTF-8 is left to the rows.
    """
    try:
        batch.validate(full=True)
    except ValueError as error:
        if "UTF8" not in str(error):
            raise
    return batch


def row_items(
    rows: pa.RecordBatch,
    ordinal: int,
    place: dict[str, int],
    columns: tuple[str, ...],
    decoders: dict[str, Decode],
) -> Iterator[Item]:
    """Rows as items, each with its record and its line of JSON; a bad row has its raw bytes.
    `ordinal` and `place`: of the first row.
    """
    rows, bad, raws = _readable(rows), dict[int, str](), dict[int, bytes]()
    try:
        records = rows.to_pylist()
    except Exception:  # one row is bad: each row is read alone
        records = [_row(rows, i, bad) for i in range(rows.num_rows)]
    for i, record in enumerate(records):
        if i in bad:
            raws[i] = _raw(rows, i)
        elif decoders:
            try:
                record = decode_record(record, decoders)
            except RecordRefused as error:
                # With a space behind it, no other row has this line, so the row has a digest of its
                # own.
                bad[i], raws[i] = error.why, line(record) + b" "
        raw = raws[i] if i in raws else line(record)
        at, reason = {**place, "row": place["row"] + i}, bad.get(i, "")
        yield Item(ordinal + i, at, len(raw) + 1, raw, record, reason, columns)


def _row(rows: pa.RecordBatch, index: int, bad: dict[int, str]) -> Any:
    try:
        return rows.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError:
        bad[index] = "invalid_utf8"
    except (ValueError, OverflowError):  # a year that Python has no date for
        bad[index] = "unreadable_value"
    return None


def _raw(rows: pa.RecordBatch, index: int) -> bytes:
    """The bytes of a bad row: those of its texts, or the row as Arrow writes it where it holds
    other types.
    """
    import pyarrow as pa

    row = rows.slice(index, 1)
    if not {*map(str, row.schema.types)} <= {"string", "large_string"}:
        return bytes(row.serialize())
    texts = [column.cast(pa.large_binary())[0].as_py() for column in row.columns]
    return b"\n".join(text or b"" for text in texts)


_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_NON_STR_KEYS


def line(record: Any) -> bytes:
    """A record as a line of JSON without its end; every release of the reading library gives the
    same bytes.
    """
    return write_json(record, _said, _OPTIONS)


def _said(value: Any) -> Any:
    """A value that JSON has no form for, as `{"date": "2024-01-31"}`."""
    said = base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
    return {type(value).__name__: said}


def _readable(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with times of nanoseconds cut to microseconds, the finest that Python's
    times have.
    """
    import pyarrow as pa

    wanted = [_coarse(kind) for kind in rows.schema.types]
    if wanted == rows.schema.types:
        return rows
    columns = [c.cast(kind, safe=False) for c, kind in zip(rows.columns, wanted, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _coarse(kind: pa.DataType) -> pa.DataType:
    """The Arrow type with microseconds in place of nanoseconds, at any depth, and with UTC as the
    zone of times that have one.
    """
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_coarse(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_coarse(kind.value_type)))
    if pa.types.is_timestamp(kind) and (kind.unit == "ns" or kind.tz):
        return pa.timestamp("us", kind.tz and "UTC")
    coarser = {"time64[ns]": pa.time64("us"), "duration[ns]": pa.duration("us")}
    return coarser.get(str(kind), kind)


def columns_read(file: SourceFile, names: Sequence[str], fields: Sequence[str]) -> list[str]:
    """The file's columns that are wanted (`fields`; empty: all). Unreachable where two of them have
    one name.
    """
    read = [name for name in names if not fields or name in fields]
    if len(set(read)) < len(read):
        twice = next(name for name in read if read.count(name) > 1)
        raise Unreachable(
            f"{file.location.url} has two columns {twice}, and which of them is meant nothing tells: rename one"
        )
    return read


def rows_at_once(rows: int, size: int) -> int:
    """The number of rows to decode at once, of `rows` rows that take `size` bytes."""
    return max(1, min(MOST_ROWS, BATCH_BYTES * rows // max(size, 1)))


def no_such_file(file: SourceFile, what: str, error: Exception) -> Unreachable:
    """Return the error for a file that is cut off, of another format than it is read as, or of
    types that pyarrow does not read.
    """
    if "64 bits" in str(error):
        return Unreachable(_of_wide_integers(file))
    return Unreachable(
        f"{file.location.url} is no whole {what} ({flatten_error(error)[:200]}), so none of its records can be read: copy it again, or name it by what it is"
    )


_WIDE_COLUMN = re.compile(rb"\x15\x0e\x15\x20\x15[\x00\x02\x04]\x18([\x01-\x7f])")
"""A column of 16 bytes in the footer of a parquet file, up to the length of its name: type, length,
repetition.
"""


def _of_wide_integers(file: SourceFile) -> str:
    """Return a sentence on a file with integers of more than 64 bits, and their columns, as far as
    its footer tells.
    """
    with file.open_random() as stored:
        stored.seek(max(0, file.stat.size - 8))
        end = stored.read()
        footer = b""
        if end[4:] == b"PAR1":
            stored.seek(max(0, file.stat.size - 8 - int.from_bytes(end[:4], "little")))
            footer = stored.read()[:-8]
    found = _WIDE_COLUMN.finditer(footer)
    names = [
        footer[each.end() : each.end() + each[1][0]].decode(errors="replace") for each in found
    ]
    which = f"the column {join_names(names)}" if names else "a column"
    return (
        f"{file.location.url} has integers of more than 64 bits in {which}, as polars' Int128 writes them, and pyarrow opens no such file: "
        "cast the column to Int64 or String, or leave it out, and write the file again"
    )
