"""Parquet: the wanted columns of runs of row groups, in batches of a few MB whatever the size of a
row group.

A row group is decoded page by page (`pre_buffer=False`, one thread, a buffer of 1 MiB): a row group
of 444 MB peaks at 63 MB, and read whole at 1,113 MB. The footer tells where row groups lie, and so
how a file is cut, without reading a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from mdsmix.sources.arrow import columns_read, no_such_file, row_items, rows_at_once
from mdsmix.sources.arrow_values import MAP_REASONS, Decode, decoders_of
from mdsmix.sources.format import ROWS, Block, Format, Item, Splits, cut_splits, item_blocks
from mdsmix.sources.units import SourceFile, Span

if TYPE_CHECKING:
    import pyarrow.parquet as pq

BUFFER_BYTES = 1 << 20
MOST_FOOTERS = 512


class Parquet(Format):
    """`*.parquet`. Its ordinals are rows, from 0."""

    version = 2  # JSON texts and maps are decoded
    ordinals = "row"
    size_factor = 4
    reads_fields = True
    reasons: ClassVar[Mapping[str, str]] = {
        **MAP_REASONS,
        "damaged_rows": "Rows of a parquet's row group cannot be decompressed or decoded.",
    }

    def prepare(self) -> None:
        import pyarrow.parquet  # noqa: F401

    def version_for(self, file: SourceFile, fields: tuple[str, ...]) -> int:
        """Return 1: the lines of rows with JSON texts or maps, and so their digests, changed with
        the decoding, and no others.
        """
        return 1

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        groups = _groups(_footer(file))
        return cut_splits(
            ((group.num_rows, _size(group, fields)) for group in groups), window_bytes
        )

    def records(self, file: SourceFile) -> int | None:
        return int(_footer(file).num_rows)

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        opened, row = _opened(file, _footer(file)), 0
        names = opened.schema_arrow.names
        columns = columns_read(file, names, span.unit.fields)
        wanted = list[tuple[int, int]]()
        for number, group in enumerate(_groups(opened.metadata)):
            if span.holds(row):
                wanted.append((number, row))
            row += group.num_rows
        groups = [opened.metadata.row_group(number) for number, _ in wanted]
        unseen = [name for name in sorted({*names} - {*columns}) if _may_be_filled(groups, name)]
        decoders = decoders_of(opened.schema_arrow, _json_leaves(opened.schema))
        found = (
            item
            for number, row in wanted
            for item in _rows(opened, number, row, columns, names, decoders)
        )
        yield from item_blocks(file, span, ROWS, found, unseen)


@lru_cache(MOST_FOOTERS)
def _footer(file: SourceFile) -> Any:
    """The file's footer, kept: a forked worker has the footers of all planned files from its
    parent.
    """
    return _opened(file).metadata


def _opened(file: SourceFile, footer: Any = None) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(
            file.open_random(), metadata=footer, pre_buffer=False, buffer_size=BUFFER_BYTES
        )
    except (pa.ArrowException, OSError) as error:
        raise no_such_file(file, "parquet file", error) from None


def _json_leaves(schema: Any) -> set[int]:
    """Return the numbers of the columns of parquet whose texts are JSON."""
    columns = map(schema.column, range(len(schema)))
    return {at for at, column in enumerate(columns) if column.logical_type.type == "JSON"}


def _rows(
    opened: pq.ParquetFile,
    number: int,
    row: int,
    columns: list[str],
    names: Sequence[str],
    decoders: dict[str, Decode],
) -> Iterator[Item]:
    """The rows of a row group. Where a batch cannot be decoded, each row from there on is an item
    with reason damaged_rows.
    """
    import pyarrow as pa

    group = opened.metadata.row_group(number)
    size = _size(group, columns or [""])
    count, end = rows_at_once(group.num_rows, size), row + group.num_rows
    batches = opened.iter_batches(count, [number], columns, use_threads=False)
    while row < end:
        try:
            batch = next(batches, None)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError):
            batch = None
        if batch is None or not batch.num_rows:
            for lost in range(row, end):
                yield Item(lost, {"row": lost}, 1, b"", None, "damaged_rows", tuple(names))
            return
        yield from row_items(batch, row, {"row": row}, tuple(names), decoders)
        row += batch.num_rows


def _groups(footer: Any) -> Iterator[Any]:
    return map(footer.row_group, range(footer.num_row_groups))


def _size(group: Any, fields: Sequence[str]) -> int:
    """Uncompressed bytes of these fields."""
    return sum(column.total_uncompressed_size for column in _columns(group, fields))


def _columns(group: Any, fields: Sequence[str]) -> list[Any]:
    """The columns of a row group that hold these fields; without fields, all columns."""
    columns = map(group.column, range(group.num_columns))
    return [
        column
        for column in columns
        if not fields
        or column.path_in_schema in fields
        or column.path_in_schema.partition(".")[0] in fields
    ]


def _may_be_filled(groups: Iterable[Any], name: str) -> bool:
    """Whether a row of these row groups may hold something in this column. False: by the footer all
    values are null or empty texts.
    """
    columns = (column.statistics for group in groups for column in _columns(group, [name]))
    return not all(each and (not each.num_values or each.max_raw in ("", b"")) for each in columns)
