"""The beginnings of a few splits of a source, and which part of it they are: enough to tell about how much all of it holds.

The names of the splits decide which of them are read, so that one file more changes at most one of them. Of a packed file nobody knows
how many bytes are in it: how many stored ones a block takes is counted while it is read. A file with a directory says how many
records it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from typing import Any, BinaryIO, cast

import xxhash

from mdsmix.sources.format import BLANK, Block
from mdsmix.sources.formats import format_of
from mdsmix.sources.unit_plan import plan, size_of
from mdsmix.sources.units import WINDOW_BYTES, SourceFile, Unit
from mdsmix.storage import Location, together

MOST = 32
"Splits that are read from."
BYTES = 128 << 10
"Of each so many uncompressed bytes are decoded, or one record."
LEAST_WINDOW = 1 << 20
AT_ONCE = 4
"Splits that are read together, 8 MB each: the first block is read whole."


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The first records of a split."""

    records: Sequence[Any]
    "Those that are none are not among them, and their bytes are counted."
    bad: Counter[str]
    "Reason -> items that are no record."
    weight: float
    "What they are of what `size_of` says of the files."
    folder: Location
    "Of their file."


def chosen(
    files: Iterable[SourceFile], least_window: int = LEAST_WINDOW, **read: Any
) -> list[Unit]:
    """The splits to read from, of few files one or more each. `read`: the fields, as `plan` takes them."""
    filled = [file for file in files if file.stat.size]
    some = sorted(filled, key=lambda file: _draw(file, 0))[:MOST]
    window = _window(size_of(some), least_window)
    units = [unit for file in some for unit in plan([file], window, **read)]
    return sorted(units, key=lambda unit: _draw(unit.files[0], unit.start))[:MOST]


def read_beginnings(units: Sequence[Unit], size: int | None = None) -> Iterator[Beginning]:
    """What stands at the beginning of each, up to `size` uncompressed bytes; a split without an item gives none."""
    for begin in range(0, len(units), AT_ONCE):
        some = units[begin : begin + AT_ONCE]
        yield from filter(None, together(lambda unit: _beginning(unit, size or BYTES), some))


def _window(size: int, least: int) -> int:
    """How long splits are, so that there are enough of them: a power of two, which a source that grows a little does not change."""
    return min(WINDOW_BYTES, max(least, 1 << max(1, size // MOST).bit_length() - 1))


def _draw(file: SourceFile, start: int) -> tuple[int, int, int]:
    """By the last part of the name first, so that a folder may be moved or renamed."""
    last = xxhash.xxh3_64_intdigest(f"{start} {file.name.rpartition('/')[2]}")
    return last, xxhash.xxh3_64_intdigest(file.name), start


def _beginning(unit: Unit, most: int) -> Beginning | None:
    found = unit.files[0]
    file = _Watched(**{each.name: getattr(found, each.name) for each in fields(found)})
    kind = format_of(file)
    span = replace(unit, window_bytes=1 << 62).span()
    begin, size = list[Block](), 0
    with closing(cast("Any", kind.blocks(file, span))) as blocks:
        while size < most and (block := next(blocks, None)):
            begin.append(block)
            size += block.size
        part = size / kind.weight(found)
        if held := kind.records(found):
            part = sum(block.count for block in begin) / held
        elif file.opened:
            part = (_position(file.opened[-1], unit) - unit.start) / found.stat.size
    if not size:
        return None
    *whole, last = begin
    first = [*whole, last.first(max(1, min(last.count, most * last.count // last.size)))]
    decoded = [block.decode() for block in first]
    return Beginning(
        records=[record for records, _ in decoded for record in records],
        bad=Counter(why for _, faults in decoded for why in faults.values() if why != BLANK),
        weight=kind.weight(found) * min(1.0, part) * sum(block.size for block in first) / size,
        folder=found.location.parent,
    )


def _position(reader: BinaryIO, unit: Unit) -> int:
    """Up to which byte the stored file was read; one that was read to the end is closed."""
    return (unit.end or unit.files[0].stat.size) if reader.closed else reader.tell()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched(SourceFile):
    """A file that keeps its readers, so that they tell how many stored bytes were read."""

    opened: list[BinaryIO] = field(default_factory=list, compare=False)

    def open(self, start: int = 0, until: int | None = None) -> BinaryIO:
        self.opened.append(SourceFile.open(self, start, until))
        return self.opened[-1]
