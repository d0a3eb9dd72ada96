"""Arrow's own files: IPC files (including Feather), which have a directory of their record batches,
and streams, which have none. `parquet.py` uses the functions here that make blocks of rows.

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
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from mdsmix.errors import Unreachable
from mdsmix.json_values import write_json
from mdsmix.messages import flatten_error, join_names
from mdsmix.record import RecordRefused
from mdsmix.sources.arrow_values import MAP_REASONS, Decode, decode_record, make_decoders
from mdsmix.sources.format import ROWS, Block, Buffer, Decoded, Format, Item, Splits
from mdsmix.sources.row_blocks import Rows, make_records, make_row_blocks
from mdsmix.sources.sniff import ARROW_FILE_MAGIC, ARROW_MESSAGE_START, HEAD_BYTES
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span, Unit
from mdsmix.storage.lfs import describe_pointer

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = BLOCK_BYTES // 2
"""About how many bytes of rows are decoded at once. Half a block, because Arrow's columns, Python's
records and their JSON are in memory together.
"""
MOST_ROWS = 4096
"The most rows that are decoded at once, however short they are."
_BLOCK = struct.Struct("<qi4xq")
"A place in the footer of an IPC file: offset, length of the metadata, length of the body."
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
    is_never_empty = True
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
        with open_arrow(file, fields) as opened:
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
        with open_arrow(file, ()) as opened:
            return sum(int(batch.num_rows) for _, batch in _read_batches(opened, whole_file))

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with open_arrow(file, span.unit.fields) as opened:
            batches = _decode_batches(opened, span)
            yield from make_row_blocks(file, span, ROWS, batches, opened.unread)


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
    source: Any
    "What the reader reads from."
    size: int
    "The bytes of the file."
    columns: list[str]
    "The columns that are read."
    unread: list[str]
    "The other columns."


@contextmanager
def open_arrow(file: SourceFile, fields: tuple[str, ...]) -> Iterator[_Opened]:
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
            if is_file:
                _check_one_file(file, stored)
            else:
                _check_stream_end(file, stored, head)
            source = stored if file.location.is_store else pa.memory_map(file.location.url)
            open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream

            # Read the schema, and choose the columns.
            source.seek(0)
            names = open_reader(source).schema.names
            columns = select_columns(file, names, fields)
            # If `numbers` is empty, Arrow reads all columns; `_decode_batches` then drops them.
            numbers = [names.index(name) for name in columns]

            # Open the reader of these columns.
            source.seek(0)
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=numbers)
            reader = open_reader(source, options=options)
            yield _Opened(
                reader=reader,
                source=source,
                size=file.stat.size,
                columns=columns,
                unread=sorted(set(names) - set(columns)),
            )
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


def _check_one_file(file: SourceFile, stored: Any) -> None:
    """Raise EOFError if several IPC files are joined in this one. Only the last one's footer is
    read, and its positions count from that file's own beginning, so they lead into the first file.

    Args:
        stored: an open reader of the file.
    """
    # The file ends with the footer, its length and the format's mark. In a file that was cut, other
    # bytes are there: pyarrow's error says so, and the length is not that of a footer.
    length_at = file.stat.size - len(ARROW_FILE_MAGIC) - 4
    stored.seek(max(0, length_at))
    length, mark = stored.read(4), stored.read()
    footer_start = length_at - int.from_bytes(length, "little")
    if mark != ARROW_FILE_MAGIC or footer_start < 0:
        return
    stored.seek(footer_start)
    footer = stored.read(length_at - footer_start)
    # Between the last record batch and the footer are an end mark of 8 bytes or fewer, and as many
    # bytes as the earlier files have. So the last file begins within so many bytes.
    gap = footer_start - _find_batches_end(footer)
    if find_next_file(stored, ARROW_FILE_MAGIC, gap):
        raise EOFError("it is several files one after the other: use the files themselves")


def find_next_file(stored: Any, mark: bytes, within: int) -> bool:
    """Return whether a file of Arrow or Parquet ends, and another one follows it.

    Args:
        stored: an open reader of the file.
        mark: the first and the last bytes of a file of the format.
        within: the first bytes of the file, in which the other one begins if there is one.
    """
    seam = 2 * mark
    for start in range(0, max(0, within), BLOCK_BYTES):
        stored.seek(start)
        piece = stored.read(min(BLOCK_BYTES, within - start) + len(seam))
        for match in re.finditer(re.escape(seam), piece):
            # Text may contain the seam too. Before that of files is the length of a footer.
            length_at = start + match.start() - 4
            stored.seek(max(0, length_at))
            if 0 < int.from_bytes(stored.read(4), "little") <= length_at - len(mark):
                return True
    return False


def _find_batches_end(footer: bytes) -> int:
    """Return the byte at which the last record batch of an IPC file ends; 0 if the footer, which
    pyarrow does not show, cannot be read.

    Args:
        footer: a FlatBuffers table. Its third and fourth fields are vectors of blocks: the places
            of dictionaries and of record batches.
    """
    try:
        (table,) = struct.unpack_from("<I", footer)
        fields = table - struct.unpack_from("<i", footer, table)[0]
        (fields_size,) = struct.unpack_from("<H", footer, fields)
        ends = [0]
        for field in (8, 10):  # two sizes of 2 bytes each, then 2 bytes for each field
            place = (
                struct.unpack_from("<H", footer, fields + field)[0] if field < fields_size else 0
            )
            if not place:  # the field is not set
                continue
            vector = table + place
            vector += struct.unpack_from("<I", footer, vector)[0]
            (count,) = struct.unpack_from("<I", footer, vector)
            if count:
                last_block = vector + 4 + _BLOCK.size * (count - 1)
                ends.append(sum(_BLOCK.unpack_from(footer, last_block)))
        return max(ends)
    except struct.error:
        return 0


def _decode_batches(opened: _Opened, span: Span) -> Iterator[DecodedRows]:
    """Yield the rows of the record batches in the span (a range of the file)."""
    decoders = make_decoders(opened.reader.schema)
    names = (*opened.columns, *opened.unread)
    rows_before = 0
    for number, batch in _read_batches(opened, span):
        batch = _validate(batch.select(opened.columns))
        step = choose_row_count(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, step):
            rows = batch.slice(start, step)
            first_place = {"row": rows_before + start, "batch": number}
            ordinal = make_batch_ordinal(number, start)
            yield decode_rows(rows, ordinal, first_place, names, decoders)
        rows_before += batch.num_rows


def _read_batches(opened: _Opened, span: Span) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (number, record batch) for the record batches in the span (a range of the file).

    Raises EOFError if a stream ends before the file: Arrow silently stops at its end mark.
    """
    reader = opened.reader
    if not hasattr(reader, "num_record_batches"):  # a stream, which is one split
        yield from enumerate(reader)
        if opened.source.tell() != opened.size:
            raise EOFError(
                "other bytes follow the end mark of its stream, as if streams were joined by cat: "
                "write their batches as one stream"
            )
        return
    for number in range(reader.num_record_batches):
        if span.holds(make_batch_ordinal(number, 0)):
            yield number, reader.get_batch(number)


