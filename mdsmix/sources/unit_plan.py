"""Files cut and grouped into work units, from their names and sizes alone, or also from their
beginnings where records name images.

The number of workers plays no part, so the same files make the same units everywhere. Where many
small files are grouped, names decide where a group ends: a run that is too large is split at the
file whose name hashes highest, and both halves again. A new file then changes only the group that
it falls into, and all other boundaries stay. Groups are about half as full as fixed cutting would
make them, which costs nothing but a few more units. The last part of the path counts first, so that
a folder may be moved or renamed and its files stay in their groups.

An estimate of a whole source comes from the beginnings of a few splits, and from the part of the
source that they are. Names of splits decide which are read, so that a new file changes at most one
of them. The uncompressed size of a packed file is unknown: the stored bytes of each block are
counted while it is read. A file with a directory tells its number of records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import compress
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.sources.format import BLANK, Block
from mdsmix.sources.formats import format_of
from mdsmix.sources.units import WINDOW_BYTES, SourceFile, Unit, sort_key
from mdsmix.storage import Location, map_threads


def plan_units(
    files: list[SourceFile],
    window_bytes: int = WINDOW_BYTES,
    fields: Iterable[str] = (),
    parsed: Iterable[str] = (),
    line_window: Callable[[SourceFile], int] | None = None,
    blobs: Iterable[str] = (),
) -> list[Unit]:
    """The units of these files, ordered by path, then offset. Empty files are in no unit. `fields`:
    the fields that are read, where they are known; `parsed`: fields that hold lists or objects;
    `blobs`: fields that hold bytes. `line_window`: the bytes of a window in a file of lines whose
    records name something much larger, such as images.
    """
    filled = sorted((file for file in files if file.stat.size), key=sort_key)
    lines = [file for file in filled if not format_of(file).reads_fields]
    windows = dict(zip(lines, map_threads(line_window, lines), strict=True)) if line_window else {}
    whole = Unit(files=(), fields=tuple(fields), parsed=tuple(parsed), blobs=tuple(blobs))
    units = list[Unit]()
    for window in sorted({window_bytes, *windows.values()}):
        some = [file for file in filled if windows.get(file, window_bytes) == window]
        units += _planned(some, replace(whole, window_bytes=window))
    return sorted(units, key=lambda unit: unit.sort_key)


def _planned(files: list[SourceFile], like: Unit) -> Iterator[Unit]:
    """The units of files with one size of window; `like`: a unit with all that these units
    share.
    """
    new, window = partial(_unit, like), like.window_bytes
    weights = _weights(files)
    is_small = weights < window
    yield from map(new, _runs(list(compress(files, is_small)), weights[is_small], window))
    large = list(compress(files, ~is_small))
    cut = map_threads(lambda file: list(format_of(file).splits(file, window, like.fields)), large)
    for file, splits in zip(large, cut, strict=True):
        for start, end in splits:
            yield new([file], start=start, end=end)


def estimate_size(files: Iterable[SourceFile]) -> int:
    """About how many uncompressed bytes these files hold."""
    return int(_weights(list(files)).sum())


def describe_unit(unit: Unit) -> str:
    """The unit for a person: `a.jsonl from byte 100663296 on`."""
    more = f" and {len(unit.files) - 1} files more" if unit.files[1:] else ""
    start = f" from {format_of(unit.files[0]).ordinals} {unit.start} on" if unit.start else ""
    return unit.name + more + start


def prepare_formats(units: Iterable[Unit]) -> None:
    """Imports the libraries that read these units, before workers are forked that would each import
    them.
    """
    for kind in {id(kind): kind for unit in units for kind in map(format_of, unit.files)}.values():
        kind.prepare()


def counted_key(unit: Unit) -> str:
    """The key of a place that counts from the unit's start; "" where the format tells places
    without counting.
    """
    return format_of(unit.files[0]).counted


def _unit(like: Unit, files: list[SourceFile], **split: Any) -> Unit:
    kinds = list(map(format_of, files))
    are_texts = any(kind.cells_are_texts for kind in kinds)
    return replace(
        like,
        files=tuple(files),
        fields=like.fields if any(kind.reads_fields for kind in kinds) else (),
        parsed=like.parsed if are_texts else (),
        blobs=like.blobs if are_texts else (),
        **split,
    )


def _weights(files: list[SourceFile]) -> NDArray[np.int64]:
    """The uncompressed bytes that each file is planned as."""
    return np.fromiter((format_of(file).weight(file) for file in files), np.int64, len(files))


def _runs(
    files: list[SourceFile], weights: NDArray[np.int64], window_bytes: int
) -> Iterator[list[SourceFile]]:
    """Consecutive files of at most a window in all, in order."""
    before = np.concatenate([[0], np.cumsum(weights)])
    last_names = (xxhash.xxh3_64_intdigest(file.name.rpartition("/")[2]) for file in files)
    priorities = np.fromiter(last_names, np.uint64, len(files))
    waiting = [(0, len(files))] if files else []
    while waiting:
        begin, end = waiting.pop()
        if before[end] - before[begin] <= window_bytes:
            yield files[begin:end]
            continue
        # Not at the first file, which would leave nothing before it.
        among = priorities[begin + 1 : end]
        highest = begin + 1 + np.flatnonzero(among == among.max())
        cut = int(max(highest, key=lambda number: _priority(files[number].name)))
        waiting += [(cut, end), (begin, cut)]


def _priority(name: str) -> tuple[int, ...]:
    """Hashes of a path, the last part first. A common beginning of all paths decides nothing: depth
    and lower folders count before it.
    """
    *folders, last = [xxhash.xxh3_64_intdigest(part) for part in name.split("/")]
    return last, len(folders), *reversed(folders)


MOST = 32
"The most splits that are read from."
BYTES = 128 << 10
"Uncompressed bytes that are decoded of each split; at least one record is."
LEAST_WINDOW = 1 << 20
AT_ONCE = 4
"Splits that are read together, 4 MB each: the first block is read whole."


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The first records of a split."""

    records: Sequence[Any]
    "Only good records; `weight` counts the bytes of bad ones too."
    bad: Counter[str]
    "Reason -> items that are no record."
    weight: float
    "Bytes of the beginning, in the measure of `estimate_size`."
    folder: Location
    "The folder of the split's file."


