"""Arrow's own files, and what parquet shares with them once Arrow has read rows: IPC files (Feather too), which have a directory of
their record batches, and streams, which have none.

`datasets` keeps its data as streams (`save_to_disk`, its cache). On a disk they are mapped and never held whole: of a batch
only the rows that are being decoded are touched. Where in the file a row is counted from 0 is known when what stands before it
has been read, so a row is told by its batch and counted at publication.

A row is known by the fields that are read of it, as orjson writes them: neither how a file is compressed, how its rows are
grouped, nor a release of pyarrow changes that. Values that JSON has no form for (times, decimals, bytes) are written with the
name of their type, so that they are not taken for texts.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from mdsmix.errors import Unreachable
from mdsmix.sources.format import ROWS, Block, Format, Item, Splits, item_blocks
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span, Unit

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = BLOCK_BYTES // 2
"About so many bytes of rows are decoded at once: Arrow's columns, Python's records and their JSON are all held."
MOST_ROWS = 4096
"Rows that are decoded at once, however short."
_FILE_MAGIC = b"ARROW1"
_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"The last bytes of a whole stream, and of one that was written before Arrow 0.15."
_MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "zip",
    b"{": "jsonl",
    b"[": "json",
}


class Arrow(Format):
    """`*.arrow` and `*.feather`. Its ordinals are record batches and rows in them."""

    reads_fields = True
    counted = "row"

    def prepare(self) -> None:
        import pyarrow.ipc  # noqa: F401

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        with _opened(file, fields) as (reader, *_):
            parts = getattr(reader, "num_record_batches", 1)
        most = max(1, parts * window_bytes // file.stat.size)
        starts = [0, *(in_part(n, 0) for n in range(most, parts, most))]
        return zip(starts, [*starts[1:], None], strict=True)

    def records(self, file: SourceFile) -> int | None:
        """Of a file in a bucket it would take all of its batches."""
        if file.location.is_store:
            return None
        with _opened(file, ()) as (reader, *_):
            span = Unit(files=(file,)).span()
            return sum(int(batch.num_rows) for _, batch in _parts(reader, span))

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with _opened(file, span.unit.fields) as (reader, columns, others):
            yield from item_blocks(file, span, ROWS, _rows(reader, span, columns, others), others)


def in_part(part: int, row: int) -> int:
    """The ordinal of a row of a record batch: nothing tells how many rows stand before it."""
    return (part + 1) << 32 | row


@contextmanager
def _opened(
    file: SourceFile, fields: tuple[str, ...]
) -> Iterator[tuple[Any, list[str], list[str]]]:
    """A reader of the wanted columns, their names and those of the others. Whatever Arrow says of damaged bytes names the file."""
    import pyarrow as pa

    try:
        with file.open_random() as stored:
            is_file = stored.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            if not is_file:
                stored.seek(max(0, file.stat.size - len(_ENDS[0])))
                if not stored.read().endswith(_ENDS):
                    raise EOFError("its end mark is missing, so its writing was not finished")
            source = stored if file.location.is_store else pa.memory_map(file.location.url)
            make = pa.ipc.open_file if is_file else pa.ipc.open_stream
            source.seek(0)
            names = make(source).schema.names
            wanted = columns_read(file, names, fields)
            # None named would mean all of them; what is read too much is left out later.
            numbers = [names.index(name) for name in wanted]
            source.seek(0)
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=numbers)
            yield make(source, options=options), wanted, sorted(set(names) - set(wanted))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, EOFError) as error:
        raise no_such_file(file, "arrow file", error) from None


def _rows(reader: Any, span: Span, columns: list[str], others: list[str]) -> Iterator[Item]:
    """The rows of the record batches in the span, as many at a time as are decoded at once."""
    row = 0
    for part, batch in _parts(reader, span):
        batch = _checked(batch.select(columns))
        step = rows_at_once(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, step):
            piece = batch.slice(start, step)
            place = {"row": row + start, "batch": part}
            yield from row_items(piece, in_part(part, start), place, (*columns, *others))
        row += batch.num_rows


def _parts(reader: Any, span: Span) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The record batches that are in the span, by their numbers."""
    if not hasattr(reader, "num_record_batches"):
        yield from enumerate(reader)
        return
    for part in range(reader.num_record_batches):
        if span.holds(in_part(part, 0)):
            yield part, reader.get_batch(part)


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, where its offsets lead nowhere outside of it: Arrow itself believes them. A text that is none is its row's."""
    try:
        batch.validate(full=True)
    except ValueError as error:
        if "UTF8" not in str(error):
            raise
    return batch


def row_items(
    rows: pa.RecordBatch, ordinal: int, place: dict[str, int], columns: tuple[str, ...]
) -> Iterator[Item]:
    """Rows as records, each known by its JSON; of one that is none, what there is of it. `ordinal` and `place`: of the first one."""
    rows, bad = _readable(rows), dict[int, str]()
    try:
        records = rows.to_pylist()
    except Exception:  # a row that is none: each is looked at
        records = [_row(rows, i, bad) for i in range(rows.num_rows)]
    for i, record in enumerate(records):
        raw = _raw(rows, i) if i in bad else line(record)
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
    """What there is of a row that is no record: the bytes of its texts, or all of it as Arrow writes it."""
    import pyarrow as pa

    row = rows.slice(index, 1)
    if not {*map(str, row.schema.types)} <= {"string", "large_string"}:
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

    wanted = [_coarse(kind) for kind in rows.schema.types]
    if wanted == rows.schema.types:
        return rows
    columns = [c.cast(kind, safe=False) for c, kind in zip(rows.columns, wanted, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _coarse(kind: pa.DataType) -> pa.DataType:
    """An Arrow type with microseconds for nanoseconds, wherever in it they stand."""
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


def begins_as(file: SourceFile) -> str:
    """The format of a file by its first bytes, or how it is packed; empty where they do not tell."""
    with file.open() as stored:
        head = stored.read(8)
    return next((name for magic, name in _MAGIC.items() if head.lstrip().startswith(magic)), "")


def no_such_file(file: SourceFile, what: str, error: Exception) -> Unreachable:
    """A file that is not what it is read as, or not whole."""
    reason = " ".join(str(error).split()).rstrip(".")
    return Unreachable(
        f"{file.location.url} is no whole {what} ({reason[:200]}), so none of its records can be read: copy it again, or name it by what it is"
    )