def _validate(batch: pa.RecordBatch) -> pa.RecordBatch:
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


@dataclass(slots=True, kw_only=True)
class DecodedRows(Rows):
    """Consecutive rows of one record batch or row group, decoded. A row that is not a record has a
    reason code.

    The bytes of a row are its record as a line of JSON. For a row that cannot be read at all, they
    are its strings, or the row as Arrow serialises it (`_make_raw_bytes`).
    """

    first_place: dict[str, int]
    'The place of the first row, such as `{"row": 12, "batch": 0}`.'
    records: list[Any]
    "The record of each row; None for a row that cannot be read."
    reasons: dict[int, str]
    "Index of a row that is not a record -> reason code."
    columns: tuple[str, ...]
    "The names of all columns of the file."

    @property
    def lengths(self) -> Sequence[int]:
        return [len(raw) + 1 for raw in self.raws]  # with a newline each, as in a file

    def slice(self, start: int, stop: int) -> Rows:
        place = {**self.first_place, "row": self.first_place["row"] + start}
        reasons = {index - start: r for index, r in self.reasons.items() if start <= index < stop}
        return DecodedRows(
            ordinal=self.ordinal + start,
            raws=self.raws[start:stop],
            first_place=place,
            records=self.records[start:stop],
            reasons=reasons,
            columns=self.columns,
        )

    def content(self) -> Buffer:
        return b"\n".join(self.raws) + b"\n"

    def decode(self) -> Decoded:
        records = self.records
        if self.reasons:
            records = [record for index, record in enumerate(records) if index not in self.reasons]
        return records, self.reasons

    def item(self, index: int) -> Item:
        raw = self.raws[index]
        place = {**self.first_place, "row": self.first_place["row"] + index}
        reason = self.reasons.get(index, "")
        record = self.records[index]
        return Item(self.ordinal + index, place, len(raw), raw, record, reason, self.columns)


