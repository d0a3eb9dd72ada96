"""Parquet: the wanted columns of runs of row groups, in batches of a few MB whatever the size of a row group.

A row group is decoded page by page (`pre_buffer=False`, one thread, a buffer of 1 MiB): one of 444 MB peaks at 63 MB, where
reading it whole takes 1,113. The footer tells where row groups lie, and so how a file is cut, without reading a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mdsmix.sources import arrow_rows
from mdsmix.sources.format import Block, Format
from mdsmix.sources.units import SourceFile, Span

if TYPE_CHECKING:
    import pyarrow.parquet as pq

BUFFER_BYTES = 1 << 20
_footers: dict[tuple[str, str], Any] = {}
"Of files that were planned, by URL and stamp: whoever is forked to read them has them."
MOST_FOOTERS = 512


class Parquet(Format):
    """`*.parquet`. Its ordinals are rows, from 0."""

    size_factor = 4
    reads_fields = True

    def prepare(self) -> None:
        import pyarrow.parquet  # noqa: F401

    def splits(
        self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]
    ) -> Iterable[tuple[int, int | None]]:
        footer = _opened(file).metadata
        if len(_footers) < MOST_FOOTERS:
            _footers[_key(file)] = footer
        start = row = size = 0
        for number in range(footer.num_row_groups):
            more = _bytes_of(footer.row_group(number), fields)
            if size and size + more > window_bytes:
                yield start, row
                start, size = row, 0
            row, size = row + footer.row_group(number).num_rows, size + more
        yield start, row

    def records(self, file: SourceFile) -> int | None:
        return int(_opened(file).metadata.num_rows)

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        return arrow_rows.blocks(file, span, _batches(file, span))

    def fits(self, head: bytes) -> bool:
        return head.startswith(b"PAR1")

    def shown(self, ordinal: int) -> str:
        return arrow_rows.shown(ordinal)

    def most_records(self, file: SourceFile, start: int, end: int | None) -> float:
        return super().most_records(file, start, end) if end is None else end - start


def _key(file: SourceFile) -> tuple[str, str]:
    return file.location.url, file.stat.stamp


def _opened(file: SourceFile) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(
            file.open_random(),
            metadata=_footers.get(_key(file)),
            pre_buffer=False,
            buffer_size=BUFFER_BYTES,
        )
    except (pa.ArrowException, OSError) as error:
        raise arrow_rows.no_such_file(file, "parquet file", error) from None


def _batches(file: SourceFile, span: Span) -> Iterator[arrow_rows.Batch]:
    """The rows of the row groups that begin in the span."""
    opened, row = _opened(file), 0
    names = opened.schema_arrow.names
    columns = arrow_rows.columns_read(file, names, span.fields)
    for number in range(opened.metadata.num_row_groups):
        if span.start <= row and (span.end is None or row < span.end):
            yield from _row_group(opened, number, row, columns, names)
        row += opened.metadata.row_group(number).num_rows


def _row_group(
    opened: pq.ParquetFile, number: int, row: int, columns: list[str], names: Sequence[str]
) -> Iterator[arrow_rows.Batch]:
    """Its rows; where the rest of it cannot be decoded, how many these are."""
    import pyarrow as pa

    group = opened.metadata.row_group(number)
    left, unread = group.num_rows, _unread(group, set(names) - set(columns))
    count = arrow_rows.rows_at_once(left, _bytes_of(group, columns))
    found = opened.iter_batches(count, [number], columns, use_threads=False)
    while left:
        try:
            batch = next(found, None)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError):
            batch = None
        if batch is None or not batch.num_rows:
            yield arrow_rows.Batch(row=row, ordinal=row, damaged=left, unread=unread)
            return
        yield arrow_rows.Batch(
            row=row, ordinal=row, rows=batch, unread=unread, columns=tuple(names)
        )
        row, left, unread = row + batch.num_rows, left - batch.num_rows, arrow_rows.later(unread)


def _root(path: str) -> str:
    return path.partition(".")[0]


def _bytes_of(group: Any, fields: Sequence[str]) -> int:
    """Uncompressed bytes of the wanted columns of a row group."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return sum(
        column.total_uncompressed_size
        for column in columns
        if not fields or column.path_in_schema in fields or _root(column.path_in_schema) in fields
    )


def _unread(group: Any, names: Iterable[str]) -> dict[str, int | None]:
    """Of the columns that are not read: in how many rows there is something, as far as the footer tells."""
    found: dict[str, int | None] = dict.fromkeys(sorted(names), 0)
    for column in (group.column(i) for i in range(group.num_columns)):
        path = column.path_in_schema
        name = path if path in found else _root(path)
        if name in found and (filled := _filled(column)) != 0:
            found[name] = filled if path == name else None
    return found


def _filled(column: Any) -> int | None:
    """Values of a column of a row group that are not null, nor all of them empty texts."""
    known = column.statistics
    if known is None or known.null_count is None:
        return None
    is_text = column.physical_type == "BYTE_ARRAY"
    if is_text and known.has_min_max and known.max_raw in ("", b""):
        return 0
    return int(column.num_values - known.null_count)
