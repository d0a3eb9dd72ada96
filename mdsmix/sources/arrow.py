"""Arrow's own files: IPC files (including Feather), which have a directory of their record batches,
and streams, which have none. `parquet.py` uses the functions here that make items of rows.

`datasets` stores its data as streams (`save_to_disk`, its cache). On a disk these are mapped and
never loaded as a whole: only the rows that are being decoded are read. A row's number in the file
is known only after all earlier rows were read. So a row is identified by its batch and its number
in the batch; its number in the file is counted at publication.

A row's digest covers the fields that are read, as orjson writes them. So compression, the grouping
of rows and the release of pyarrow do not change it. Values that JSON cannot express (times,
decimals, bytes) are written with the name of their type, so that they differ from strings.
Strings of JSON and maps are decoded first (`arrow_values.py`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from mdsmix.errors import Unreachable
from mdsmix.json_values import write_json
from mdsmix.messages import flatten_error, join_names
from mdsmix.record import RecordRefused
from mdsmix.sources.arrow_values import MAP_REASONS, Decode, decode_record, make_decoders
from mdsmix.sources.format import ROWS, Block, Format, Item, Splits, item_blocks
from mdsmix.sources.sniff import ARROW_FILE_MAGIC, ARROW_MESSAGE_START
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span, Unit

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = BLOCK_BYTES // 2
"""About how many bytes of rows are decoded at once. Half a block, because Arrow's columns, Python's
records and their JSON are in memory together.
"""
MOST_ROWS = 4096
"The most rows that are decoded at once, however short they are."
_STREAM_END = b"\0\0\0\0"
"""The last bytes of a complete stream. A stream that was truncated after a message may also end in
them.
"""


class Arrow(Format):
    """The format of `*.arrow` and `*.feather`. A file is cut into splits (ranges of whole record
    batches).

    The ordinal of a row (a number that increases through the file) is made of the number of its
    record batch and its number in the batch (`make_batch_ordinal`).
    """

    version = 2  # JSON texts and maps are decoded
    reads_fields = True
    counted = "row"
    reasons = MAP_REASONS

    def prepare(self) -> None:
        import pyarrow.ipc  # noqa: F401

    def version_for(self, file: SourceFile, fields: tuple[str, ...]) -> int:
        """Return 1 as the version of this format that is hashed into the file's digests, although
        `version` is 2. If a digest changes, its records are converted again.

        Version 2 decodes JSON strings and maps, and hashes their decoded values. So a file with
        such values has new digests anyway. Any other file has the same records as under version 1:
        with a 2 in its digests it would be converted again for nothing.
        """
        return 1

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        """Return the splits of the file as ranges (start, end) of ordinals (`make_batch_ordinal`).
        An end of None is the end of the file.

        A split has whole record batches, of about `window_bytes` bytes together. A file in Arrow's
        stream format has no directory of its batches, so it is one split.

        Args:
            fields: the fields that are read of each record; empty: all.
        """
        with _opened(file, fields) as opened:
            # A stream has no directory of its batches, so it counts as one batch.
            batches = getattr(opened.reader, "num_record_batches", 1)
        batches_of_split = max(1, batches * window_bytes // file.stat.size)
        starts = [0]
        for batch in range(batches_of_split, batches, batches_of_split):
            starts.append(make_batch_ordinal(batch, 0))
        # Each split ends where the next one begins: [(0, start), (start, None)].
        ends = [*starts[1:], None]
        return zip(starts, ends, strict=True)

    def records(self, file: SourceFile) -> int | None:
        """Return the number of rows; None for a file in a store, since counting its rows would
        download all batches.
        """
        if file.location.is_store:
            return None
        whole_file = Unit(files=(file,)).span()
        with _opened(file, ()) as opened:
            return sum(int(batch.num_rows) for _, batch in _batches(opened.reader, whole_file))

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with _opened(file, span.unit.fields) as opened:
            yield from item_blocks(file, span, ROWS, _rows(opened, span), opened.unread)


def make_batch_ordinal(batch: int, row: int) -> int:
    """Return the ordinal of row `row` in record batch `batch`: a number that increases from row to
    row through the file.

    The ordinal is not the row's number in the file, because the number of rows before a batch is
    unknown.
    """
    # The upper bits are the number of the batch, from 1. The lower 32 bits are the row.
    return (batch + 1) << 32 | row


class _Opened(NamedTuple):
    """An open Arrow file or stream."""

    reader: Any
    columns: list[str]
    "The columns that are read."
    unread: list[str]
    "The other columns."


@contextmanager
def _opened(file: SourceFile, fields: tuple[str, ...]) -> Iterator[_Opened]:
    """Open an Arrow file or stream for reading only these fields; all fields if `fields` is empty.

    Arrow's errors, also those inside the `with` block, become Unreachable.
    """
    import pyarrow as pa

    try:
        with file.open_random() as stored:
            # An IPC file begins with a mark. Any other content must be a stream, and a complete
            # stream ends with a mark.
            head = stored.read(len(ARROW_FILE_MAGIC))
            is_file = head == ARROW_FILE_MAGIC
            if not is_file:
                _check_stream_end(file, stored, head)
            source = stored if file.location.is_store else pa.memory_map(file.location.url)
            open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream

            # Read the schema, and choose the columns.
            source.seek(0)
            names = open_reader(source).schema.names
            columns = select_columns(file, names, fields)
            # If `numbers` is empty, Arrow reads all columns; `_rows` then drops them.
            numbers = [names.index(name) for name in columns]

            # Open the reader of these columns.
            source.seek(0)
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=numbers)
            reader = open_reader(source, options=options)
            yield _Opened(reader, columns, sorted(set(names) - set(columns)))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, EOFError) as error:
        raise make_unreadable_error(file, "arrow file", error) from None


def _check_stream_end(file: SourceFile, stored: Any, head: bytes) -> None:
    """Raise EOFError if a stream does not end with its end mark.

    Args:
        stored: an open reader of the file.
        head: the first bytes of the file, which show the version of the stream format.
    """
    # Since Arrow 0.15 the end mark begins like every other message.
    end = _STREAM_END
    if head.startswith(ARROW_MESSAGE_START):
        end = ARROW_MESSAGE_START + _STREAM_END
    stored.seek(max(0, file.stat.size - len(end)))
    if stored.read() != end:
        raise EOFError("the end mark is missing, so the file was not written completely")


def _rows(opened: _Opened, span: Span) -> Iterator[Item]:
    """Yield the rows of the record batches in the span (a range of the file) as items."""
    decoders = make_decoders(opened.reader.schema)
    names = (*opened.columns, *opened.unread)
    rows_before = 0
    for number, batch in _batches(opened.reader, span):
        batch = _validated(batch.select(opened.columns))
        step = choose_row_count(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, step):
            rows = batch.slice(start, step)
            first_place = {"row": rows_before + start, "batch": number}
            ordinal = make_batch_ordinal(number, start)
            yield from make_row_items(rows, ordinal, first_place, names, decoders)
        rows_before += batch.num_rows


def _batches(reader: Any, span: Span) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (number, record batch) for the record batches in the span (a range of the file)."""
    if not hasattr(reader, "num_record_batches"):  # a stream, which is one split
        yield from enumerate(reader)
        return
    for number in range(reader.num_record_batches):
        if span.holds(make_batch_ordinal(number, 0)):
            yield number, reader.get_batch(number)


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch after checking its offsets, which Arrow does not check when it reads.

    Raises ValueError if an offset points out of the batch. Strings that are not valid UTF-8 raise
    no error here: they are found later, when each row is decoded.
    """
    try:
        batch.validate(full=True)
    except ValueError as error:
        if "UTF8" not in str(error):
            raise
    return batch


def make_row_items(
    rows: pa.RecordBatch,
    ordinal: int,
    first_place: dict[str, int],
    columns: tuple[str, ...],
    decoders: dict[str, Decode],
) -> Iterator[Item]:
    """Yield rows as items. A row that is not a record has a reason code.

    The raw bytes of an item are the record as a line of JSON. For a row that cannot be read at all,
    they are its strings, or the row as Arrow serialises it (`_raw_bytes`).

    Args:
        rows: consecutive rows of one record batch or row group.
        ordinal: the ordinal (a number that increases through the file) of the first row.
        first_place: the place of the first row, such as `{"row": 12, "batch": 0}`.
        columns: the names of all columns of the file.
        decoders: column -> decoder of its values, for columns with JSON strings or maps.
    """
    # Read the records. The keys of `reasons` and `raws` are indexes of rows.
    rows = _with_python_times(rows)
    reasons = dict[int, str]()
    raws = dict[int, bytes]()
    try:
        records = rows.to_pylist()
    except Exception:  # at least one row is bad: read each row alone
        records = [_read_row(rows, index, reasons) for index in range(rows.num_rows)]

    # Decode JSON strings and maps in the records, and yield the items.
    for index, record in enumerate(records):
        if index in reasons:
            raws[index] = _raw_bytes(rows, index)
        elif decoders:
            try:
                record = decode_record(record, decoders)
            except RecordRefused as error:
                reasons[index] = error.why
                # A good row never ends in a space, so no good row has the same bytes and digest.
                raws[index] = write_json_line(record) + b" "
        raw = raws[index] if index in raws else write_json_line(record)
        row_place = {**first_place, "row": first_place["row"] + index}
        reason = reasons.get(index, "")
        length = len(raw) + 1  # with a newline, as in a file of lines
        yield Item(ordinal + index, row_place, length, raw, record, reason, columns)


def _read_row(rows: pa.RecordBatch, index: int, reasons: dict[int, str]) -> Any:
    """Return the record of one row. If the row cannot be read, return None and add the row's reason
    code to `reasons`, under its index.
    """
    try:
        return rows.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError:
        reasons[index] = "invalid_utf8"
    except (ValueError, OverflowError):  # a year that Python has no date for
        reasons[index] = "unreadable_value"
    return None


def _raw_bytes(rows: pa.RecordBatch, index: int) -> bytes:
    """Return the bytes of a bad row for the quarantine (the file of bad records): its strings,
    joined by newlines; or the whole row as Arrow serialises it if a column has another type.
    """
    import pyarrow as pa

    row = rows.slice(index, 1)
    types = {str(kind) for kind in row.schema.types}
    has_only_strings = types <= {"string", "large_string"}
    if not has_only_strings:
        return bytes(row.serialize())
    cells = [column.cast(pa.large_binary())[0].as_py() for column in row.columns]
    return b"\n".join(cell or b"" for cell in cells)


_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_NON_STR_KEYS


def write_json_line(record: Any) -> bytes:
    """Return a record as a line of JSON without its newline.

    The bytes do not depend on the release of the library that read the record.
    """
    return write_json(record, _typed_value, _OPTIONS)


def _typed_value(value: Any) -> Any:
    """Return an object with the type and the string of a value that JSON cannot express:
    `{"date": "2024-01-31"}`. Bytes are written in base64.
    """
    text = base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
    return {type(value).__name__: text}


def _with_python_times(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with times in microseconds instead of nanoseconds, truncated. Python's times
    have no finer unit.
    """
    import pyarrow as pa

    types = [_coarse_type(kind) for kind in rows.schema.types]
    if types == rows.schema.types:
        return rows
    columns = [
        column.cast(kind, safe=False) for column, kind in zip(rows.columns, types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _coarse_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with microseconds in place of nanoseconds, and with UTC in place of another
    time zone; also inside structs and lists. Types without times are returned unchanged.

    Example: timestamp[ns, tz=Europe/Rome] becomes timestamp[us, tz=UTC].
    """
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_coarse_type(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make_list = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make_list(kind.value_field.with_type(_coarse_type(kind.value_type)))
    if pa.types.is_timestamp(kind) and (kind.unit == "ns" or kind.tz):
        zone = "UTC" if kind.tz else None
        return pa.timestamp("us", zone)
    coarse = {"time64[ns]": pa.time64("us"), "duration[ns]": pa.duration("us")}
    return coarse.get(str(kind), kind)


def select_columns(file: SourceFile, names: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Return the names of the columns to read.

    Args:
        names: all columns of the file.
        fields: the fields that are needed; empty: all columns.

    Raises Unreachable if two columns to read have the same name.
    """
    columns = [name for name in names if not fields or name in fields]
    for name in columns:
        if columns.count(name) > 1:
            raise Unreachable(f"{file.location.url} has two columns named {name}: rename one")
    return columns


def choose_row_count(rows: int, size: int) -> int:
    """Return how many rows to decode at once, so that these rows have about BATCH_BYTES bytes; at
    most MOST_ROWS.

    Args:
        rows: the number of rows of a record batch or row group.
        size: the bytes of all these rows.
    """
    rows_of_bytes = BATCH_BYTES * rows // max(size, 1)
    return max(1, min(MOST_ROWS, rows_of_bytes))


def make_unreadable_error(file: SourceFile, kind: str, error: Exception) -> Unreachable:
    """Return the error for the user about a file that pyarrow cannot open: the file is truncated,
    has another format, or has types that pyarrow does not know.

    Args:
        kind: the expected kind of file, such as `parquet file`.
        error: pyarrow's error.
    """
    if "64 bits" in str(error):  # pyarrow's words about integers that are too wide
        return Unreachable(_wide_integers_message(file))
    return Unreachable(
        f"{file.location.url} is not a complete {kind} ({flatten_error(error)[:200]}), "
        "so none of its records can be read: copy it again, or rename it if it is another format"
    )


_WIDE_COLUMN = re.compile(rb"\x15\x0e\x15\x20\x15[\x00\x02\x04]\x18([\x01-\x7f])")
"""Matches the description of a column of 16-byte values in the footer of a parquet file: its type,
length and repetition. Group 1 is the byte that follows, the length of the column's name.
"""


def _wide_integers_message(file: SourceFile) -> str:
    """Return the message about a file that has integers of more than 64 bits. For a parquet file,
    the message names the columns of these integers.
    """
    footer = _parquet_footer(file)
    names = list[str]()
    for column in _WIDE_COLUMN.finditer(footer):
        name_length = column[1][0]  # the value of the one byte in group 1
        name = footer[column.end() : column.end() + name_length]
        names.append(name.decode(errors="replace"))
    columns = f"the column {join_names(names)}" if names else "a column"
    return (
        f"{file.location.url} has integers of more than 64 bits in {columns}, as polars' Int128 "
        "writes them, and pyarrow cannot open such a file: cast the column to Int64 or String, "
        "or drop it, and write the file again"
    )


def _parquet_footer(file: SourceFile) -> bytes:
    """Return the raw footer of a parquet file; b"" if the file is not parquet."""
    with file.open_random() as stored:
        # The last 8 bytes are the footer's length and the format's mark. The footer is before them.
        stored.seek(max(0, file.stat.size - 8))
        end = stored.read()
        length, mark = int.from_bytes(end[:4], "little"), end[4:]
        if mark != b"PAR1":
            return b""
        stored.seek(max(0, file.stat.size - 8 - length))
        return stored.read()[:-8]
