"""Reads work units as batches of decoded records. A batch has about 4 MB, or one longer record; the
number of rows does not matter.

A batch stores only the value of each record. The origin of a record (file and place) is computed
from the blocks of the batch when it is needed, which is only for bad records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import groupby
from operator import attrgetter
from pickle import PickleBuffer
from typing import Any, NamedTuple

from mdsmix.errors import Unreachable
from mdsmix.record import detail_of
from mdsmix.sources.content import Content, Digests, check_unchanged
from mdsmix.sources.format import BLANK, Block, Decoded, Decoder, Item
from mdsmix.sources.formats import format_of
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Unit
from mdsmix.storage import map_threads

SMALL_BYTES = 1 << 20
MOST_FETCHED = 16
"Small files that are fetched at a time; at most 16 MB are in memory."


def fetch_ahead(files: Sequence[SourceFile]) -> Iterator[SourceFile]:
    """Yield the files in order. Small files of a store are fetched several at a time, and yielded
    with their content.
    """
    for begin in range(0, len(files), MOST_FETCHED):
        group = files[begin : begin + MOST_FETCHED]
        small_files = sum(map(_is_small, group))
        if small_files > 1:
            yield from map_threads(_fetch_small, group)
        else:
            yield from group


def _is_small(file: SourceFile) -> bool:
    return file.location.is_store and file.stat.size <= SMALL_BYTES


def _fetch_small(file: SourceFile) -> SourceFile:
    """Return a small file of a store with its content; any other file unchanged."""
    if not _is_small(file):
        return file
    with file.open() as stored:
        return replace(file, content=stored.read())


class BadRecord(NamedTuple):
    """A record that is not converted, or bytes that are not a record, with the reason.

    Bad records are sorted as tuples: `number` and `item` come first, since they are the position in
    the batch.
    """

    number: int
    "The number of the block in its batch."
    item: int
    "The number of the item (a line, a row) in its block."
    origin: Item
    "The bytes and the place of the record."
    reason: str
    "A reason code."
    detail: Mapping[str, Any] | None = None
    "Values that explain the reason."


class BatchContent(NamedTuple):
    """The records of a batch, decoded or not, in a form that is quickly passed on to a process."""

    records: Sequence[Any]
    "The decoded records; empty if there are blocks."
    blocks: Sequence[tuple[Decoder, Any]] = ()
    "For each block its decoder, and its lines: a list, or one buffer with all lines."

    def decode(self) -> tuple[list[Any], list[dict[int, str]]]:
        """Return the records. Return also the faults of each block: index of a line that is not a
        record -> reason code, as in `Decoded`.
        """
        records = [*self.records]
        faults_of_blocks = list[dict[int, str]]()
        for decode, lines in self.blocks:
            whole = None
            if not isinstance(lines, list):
                whole = memoryview(lines)
                lines = BytesIO(whole).readlines()
            block_records, faults = decode(lines, whole)
            records += block_records
            faults_of_blocks.append(faults)
        return records, faults_of_blocks


class _BatchBlock(NamedTuple):
    """A block of a batch, and which of the block's items (lines, rows) are records."""

    first: int
    "The position in the batch of the block's first record."
    block: Block
    items: Sequence[int]
    "For each record of the block, its index among the block's items."
    faults: Mapping[int, str]
    "Index of an item that is not a record -> reason code, as in `Decoded`."