def decode_rows(
    rows: pa.RecordBatch,
    ordinal: int,
    first_place: dict[str, int],
    columns: tuple[str, ...],
    decoders: dict[str, Decode],
) -> DecodedRows:
    """Decode rows.

    Args:
        rows: consecutive rows of one record batch or row group.
        ordinal: the ordinal (a number that increases through the file) of the first row.
        first_place: the place of the first row, such as `{"row": 12, "batch": 0}`.
        columns: the names of all columns of the file.
        decoders: column -> decoder of its values, for columns with JSON strings or maps.
    """
    # Read the records. The keys of `reasons` and `bad_raws` are indexes of rows.
    rows = _with_python_times(rows)
    reasons = dict[int, str]()
    bad_raws = dict[int, bytes]()
    try:
        records = _read_rows(rows)
    except Exception:  # at least one row is bad: read each row alone
        records = [_read_row(rows, index, reasons) for index in range(rows.num_rows)]
        bad_raws = {index: _make_raw_bytes(rows, index) for index in reasons}
    # Decode JSON strings and maps in the records.
    for index, record in enumerate(records if decoders else ()):
        if index in reasons:
            continue
        try:
            records[index] = decode_record(record, decoders)
        except RecordRefused as error:
            reasons[index] = error.why
            # A good row never ends in a space, so no good row has the same bytes and digest.
            bad_raws[index] = write_json_line(record) + b" "
    raws = _write_json_lines(records)
    for index, raw in bad_raws.items():
        raws[index] = raw
    return DecodedRows(
        ordinal=ordinal,
        raws=raws,
        first_place=first_place,
        records=records,
        reasons=reasons,
        columns=columns,
    )


def _read_rows(rows: pa.RecordBatch) -> list[Any]:
    """Return the record of each row: the name of each column -> its value.

    Raises an error of any class if a value cannot be read.
    """
    import pyarrow as pa

    texts = (pa.string(), pa.large_string())
    columns = list[list[Any]]()
    for column in rows.columns:
        if column.type in texts:
            # A third of the time of `to_pylist`.
            columns.append(column.to_numpy(zero_copy_only=False).tolist())
        else:
            columns.append(column.to_pylist())
    if not columns:
        return [{} for _ in range(rows.num_rows)]
    return make_records(rows.schema.names, columns)


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


def _make_raw_bytes(rows: pa.RecordBatch, index: int) -> bytes:
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
    line = write_json(record, _make_typed_value, _OPTIONS)
    # A copy: what orjson 3.13 returns occupies 4 KB more than its length.
    return bytes(memoryview(line))


def _write_json_lines(records: Sequence[Any]) -> list[bytes]:
    """Return each record as `write_json_line` writes it."""
    try:
        lines = [*map(orjson.dumps, records, repeat(_make_typed_value), repeat(_OPTIONS))]
    except TypeError:  # a value that only Python's writer can write
        return [*map(write_json_line, records)]
    # Copies, as above: of texts of 100 bytes, a batch of 4 MB took 125 MB. No line has a newline.
    return b"\n".join(lines).split(b"\n") if lines else []


def _make_typed_value(value: Any) -> Any:
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

    types = [_make_coarse_type(kind) for kind in rows.schema.types]
    if types == rows.schema.types:
        return rows
    columns = [
        column.cast(kind, safe=False) for column, kind in zip(rows.columns, types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _make_coarse_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with microseconds in place of nanoseconds, and with UTC in place of another
    time zone; also inside structs and lists. Types without times are returned unchanged.

    Example: timestamp[ns, tz=Europe/Rome] becomes timestamp[us, tz=UTC].
    """
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_make_coarse_type(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make_list = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make_list(kind.value_field.with_type(_make_coarse_type(kind.value_type)))
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
        return Unreachable(_describe_wide_integers(file))
    if "encrypted" in str(error):
        return make_encrypted_error(file)
    with file.open() as stored:
        pointer = describe_pointer(stored.read(HEAD_BYTES))
    if pointer:
        return Unreachable(f"{file.location.url} {pointer}")
    return Unreachable(
        f"{file.location.url} is not a complete {kind} ({flatten_error(error)[:200]}), "
        "so none of its records can be read: copy it again, or rename it if it is another format"
    )


def make_encrypted_error(file: SourceFile) -> Unreachable:
    """Return the error for the user about a parquet file that is encrypted, wholly or in part."""
    return Unreachable(
        f"{file.location.url} is encrypted, and mdsmix has no keys to read it: write it again "
        "without encryption"
    )


_WIDE_COLUMN = re.compile(rb"\x15\x0e\x15\x20\x15[\x00\x02\x04]\x18([\x01-\x7f])")
"""Matches the description of a column of 16-byte values in the footer of a parquet file: its type,
length and repetition. Group 1 is the byte that follows, the length of the column's name.
"""


def _describe_wide_integers(file: SourceFile) -> str:
    """Return the message about a file that has integers of more than 64 bits. For a parquet file,
    the message names the columns of these integers.
    """
    footer = _read_parquet_footer(file)
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


def _read_parquet_footer(file: SourceFile) -> bytes:
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
