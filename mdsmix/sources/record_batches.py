"""Units read as batches of decoded records, cut by bytes: 4 MB or one record, never by rows.

A batch keeps only the record itself of each record. The origin of a record is worked out from the
blocks of its batch when it is asked for, which is for bad records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from mdsmix.errors import Unreachable
from mdsmix.record import detail_of
from mdsmix.sources.content import Content, Digests, check_unchanged
from mdsmix.sources.format import BLANK, Block, Item
from mdsmix.sources.formats import format_of
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Unit
from mdsmix.storage import map_threads

SMALL_BYTES = 1 << 20
MOST = 16
"Small files that are fetched at a time, so that at most 16 MB are held."


def fetched_ahead(files: Sequence[SourceFile]) -> Iterator[SourceFile]:
    """The files in their order; small objects of a store come with their bytes."""
    for begin in range(0, len(files), MOST):
        some = files[begin : begin + MOST]
        yield from map_threads(_fetched, some) if sum(map(_is_small, some)) > 1 else some


def _is_small(file: SourceFile) -> bool:
    return file.location.is_store and file.stat.size <= SMALL_BYTES


def _fetched(file: SourceFile) -> SourceFile:
    if not _is_small(file):
        return file
    with file.open() as stored:
        return replace(file, held=stored.read())


class BadRecord(NamedTuple):
    """An item of a file that gives no record, with the reason. Bad records sort in the order of
    their batch.
    """

    number: int
    "The number of the block in its batch."
    item: int
    "The number of the item in its block."
    origin: Item
    reason: str
    "A reason code of the README beside this file, or of encode's."
    detail: Mapping[str, Any] | None = None
    "Values that explain the reason."


class _BatchBlock(NamedTuple):
    """A block of a batch."""

    first: int
    "The position of its first record in the batch."
    block: Block
    items: Sequence[int]
    "For each record, its index among the block's items."
    faults: Mapping[int, str]
    "Index of an item -> reason, as in `Decoded`."


@dataclass(slots=True, kw_only=True)
class RecordBatch:
    """Consecutive records of one window of a unit, possibly of several small files."""

    window: int
    records: list[Any] = field(default_factory=list)
    count: int = 0
    "Number of lines or rows, blank ones too: the count of the file's next split goes on from here."
    size: int = 0
    "Uncompressed bytes."
    unseen: Counter[str] = field(default_factory=Counter)
    "Field that a format passed over -> number of records in which it may hold something."
    _blocks: list[_BatchBlock] = field(default_factory=list)

    @property
    def bad(self) -> Iterator[BadRecord]:
        """The items that hold no record, in order. Each is made when it is asked for, since a file
        may hold nothing else.
        """
        for number, held in enumerate(self._blocks):
            for index, reason in held.faults.items():
                if reason != BLANK:
                    origin, detail = held.block.origin(index), detail_of(reason) or None
                    yield BadRecord(number, index, origin, str(reason), detail)

    def reject(
        self, position: int, reason: str, detail: Mapping[str, Any] | None = None
    ) -> BadRecord:
        """`records[position]` as a bad record."""
        number = self._number(position)
        held = self._blocks[number]
        index = held.items[position - held.first]
        return BadRecord(number, index, held.block.origin(index), reason, detail)

    def files(self, positions: range) -> Iterator[str]:
        """The names of the files that these records stand in."""
        return (self._blocks[self._number(position)].block.file for position in positions)

    def _number(self, position: int) -> int:
        """The number of the block that holds the record at this position."""
        return bisect_right(self._blocks, position, key=lambda held: held.first) - 1

    def origin(self, position: int) -> Item:
        """Where `records[position]` comes from."""
        return self.reject(position, "").origin

    def _has_room(self, block: Block) -> bool:
        return block.window == self.window and self.size + block.size <= BLOCK_BYTES

    def _add(self, block: Block, most: int | None) -> int:
        """Adds the block's records, good or bad, or only the first `most`; returns how many were
        added.
        """
        records, faults = block.decode()
        filled: Sequence[int] = range(block.count)
        if faults:
            filled = [n for n in filled if faults.get(n) != BLANK]
        if most is not None and most < len(filled):
            return self._add(block.first(filled[most - 1] + 1), None)
        items = [n for n in filled if n not in faults] if faults else filled
        self._blocks.append(_BatchBlock(len(self.records), block, items, faults))
        self.records += records
        self.count += block.count
        self.size += block.size
        self.unseen.update(dict.fromkeys(block.unseen, block.count))
        return len(filled)


def read_batches(
    unit: Unit,
    limit: int | None = None,
    memory: int = 4 << 30,
    digests: Digests | None = None,
    done: Container[int] = (),
) -> Iterator[RecordBatch]:
    """The unit's batches in order, none of which crosses a window. `limit`: the number of records,
    good or bad, to stop after; `memory`: bytes that may be held; `digests`: gets all blocks that
    are read; `done`: numbers of windows that are read but give no batch. A damaged, missing or
    changed file is `Unreachable`.
    """
    batch: RecordBatch | None = None
    left = limit
    for block in _blocks(unit, memory, digests):
        if block.window in done:
            continue
        if batch is not None and not batch._has_room(block):
            yield batch
            batch = None
        batch = batch or RecordBatch(window=block.window)
        added = batch._add(block, left)
        del block
        left = None if left is None else left - added
        if left == 0:
            break
        if batch.size > BLOCK_BYTES // 2:  # the next block is as large and would not fit
            yield batch
            batch = None
    if batch is not None:
        yield batch


def content_of(unit: Unit) -> Content:
    """The unit's content, by reading it. No record is decoded."""
    digests = Digests(unit)
    for _ in _blocks(unit, 4 << 30, digests):
        pass
    return digests.content()


def _blocks(unit: Unit, memory: int, digests: Digests | None) -> Iterator[Block]:
    before = 0
    for position, file in enumerate(fetched_ahead(unit.files)):
        kind = format_of(file)
        span = unit.span(before, memory)
        size = 0
        for block in _unchanged(file, kind.blocks(file, span)):
            size += block.size
            if digests:
                digests.add(position, block)
            yield block
            del block  # or it stays beside the next one
        before += file.stat.size if kind.size_factor == 1 else size


def _unchanged(file: SourceFile, blocks: Iterator[Block]) -> Iterator[Block]:
    """The blocks; Unreachable where the file is no longer the one that was planned. A file on a
    disk is looked at before each window, since a window is kept as soon as the next one begins. A
    store gives only bytes of the version that was asked for.
    """
    if file.location.is_store:
        yield from blocks
        return
    try:
        for _, of_window in groupby(blocks, key=attrgetter("window")):
            check_unchanged(file)
            yield from of_window
    except Unreachable:
        check_unchanged(file)  # what looks damaged may be half written
        raise
    check_unchanged(file)
