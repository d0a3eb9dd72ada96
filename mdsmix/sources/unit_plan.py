"""Files cut and grouped into work units, from their names and sizes alone; also from their
beginnings if records name images.

The number of workers does not matter, so the same files make the same units everywhere. Where many
small files are grouped, names decide where a group ends: a run that is too large is split at the
file whose name hashes highest, and both halves again. A new file then changes only the group that
it falls into, and all other boundaries stay. Groups are about half as full as fixed cutting would
make them, which costs nothing but a few more units. The last part of the path counts first, so that
a folder may be moved or renamed and its files stay in their groups.

An estimate of a whole source is made from the beginnings of a few splits, and from their share of
the source. Names of splits decide which are read, so that a new file changes at most one of them.
The uncompressed size of a packed file is unknown: the stored bytes of each block are counted while
it is read. A file with a directory gives its number of records.
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
    """Return the units of these files, ordered by path, then offset. Empty files are in no unit.

    Args:
        fields: the fields that are read of each record; empty: all.
        parsed: fields with lists or objects.
        line_window: returns the bytes of a window for a file of lines whose records name something
            much larger, such as images.
        blobs: fields with bytes.
    """
    filled = sorted((file for file in files if file.stat.size), key=sort_key)
    windows = dict[SourceFile, int]()
    if line_window:
        of_lines = [file for file in filled if not format_of(file).reads_fields]
        windows = dict(zip(of_lines, map_threads(line_window, of_lines), strict=True))
    template = Unit(files=(), fields=tuple(fields), parsed=tuple(parsed), blobs=tuple(blobs))
    units = list[Unit]()
    for window in sorted({window_bytes, *windows.values()}):
        alike = [file for file in filled if windows.get(file, window_bytes) == window]
        units += _plan_alike(alike, replace(template, window_bytes=window))
    return sorted(units, key=lambda unit: unit.sort_key)


def _plan_alike(files: list[SourceFile], template: Unit) -> Iterator[Unit]:
    """Yield the units of files with one size of window.

    Args:
        template: a unit with everything that these units share.
    """
    make_unit = partial(_unit, template)
    window = template.window_bytes
    weights = _weights(files)

    # Group small files.
    is_small = weights < window
    small = list(compress(files, is_small))
    yield from map(make_unit, _runs(small, weights[is_small], window))

    # Cut large files into splits.
    large = list(compress(files, ~is_small))

    def split(file: SourceFile) -> list[tuple[int, int | None]]:
        return list(format_of(file).splits(file, window, template.fields))

    for file, splits in zip(large, map_threads(split, large), strict=True):
        for start, end in splits:
            yield make_unit([file], start=start, end=end)


def estimate_size(files: Iterable[SourceFile]) -> int:
    """Return about how many uncompressed bytes these files contain."""
    return int(_weights(list(files)).sum())


def describe_unit(unit: Unit) -> str:
    """Return the unit for a person: `a.jsonl from byte 100663296 on`."""
    description = unit.name
    if len(unit.files) > 1:
        description += f" and {len(unit.files) - 1} files more"
    if unit.start:
        description += f" from {format_of(unit.files[0]).ordinals} {unit.start} on"
    return description


def prepare_formats(units: Iterable[Unit]) -> None:
    """Import the libraries that read these units, before workers are forked that would each import
    them.
    """
    formats = dict[int, Any]()
    for unit in units:
        for file in unit.files:
            format = format_of(file)
            formats[id(format)] = format
    for format in formats.values():
        format.prepare()


def counted_key(unit: Unit) -> str:
    """Return the key of a place that counts from the unit's start; "" if the format has none."""
    return format_of(unit.files[0]).counted


def _unit(template: Unit, files: list[SourceFile], **split: Any) -> Unit:
    formats = list(map(format_of, files))
    reads_fields = any(format.reads_fields for format in formats)
    cells_are_texts = any(format.cells_are_texts for format in formats)
    return replace(
        template,
        files=tuple(files),
        fields=template.fields if reads_fields else (),
        parsed=template.parsed if cells_are_texts else (),
        blobs=template.blobs if cells_are_texts else (),
        **split,
    )


def _weights(files: list[SourceFile]) -> NDArray[np.int64]:
    """Return the uncompressed bytes that each file is assumed to have: int64 [files]."""
    return np.fromiter((format_of(file).weight(file) for file in files), np.int64, len(files))


def _runs(
    files: list[SourceFile], weights: NDArray[np.int64], window_bytes: int
) -> Iterator[list[SourceFile]]:
    """Yield runs of consecutive files, each of at most a window in all, in order."""
    bytes_before = np.concatenate([[0], np.cumsum(weights)])
    name_hashes = (xxhash.xxh3_64_intdigest(file.name.rpartition("/")[2]) for file in files)
    priorities = np.fromiter(name_hashes, np.uint64, len(files))
    waiting = [(0, len(files))] if files else []
    while waiting:
        begin, end = waiting.pop()
        if bytes_before[end] - bytes_before[begin] <= window_bytes:
            yield files[begin:end]
            continue
        # Not at the first file, which would leave nothing before it.
        candidates = priorities[begin + 1 : end]
        highest = begin + 1 + np.flatnonzero(candidates == candidates.max())
        cut = int(max(highest, key=lambda number: _priority(files[number].name)))
        waiting += [(cut, end), (begin, cut)]