def choose_splits(
    files: Iterable[SourceFile], least_window: int = LEAST_WINDOW, **read: Any
) -> list[Unit]:
    """The splits to read from, at most 32; of a few files, several splits each. `read`: the fields,
    as `plan_units` takes them.
    """
    filled = [file for file in files if file.stat.size]
    some = sorted(filled, key=lambda file: _draw(file, 0))[:MOST]
    window = _window(estimate_size(some), least_window)
    units = [unit for file in some for unit in plan_units([file], window, **read)]
    return sorted(units, key=lambda unit: _draw(unit.files[0], unit.start))[:MOST]


def read_beginnings(units: Sequence[Unit], size: int | None) -> Iterator[Beginning]:
    """The beginning of each split, up to `size` uncompressed bytes; a split without an item gives
    no Beginning.
    """
    for begin in range(0, len(units), AT_ONCE):
        some = units[begin : begin + AT_ONCE]
        yield from filter(None, map_threads(lambda unit: _beginning(unit, size or BYTES), some))


def _window(size: int, least: int) -> int:
    """Bytes of a split, so that there are enough splits: a power of two, which stays the same when
    a source grows a little.
    """
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
    """The byte up to which the stored file was read; a reader at the end is closed."""
    return (unit.end or unit.files[0].stat.size) if reader.closed else reader.tell()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched(SourceFile):
    """A file that keeps its readers, so that they tell how many stored bytes were read."""

    opened: list[BinaryIO] = field(default_factory=list, compare=False)

    def open(self, start: int = 0, until: int | None = None) -> BinaryIO:
        self.opened.append(SourceFile.open(self, start, until))
        return self.opened[-1]
