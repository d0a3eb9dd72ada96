"""Files cut and grouped into work units, from their names and sizes alone.

Never from the number of workers, so that the same files make the same units everywhere. Where many
small files are grouped, the files themselves say where a group ends: a run that is too large is
split at the file whose name hashes highest, and both halves again. Another file then changes the
group that it falls into, and the boundaries elsewhere stay where they were; groups are about half
as full as fixed cutting would make them, which costs nothing but a few more units. The last part of
the path counts first, so that a folder may be moved or renamed and its files stay in their groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.sources.formats import format_of
from mdsmix.sources.units import WINDOW_BYTES, SourceFile, Unit, place
from mdsmix.storage import together


def plan(
    files: list[SourceFile],
    window_bytes: int = WINDOW_BYTES,
    fields: Iterable[str] = (),
    parsed: Iterable[str] = (),
    line_bytes: int | None = None,
    blobs: Iterable[str] = (),
) -> list[Unit]:
    """The units of these files, ordered by path, then offset. Empty files are in none. `fields`: all that is read of a
    record, where it is known; `parsed`: those that hold lists or objects; `line_bytes`: of a window in files of lines, whose
    records name what is much larger than they are; `blobs`: those that hold bytes."""
    filled = sorted((file for file in files if file.stat.size), key=place)
    windows = {True: window_bytes, False: min(line_bytes or window_bytes, window_bytes)}
    whole = Unit(files=(), fields=tuple(fields), parsed=tuple(parsed), blobs=tuple(blobs))
    units = list[Unit]()
    for window in sorted({*windows.values()}):
        some = [file for file in filled if windows[format_of(file).reads_fields] == window]
        units += _planned(some, replace(whole, window_bytes=window))
    return sorted(units, key=lambda unit: unit.place)


def _planned(files: list[SourceFile], like: Unit) -> Iterator[Unit]:
    """The units of files that have one window; `like`: what their units share."""
    new, window = partial(_unit, like), like.window_bytes
    weights = _weights(files)
    is_small = weights < window
    yield from map(new, _runs(list(compress(files, is_small)), weights[is_small], window))
    large = list(compress(files, ~is_small))
    cut = together(lambda file: list(format_of(file).splits(file, window, like.fields)), large)
    for file, splits in zip(large, cut, strict=True):
        for start, end in splits:
            yield new([file], start=start, end=end)


def size_of(files: Iterable[SourceFile]) -> int:
    """About how many uncompressed bytes these files hold."""
    return int(_weights(list(files)).sum())


def shown_unit(unit: Unit) -> str:
    """The unit for a person: `a.jsonl from byte 100663296 on`."""
    more = f" and {len(unit.files) - 1} files more" if unit.files[1:] else ""
    start = f" from {format_of(unit.files[0]).ordinals} {unit.start} on" if unit.start else ""
    return unit.name + more + start


def prepare(units: Iterable[Unit]) -> None:
    """Imports what reading these units takes, before workers are forked that would each do so."""
    for kind in {id(kind): kind for unit in units for kind in map(format_of, unit.files)}.values():
        kind.prepare()


def counted_key(unit: Unit) -> str:
    """The key of a place that counts from the unit's start; "" where the format tells places without counting."""
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
    """Of two files, what all paths begin with decides nothing: equal last names differ in depth, or in a folder below."""
    *folders, last = [xxhash.xxh3_64_intdigest(part) for part in name.split("/")]
    return last, len(folders), *reversed(folders)