def _priority(name: str) -> tuple[int, ...]:
    """Return hashes of a path, the last part first.

    A beginning that all paths share decides nothing: depth and lower folders count before it.
    """
    *folders, last = [xxhash.xxh3_64_intdigest(part) for part in name.split("/")]
    return last, len(folders), *reversed(folders)


MOST_SPLITS = 32
"The most splits whose beginnings are read."
BYTES = 128 << 10
"Uncompressed bytes that are decoded of each split, or one record if it is longer."
LEAST_WINDOW = 1 << 20
SPLITS_AT_ONCE = 4
"Splits that are read map_threads, 4 MB each: the first block is read whole."


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The first records of a split."""

    records: Sequence[Any]
    "Only good records; `weight` counts the bytes of bad ones too."
    bad: Counter[str]
    "Reason -> number of items that give no record."
    weight: float
    "Bytes of the beginning, in the measure of `estimate_size`."
    folder: Location
    "The folder of the split's file."


def choose_splits(
    files: Iterable[SourceFile], least_window: int = LEAST_WINDOW, **settings: Any
) -> list[Unit]:
    """Return the splits to estimate from, at most 32; of a few files, several splits each.

    Args:
        settings: further arguments of `plan_units`.
    """
    filled = [file for file in files if file.stat.size]
    drawn = sorted(filled, key=lambda file: _draw_key(file, 0))[:MOST_SPLITS]
    window = _split_bytes(estimate_size(drawn), least_window)
    units = list[Unit]()
    for file in drawn:
        units += plan_units([file], window, **settings)
    return sorted(units, key=lambda unit: _draw_key(unit.files[0], unit.start))[:MOST_SPLITS]


def read_beginnings(units: Sequence[Unit], size: int | None) -> Iterator[Beginning]:
    """Yield the beginning of each split that is not empty.

    Args:
        size: uncompressed bytes to decode of each split; None: 128 KiB.
    """
    read = partial(_read_beginning, most_bytes=size or BYTES)
    for begin in range(0, len(units), SPLITS_AT_ONCE):
        for beginning in map_threads(read, units[begin : begin + SPLITS_AT_ONCE]):
            if beginning:
                yield beginning


def _split_bytes(size: int, least: int) -> int:
    """Return the bytes of a split so that there are enough splits: a power of two, which stays the
    same when a source grows a little.
    """
    power_of_two = 1 << max(1, size // MOST_SPLITS).bit_length() - 1
    return min(WINDOW_BYTES, max(least, power_of_two))


def _draw_key(file: SourceFile, start: int) -> tuple[int, int, int]:
    """Return the key that decides which splits are read. The last part of the name counts first, so
    that a folder may be moved or renamed.
    """
    last = xxhash.xxh3_64_intdigest(f"{start} {file.name.rpartition('/')[2]}")
    return last, xxhash.xxh3_64_intdigest(file.name), start


def _read_beginning(unit: Unit, most_bytes: int) -> Beginning | None:
    """Return the beginning of a split, up to `most_bytes`; None if the split is empty."""
    original = unit.files[0]
    file = _WatchedFile(
        **{attribute.name: getattr(original, attribute.name) for attribute in fields(original)}
    )
    format = format_of(file)
    span = replace(unit, window_bytes=1 << 62).span()

    # Read blocks until they have enough bytes, and work out their share of the file.
    read = list[Block]()
    size = 0
    with closing(cast("Any", format.blocks(file, span))) as blocks:
        while size < most_bytes:
            block = next(blocks, None)
            if block is None:
                break
            read.append(block)
            size += block.size
        share = size / format.weight(original)
        if records_of_file := format.records(original):
            share = sum(block.count for block in read) / records_of_file
        elif file.readers:
            share = (_position(file.readers[-1], unit) - unit.start) / original.stat.size
    if not size:
        return None

    # Drop the end of the last block, which may be much larger than asked for.
    *whole, last = read
    count = max(1, min(last.count, most_bytes * last.count // last.size))
    beginning = [*whole, last.first(count)]

    records = list[Any]()
    bad = Counter[str]()
    for block in beginning:
        decoded, faults = block.decode()
        records += decoded
        bad.update(reason for reason in faults.values() if reason != BLANK)
    bytes_read = format.weight(original) * min(1.0, share)
    return Beginning(
        records=records,
        bad=bad,
        weight=bytes_read * sum(block.size for block in beginning) / size,
        folder=original.location.parent,
    )


def _position(reader: BinaryIO, unit: Unit) -> int:
    """Return the byte up to which the stored file was read. A reader at the end is closed."""
    return (unit.end or unit.files[0].stat.size) if reader.closed else reader.tell()


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedFile(SourceFile):
    """A file that keeps its readers: their positions show how many stored bytes were read."""

    readers: list[BinaryIO] = field(default_factory=list, compare=False)

    def open(self, start: int = 0, until: int | None = None) -> BinaryIO:
        reader = SourceFile.open(self, start, until)
        self.readers.append(reader)
        return reader
