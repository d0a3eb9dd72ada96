"""Parquet files. A split consists of consecutive row groups. Only the needed columns are read, in
batches of a few MB, whatever the size of a row group.

A row group is decoded page by page (`pre_buffer=False`, one thread, a buffer of 1 MiB): for a row
group of 444 MB this takes at most 63 MB of memory, but 1,113 MB if the group is read at once. The
footer contains the position of each row group, so a file is divided into splits without reading a
record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NamedTuple

from mdsmix.errors import Unreachable
from mdsmix.sources.arrow import (
    MOST_ROWS,
    DecodedRows,
    choose_row_count,
    decode_rows,
    find_next_file,
    make_encrypted_error,
    make_unreadable_error,
    select_columns,
)
from mdsmix.sources.arrow_values import MAP_REASONS, Decode, make_decoders
from mdsmix.sources.format import (
    ROWS,
    Block,
    Format,
    Splits,
    Stretch,
    cut_splits,
)
from mdsmix.sources.row_blocks import make_row_blocks
from mdsmix.sources.units import SourceFile, Span

if TYPE_CHECKING:
    import pyarrow.parquet as pq

BUFFER_BYTES = 1 << 20
MOST_FOOTERS = 512
SIGNATURE_BYTES = 28
_MARK = b"PAR1"
"The first and the last bytes of a parquet file."


class Parquet(Format):
    """The format of `*.parquet`. The ordinal of a row (a number that increases through the file) is
    its number in the file, from 0.
    """

    version = 2  # JSON texts and maps are decoded
    ordinals = "row"
    size_factor = 4
    reads_fields = True
    is_never_empty = True
    reasons: ClassVar[Mapping[str, str]] = {
        **MAP_REASONS,
        "damaged_rows": "Rows of a parquet's row group cannot be decompressed or decoded.",
    }

    def prepare(self) -> None:
        import pyarrow.parquet  # noqa: F401

    def version_for(self, file: SourceFile, fields: tuple[str, ...]) -> int:
        """Return 1 as the version of this format that is hashed into the file's digests, although
        `version` is 2. If a digest changes, its records are converted again.

        Version 2 decodes JSON strings and maps, and hashes their decoded values. So a file with
        such values has new digests anyway. Any other file has the same records as under version 1:
        with a 2 in its digests it would be converted again for nothing.
        """
        return 1

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        groups = _list_row_groups(_read_footer(file))
        stretches = (Stretch(group.num_rows, _count_bytes(group, fields)) for group in groups)
        return cut_splits(stretches, window_bytes)

    def records(self, file: SourceFile) -> int | None:
        return int(_read_footer(file).num_rows)

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        """Yield the rows of the row groups that begin in the span (a range of the file) as blocks.
        Only the fields that the work unit needs are read.
        """
        reader = _open(file, _read_footer(file))
        names = reader.schema_arrow.names
        columns = select_columns(file, names, span.unit.fields)
        table = _Table(
            reader=reader,
            columns=columns,
            names=tuple(names),
            decoders=make_decoders(reader.schema_arrow, _find_json_leaves(reader.schema)),
        )
        groups = _list_groups_in(span, reader.metadata)

        # Find the fields that are not read, although a row may have a value in them.
        metadata = [reader.metadata.row_group(group.number) for group in groups]
        unread = sorted(set(names) - set(columns))
        unseen = [name for name in unread if _may_have_values(metadata, name)]
        yield from make_row_blocks(file, span, ROWS, _read_rows(table, groups), unseen)


class _Table(NamedTuple):
    """An open parquet file."""

    reader: pq.ParquetFile
    columns: list[str]
    "The columns that are read."
    names: tuple[str, ...]
    "All columns."
    decoders: dict[str, Decode]
    "Column -> function that decodes its values, for the columns that need one."


@lru_cache(MOST_FOOTERS)
def _read_footer(file: SourceFile) -> Any:
    """Return the file's footer (pyarrow's FileMetaData).

    Footers are cached, so a forked worker inherits the footers of all planned files from its
    parent.
    """
    return _open(file).metadata


def _open(file: SourceFile, footer: Any = None) -> pq.ParquetFile:
    """Open a parquet file.

    Args:
        footer: the file's footer if it was read already.

    Raises Unreachable if pyarrow cannot open the file, columns are encrypted, or it is joined of
    several files.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    stored = file.open_random()
    try:
        reader = pq.ParquetFile(stored, metadata=footer, pre_buffer=False, buffer_size=BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise make_unreadable_error(file, "parquet file", error) from None
    if not footer and _is_signed(file, stored, reader.metadata):
        raise make_encrypted_error(file)
    if not footer and _is_joined(file, stored, reader.metadata):
        raise Unreachable(
            f"{file.location.url} is several parquet files one after the other, as cat and hadoop "
            "fs -getmerge join them, and only the last one's footer is read, so records would be "
            "lost: use the files themselves"
        )
    return reader


def _is_signed(file: SourceFile, stored: BinaryIO, footer: Any) -> bool:
    """Return whether a footer has a signature, as that of a file with encrypted columns has unless
    the footer is encrypted too. pyarrow 26 ends the process if it is asked for such a column.

    Args:
        stored: an open reader of the file.
        footer: the footer as pyarrow has read it, which does not show the signature.
    """
    # The file ends with the footer, its signature, the length of both, and the format's mark.
    stored.seek(file.stat.size - 8)
    length = int.from_bytes(stored.read(4), "little")
    return bool(length == footer.serialized_size + SIGNATURE_BYTES)


def _is_joined(file: SourceFile, stored: BinaryIO, footer: Any) -> bool:
    """Return whether whole parquet files are joined in this file. The positions in the last one's
    footer then count from its own beginning, so they lead into the first file.

    Args:
        stored: an open reader of the file.
        footer: the footer of the last file.
    """
    chunks = list[Any]()
    if footer.num_row_groups:
        chunks = _list_columns(footer.row_group(footer.num_row_groups - 1), ())
    # Between the pages and the footer are indexes and filters, mostly nothing, and as many bytes
    # as the earlier files have. So the last file begins within so many bytes, after a file's end.
    footer_start = file.stat.size - len(_MARK) - 4 - footer.serialized_size
    gap = footer_start - max(map(_find_chunk_end, chunks), default=len(_MARK))
    return find_next_file(stored, _MARK, gap)


def _find_chunk_end(chunk: Any) -> int:
    """Return the byte at which the pages of a column in a row group end."""
    start = chunk.data_page_offset
    if chunk.dictionary_page_offset:  # None or 0 if there is none
        start = min(start, chunk.dictionary_page_offset)
    return int(start + chunk.total_compressed_size)


def _find_json_leaves(schema: Any) -> set[int]:
    """Return the numbers of the parquet columns whose strings are JSON.

    Args:
        schema: the parquet schema (not the Arrow schema) of the file.
    """
    columns = map(schema.column, range(len(schema)))
    return {number for number, column in enumerate(columns) if column.logical_type.type == "JSON"}


class _RowGroup(NamedTuple):
    """Which row group of a file, and where its rows begin."""

    number: int
    "The number of the row group, from 0."
    first_row: int
    "The number of the group's first row in the file."


def _list_groups_in(span: Span, footer: Any) -> list[_RowGroup]:
    """Return the row groups that start in the span (a range of the file)."""
    groups = list[_RowGroup]()
    first_row = 0
    for number, group in enumerate(_list_row_groups(footer)):
        if span.holds(first_row):
            groups.append(_RowGroup(number, first_row))
        first_row += group.num_rows
    return groups


def _read_rows(table: _Table, groups: Iterable[_RowGroup]) -> Iterator[DecodedRows]:
    for group in groups:
        yield from _read_rows_of_group(table, group)


def _read_rows_of_group(table: _Table, row_group: _RowGroup) -> Iterator[DecodedRows]:
    """Yield the rows of a row group.

    If a batch of rows cannot be decoded, this batch and all later rows of the group have the reason
    damaged_rows.
    """
    import pyarrow as pa

    number = row_group.number
    group = table.reader.metadata.row_group(number)
    size = _count_bytes(group, table.columns or [""])  # [""]: no column, since [] would mean all
    count = choose_row_count(group.num_rows, size)
    row = row_group.first_row
    end = row + group.num_rows
    batches = table.reader.iter_batches(count, [number], table.columns, use_threads=False)
    while row < end:
        try:
            batch = next(batches, None)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError):
            batch = None
        if batch is None or not batch.num_rows:
            # Nothing after a damaged batch can be read from this row group.
            for first in range(row, end, MOST_ROWS):
                count = min(MOST_ROWS, end - first)
                yield DecodedRows(
                    ordinal=first,
                    first_place={"row": first},
                    records=[None] * count,
                    raws=[b""] * count,
                    reasons=dict.fromkeys(range(count), "damaged_rows"),
                    columns=table.names,
                )
            return
        yield decode_rows(batch, row, {"row": row}, table.names, table.decoders)
        row += batch.num_rows


