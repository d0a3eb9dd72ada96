"""Files cut and grouped into work units, from their names and sizes alone.

Never from the number of workers, so that the same files make the same units everywhere. Where many
small files are grouped, the files themselves say where a group ends: a run that is too large is
split at the file whose name hashes highest, and both halves again. Another file then changes the
group that it falls into, and the boundaries elsewhere stay where they were; groups are about half
as full as fixed cutting would make them, which costs nothing but a few more units. The last part of
the path counts first, so that a folder may be moved or renamed and its files stay in their groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import xxhash

from mdsmix.sources.formats import format_of
from mdsmix.sources.units import WINDOW_BYTES, SourceFile, Unit


def plan(files: list[SourceFile], window_bytes: int = WINDOW_BYTES) -> list[Unit]:
    """The units of these files, ordered by path, then offset. Empty files are in none."""
    files = sorted((f for f in files if f.stat.size), key=lambda file: file.name)
    small = [file for file in files if weight(file) < window_bytes]
    large = [file for file in files if weight(file) >= window_bytes]
    units = [
        Unit(files=tuple(run), window_bytes=window_bytes) for run in _runs(small, window_bytes)
    ]
    units += [unit for file in large for unit in _windows(file, window_bytes)]
    return sorted(units, key=lambda unit: (unit.name, unit.start))


def has_one_window(unit: Unit) -> bool:
    """Known without reading: a plain unit has one window, one with a compressed file may have more."""
    return all(format_of(file.name).growth == 1 for file in unit.files)


def weight(file: SourceFile) -> int:
    """The uncompressed bytes that a file is planned as."""
    return file.stat.size * format_of(file.name).growth


def _windows(file: SourceFile, window_bytes: int) -> Iterator[Unit]:
    if format_of(file.name).growth > 1:
        # Where its windows begin is known only when it is read: one unit with many windows.
        yield Unit(files=(file,), window_bytes=window_bytes)
        return
    for start in range(0, file.stat.size, window_bytes):
        end = min(start + window_bytes, file.stat.size)
        yield Unit(files=(file,), start=start, end=end, window_bytes=window_bytes)


def _runs(files: list[SourceFile], window_bytes: int) -> Iterator[list[SourceFile]]:
    """Consecutive files of at most a window in all, in order."""
    before = list(accumulate(map(weight, files), initial=0))
    priorities = [_priority(file.name) for file in files]
    waiting = [(0, len(files))] if files else []
    while waiting:
        begin, end = waiting.pop()
        if before[end] - before[begin] <= window_bytes:
            yield files[begin:end]
            continue
        # Not at the first file, which would leave nothing before it.
        cut = max(range(begin + 1, end), key=priorities.__getitem__)
        waiting += [(cut, end), (begin, cut)]


def _priority(name: str) -> tuple[int, ...]:
    """Of two files, what all paths begin with decides nothing: equal last names differ in depth, or in a folder below."""
    *folders, last = [xxhash.xxh3_64_intdigest(part) for part in name.split("/")]
    return last, len(folders), *reversed(folders)