@dataclass(slots=True, kw_only=True)
class RecordBatch:
    """Consecutive records of one window (a slice of a work unit). They may come from several small
    files.
    """

    window: int
    "The number of the window in the work unit."
    count: int = 0
    """Number of lines or rows, including blank ones. The next split of the file continues to count
    from here.
    """
    size: int = 0
    "Uncompressed bytes."
    unseen: Counter[str] = field(default_factory=Counter)
    "Field that a format did not read -> number of records that may have a value in it."
    _records: list[Any] = field(default_factory=list)
    _length: int = 0
    "The number of records of the blocks in `_blocks`."
    _blocks: list[_BatchBlock] = field(default_factory=list)
    _undecoded: list[Block] = field(default_factory=list)
    "Further blocks, which are not decoded yet."

    @property
    def records(self) -> list[Any]:
        """The decoded values of the records. They are decoded at the first call."""
        self._decode()
        return self._records

    @property
    def length(self) -> int:
        """The number of records."""
        self._decode()
        return self._length

    def _decode(self) -> None:
        """Decode the blocks that are not decoded yet."""
        undecoded = self._undecoded
        self._undecoded = []
        for block in undecoded:
            records, faults = block.decode()
            self._records += records
            self._add_decoded(block, faults)

    def content(self) -> BatchContent:
        """Return the records in a form that is quickly passed to another process: if possible as
        lines, which the other process decodes. Lines are passed even if this process has decoded
        them: records may be nested too deep for that.
        """
        blocks = list[tuple[Decoder, Any]]()
        for block in self._all_blocks:
            if not block.decoder or block.items:
                return BatchContent(self.records)
            lines = block.raws if block.whole is None else PickleBuffer(block.whole)
            blocks.append((block.decoder, lines))
        return BatchContent(records=(), blocks=blocks)

    @property
    def first_item(self) -> Item:
        """The first item (a line, a row) of the batch; it need not be a record."""
        return self._all_blocks[0].origin(0)

    @property
    def _all_blocks(self) -> list[Block]:
        """The blocks of the batch in order, decoded or not."""
        return [batch_block.block for batch_block in self._blocks] + self._undecoded

    def note_faults(self, faults_of_blocks: Sequence[Mapping[int, str]]) -> None:
        """Note which lines are not records, after another process has decoded the `content`. The
        faults of blocks that this process has decoded too are known already.

        Args:
            faults_of_blocks: as `BatchContent.decode` returns them.
        """
        new_faults = faults_of_blocks[len(self._blocks) :]
        for block, faults in zip(self._undecoded, new_faults, strict=True):
            self._add_decoded(block, faults)
        self._undecoded = []

    def _add_decoded(self, block: Block, faults: Mapping[int, str]) -> None:
        """Add a block to the decoded ones.

        Args:
            block: the block.
            faults: index of an item that is not a record -> reason code, as in `Decoded`.
        """
        # The indexes of the items that are good records.
        items: Sequence[int] = range(block.count)
        if faults:
            items = [index for index in items if index not in faults]
        self._blocks.append(_BatchBlock(self._length, block, items, faults))
        self._length += len(items)

    @property
    def bad(self) -> Iterator[BadRecord]:
        """The lines or rows that are not records, in order.

        Each BadRecord is created only when the caller asks for the next one, because a file may
        consist of bad records alone.
        """
        self._decode()
        for number, batch_block in enumerate(self._blocks):
            for index, reason in batch_block.faults.items():
                if reason != BLANK:
                    origin = batch_block.block.origin(index)
                    detail = detail_of(reason) or None
                    yield BadRecord(number, index, origin, str(reason), detail)

    def reject(
        self, position: int, reason: str, detail: Mapping[str, Any] | None = None
    ) -> BadRecord:
        """Return `records[position]` as a bad record, with this reason code and detail. The batch
        itself does not change.
        """
        number = self._number_of_block(position)
        batch_block = self._blocks[number]
        index = batch_block.items[position - batch_block.first]
        return BadRecord(number, index, batch_block.block.origin(index), reason, detail)

    def files(self, positions: range) -> Iterator[str]:
        """Yield for each of these records the name of its file.

        Args:
            positions: indexes in `records`.
        """
        for position in positions:
            yield self._blocks[self._number_of_block(position)].block.file

    def _number_of_block(self, position: int) -> int:
        """Return the number of the block that contains `records[position]`.

        Example: the first records of three blocks have the positions 0, 5 and 9; position 7 is in
        block 1.
        """
        self._decode()
        return bisect_right(self._blocks, position, key=lambda block: block.first) - 1

    def origin(self, position: int) -> Item:
        """Return the item that `records[position]` was decoded from."""
        return self.reject(position, "").origin

    def _has_room(self, block: Block) -> bool:
        """Return whether the block is in this batch's window (a slice of the work unit), and fits
        into the batch: a batch has at most about 4 MB.
        """
        return block.window == self.window and self.size + block.size <= BLOCK_BYTES

    def _add(self, block: Block, limit: int | None) -> int:
        """Add the block to the batch. Return how many records were added, good and bad ones
        together; 0 without a limit, since the block is not decoded yet then.

        Args:
            limit: the most records to add, good and bad ones together; None: all of the block.
        """
        added = 0
        decoded: Decoded | None = None
        if limit is not None:
            # The indexes of the items (lines, rows) that are not blank.
            decoded = block.decode()
            _, faults = decoded
            filled = [index for index in range(block.count) if faults.get(index) != BLANK]
            added = min(limit, len(filled))
            if added < len(filled):
                # Add only the items up to the last one within the limit.
                block = block.first(filled[limit - 1] + 1)
                decoded = None
        if decoded:
            records, faults = decoded
            self._records += records
            self._add_decoded(block, faults)
        else:
            self._undecoded.append(block)
        self.count += block.count
        self.size += block.size
        # Add the number of the block's records to the count of each field that it did not read.
        self.unseen.update(dict.fromkeys(block.unseen, block.count))
        return added