def _list_row_groups(footer: Any) -> Iterator[Any]:
    return map(footer.row_group, range(footer.num_row_groups))


def _count_bytes(group: Any, fields: Sequence[str]) -> int:
    """Return the uncompressed bytes that some fields have in a row group.

    Args:
        fields: the names of the fields; empty: all fields.
    """
    return sum(column.total_uncompressed_size for column in _list_columns(group, fields))


def _list_columns(group: Any, fields: Sequence[str]) -> list[Any]:
    """Return the columns of a row group that belong to these fields; all columns if `fields` is
    empty.

    A nested field has several columns, which parquet names `field.element`.
    """
    columns = [group.column(number) for number in range(group.num_columns)]
    if not fields:
        return columns
    chosen = list[Any]()
    for column in columns:
        path = column.path_in_schema
        outer_field = path.partition(".")[0]
        if path in fields or outer_field in fields:
            chosen.append(column)
    return chosen


def _may_have_values(groups: Iterable[Any], name: str) -> bool:
    """Return whether a row of these row groups may have a value in the field with this name.

    False if the footer shows that all values of the field are null or empty strings.
    """
    for group in groups:
        for column in _list_columns(group, [name]):
            statistics = column.statistics
            if not statistics:  # the footer does not show which values the column has
                return True
            # If the greatest string is empty, all strings are. `num_values` counts no nulls.
            if statistics.num_values and statistics.max_raw not in ("", b""):
                return True
    return False
