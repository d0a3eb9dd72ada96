"""Arrow's own files: IPC files (Feather too), which have a directory of their record batches, and streams, which have none.

`datasets` keeps its data as streams (`save_to_disk`, its cache). On a disk they are mapped and never held whole: of a batch
only the rows that are being decoded are touched. Where in the file a row is counted from 0 is known when what stands before it
has been read, so a row is told by its batch and counted at publication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mdsmix.sources import arrow_rows
from mdsmix.sources.format import Block, Format
from mdsmix.sources.units import SourceFile, Span

if TYPE_CHECKING:
    import pyarrow as pa

_FILE_MAGIC = b"ARROW1"
_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"The last bytes of a whole stream, and of one that was written before Arrow 0.15."


class Arrow(Format):
    """`*.arrow` and `*.feather`. Its ordinals are record batches and rows in them."""

    reads_fields = True
    counted = "row"

    def prepare(self) -> None:
        import pyarrow.ipc  # noqa: F401

    def splits(
        self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]
    ) -> Iterable[tuple[int, int | None]]:
        with _opened(file, fields) as (reader, *_):
            count = getattr(reader, "num_record_batches", 1)
        most = max(1, count * window_bytes // file.stat.size)
        starts = [0, *(arrow_rows.in_part(n, 0) for n in range(most, count, most))]
        return zip(starts, [*starts[1:], None], strict=True)

    def records(self, file: SourceFile) -> int | None:
        """Of a file in a bucket it would take all of its batches."""
        if file.location.is_store:
            return None
        with _opened(file, ()) as (reader, *_):
            whole = Span(start=0, end=None, before=0, window_bytes=1)
            return sum(int(batch.num_rows) for _, batch in _parts(reader, whole))

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        return arrow_rows.blocks(file, span, _batches(file, span))

    def fits(self, head: bytes) -> bool:
        return head.startswith(b"ARROW1")

    def shown(self, ordinal: int) -> str:
        return arrow_rows.shown(ordinal)


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
                _check_end(file, stored)
            source = stored if file.location.is_store else pa.memory_map(file.location.url)
            make = pa.ipc.open_file if is_file else pa.ipc.open_stream
            source.seek(0)
            names = make(source).schema.names
            wanted = arrow_rows.columns_read(file, names, fields)
            # None named would mean all of them; what is read too much is left out later.
            numbers = [names.index(name) for name in wanted]
            source.seek(0)
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=numbers)
            yield make(source, options=options), wanted, sorted(set(names) - set(wanted))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, EOFError) as error:
        raise arrow_rows.no_such_file(file, "arrow file", error) from None


def _check_end(file: SourceFile, stored: Any) -> None:
    stored.seek(max(0, file.stat.size - len(_ENDS[0])))
    if not stored.read().endswith(_ENDS):
        raise EOFError("its end mark is missing, so its writing was not finished")


def _batches(file: SourceFile, span: Span) -> Iterator[arrow_rows.Batch]:
    """The rows of the record batches in the span, as many at a time as are decoded at once."""
    with _opened(file, span.fields) as (reader, columns, others):
        row, unread = 0, dict[str, int | None].fromkeys(others)
        for part, batch in _parts(reader, span):
            batch = _checked(batch.select(columns))
            step = arrow_rows.rows_at_once(batch.num_rows, batch.nbytes)
            for start in range(0, batch.num_rows, step):
                piece, ordinal = batch.slice(start, step), arrow_rows.in_part(part, start)
                yield arrow_rows.Batch(
                    row=row, ordinal=ordinal, rows=piece, unread=unread, columns=(*columns, *others)
                )
                row += piece.num_rows


def _parts(reader: Any, span: Span) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The record batches that are in the span, by their numbers."""
    if not hasattr(reader, "num_record_batches"):
        yield from enumerate(reader)
        return
    for part in range(reader.num_record_batches):
        at = arrow_rows.in_part(part, 0)
        if span.start <= at and (span.end is None or at < span.end):
            yield part, reader.get_batch(part)


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, where its offsets lead nowhere outside of it: Arrow itself believes them. A text that is none is its row's."""
    try:
        batch.validate(full=True)
    except ValueError as error:
        if "UTF8" not in str(error):
            raise
    return batch