def read_batches(
    unit: Unit,
    limit: int | None = None,
    memory: int = 4 << 30,
    digests: Digests | None = None,
    done: Container[int] = (),
) -> Iterator[RecordBatch]:
    """Yield the records of a work unit in batches, in order. All records of a batch are in the same
    window (a slice of the unit).

    Args:
        limit: the number of records, good or bad, to stop after; None: no limit.
        memory: bytes of memory that this process may use.
        digests: collects the hashes of all blocks that are read; None: nothing is hashed.
        done: numbers of windows that need no batches. They are read for the digests, but not
            decoded.

    Raises Unreachable if a file is damaged, missing or changed.
    """
    batch: RecordBatch | None = None
    remaining = limit
    for block in _read_blocks(unit, memory, digests):
        if block.window in done:
            continue
        if batch is not None and not batch._has_room(block):
            yield batch
            batch = None
        if batch is None:
            batch = RecordBatch(window=block.window)
        added = batch._add(block, remaining)
        del block  # otherwise it would be in memory together with the next one
        if remaining is not None:
            remaining -= added
        if remaining == 0:
            break
        if batch.size > BLOCK_BYTES // 2:  # the next block is probably as large and would not fit
            yield batch
            batch = None
    if batch is not None:
        yield batch


def compute_content(unit: Unit) -> Content:
    """Return the digests of all bytes of a work unit. The unit is read, but not decoded."""
    digests = Digests(unit)
    for _ in _read_blocks(unit, 4 << 30, digests):
        pass
    return digests.content()


def _read_blocks(unit: Unit, memory: int, digests: Digests | None) -> Iterator[Block]:
    """Yield the blocks (about 4 MB of one file each) of all files of the unit, in order.

    Args:
        memory: bytes of memory that this process may use.
        digests: collects the hashes of all blocks; None: nothing is hashed.
    """
    bytes_before = 0  # uncompressed bytes of the earlier files, from which windows are counted
    for position, file in enumerate(fetch_ahead(unit.files)):
        format = format_of(file)
        span = unit.span(bytes_before, memory)
        bytes_read = 0
        for block in _read_unchanged_blocks(file, format.blocks(file, span)):
            bytes_read += block.size
            if digests:
                digests.add(position, block)
            yield block
            del block  # otherwise it would be in memory together with the next one
        # A file that is stored as it is read counts with its size, otherwise with the bytes read.
        is_stored_as_read = format.size_factor == 1
        bytes_before += file.stat.size if is_stored_as_read else bytes_read


def _read_unchanged_blocks(file: SourceFile, blocks: Iterator[Block]) -> Iterator[Block]:
    """Yield the blocks of a file, and check that the file does not change meanwhile.

    A file on a disk is checked before each window (a slice of a work unit), because a window's
    shards are stored as soon as the next window begins. A file in a store needs no check: a store
    returns only bytes of the requested version.

    Raises Unreachable if the file has changed since the units were planned.
    """
    if file.location.is_store:
        yield from blocks
        return
    try:
        # `groupby` reads the blocks of one window after the other.
        for _, blocks_of_window in groupby(blocks, key=attrgetter("window")):
            check_unchanged(file)
            yield from blocks_of_window
    except Unreachable:
        check_unchanged(file)  # a file that looks damaged may have been changed meanwhile
        raise
    check_unchanged(file)
