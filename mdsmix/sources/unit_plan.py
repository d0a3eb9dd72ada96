"""Makes the work units of a source: small files are grouped, and large files are cut into splits.
The names and sizes of the files decide this alone; their first records too, if these name images.

The number of workers does not matter, so the same files make the same units everywhere.

When many small files are grouped, their names decide where a group ends. A list of files that is
too large is cut at the file whose name has the highest hash, and each half is cut again if
necessary. A new file then changes only the group that it belongs to. Such groups are about half as
full as groups of fixed size, which costs only a few more units. The last part of a path is compared
first, so files stay in their groups when their folder is moved or renamed.

A whole source is estimated from the beginnings of a few splits, and from their share of the source.
Hashes of names choose these splits, so a new file changes at most one of them. The uncompressed
size of a packed file is unknown, so the stored bytes of each block are counted while it is read. A
file with a directory, such as parquet, contains its number of records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import field, fields, replace
from functools import partial
from itertools import compress
from typing import Any, BinaryIO, cast

import xxhash

from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import np
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
    text_or_messages: Iterable[str] = (),
) -> list[Unit]:
    """Return the work units of these files (each a group of small files or a part of a large one),
    ordered by path, then offset. Empty files are in no unit.

    Args:
        window_bytes: uncompressed bytes of a window (a slice of a unit).
        fields: the fields that are read of each record; empty: all.
        parsed: fields whose values are lists or objects; a format of strings, such as csv, has them
            as JSON.
        line_window: file -> bytes of its windows, in place of `window_bytes`. It is called only for
            formats that read whole records. There a small record may name much larger things, such
            as images, so fewer records shall be in a window.
        blobs: fields whose values are bytes, such as images in a tar archive.
        text_or_messages: fields whose values are strings or messages (`Unit.text_or_messages`).
    """
    # Choose the window of each file.
    filled = sorted((file for file in files if file.stat.size), key=sort_key)
    windows = dict[SourceFile, int]()
    if line_window:
        of_lines = [file for file in filled if not format_of(file).reads_fields]
        windows = dict(zip(of_lines, map_threads(line_window, of_lines), strict=True))

    # Plan the units of all files that have the same window together.
    template = Unit(
        files=(),
        fields=tuple(fields),
        parsed=tuple(parsed),
        text_or_messages=tuple(text_or_messages),
        blobs=tuple(blobs),
    )
    units = list[Unit]()
    for window in sorted({window_bytes, *windows.values()}):
        alike = [file for file in filled if windows.get(file, window_bytes) == window]
        units += _plan_alike(alike, replace(template, window_bytes=window))
    return sorted(units, key=lambda unit: unit.sort_key)


def _plan_alike(files: list[SourceFile], template: Unit) -> Iterator[Unit]:
    """Yield the work units of files that have the same window size (`window_bytes`).

    Args:
        template: a unit without files, with the settings that all these units share.
    """
    make_unit = partial(_make_unit, template)
    window = template.window_bytes
    weights = _estimate_sizes(files)  # uncompressed bytes of each file, as far as known

    # Group small files.
    is_small = [weight < window for weight in weights]
    small = list(compress(files, is_small))
    yield from map(make_unit, _split_into_runs(small, list(compress(weights, is_small)), window))

    # Cut large files into splits.
    large = [file for file, weight in zip(files, weights, strict=True) if weight >= window]

    def split(file: SourceFile) -> list[tuple[int, int | None]]:
        """Return the splits of a file, as ranges (start, end): [(0, 500), (500, None)]."""
        return list(format_of(file).splits(file, window, template.fields))

    for file, splits in zip(large, map_threads(split, large), strict=True):
        for start, end in splits:
            yield make_unit([file], start=start, end=end)


def estimate_size(files: Iterable[SourceFile]) -> int:
    """Return about how many uncompressed bytes these files have together."""
    return sum(_estimate_sizes(files))


def estimate_unit_size(unit: Unit) -> int:
    """Return about how many uncompressed bytes a unit reads."""
    size = estimate_size(unit.files)
    if unit.end is None and not unit.start:
        return size
    # The unit is a split of one file.
    if format_of(unit.files[0]).ordinals == "byte":
        end = size if unit.end is None else min(size, unit.end)
        return end - unit.start
    return min(size, unit.window_bytes)


def describe_unit(unit: Unit) -> str:
    """Return the unit as messages name it: `a.jsonl from byte 100663296 on`, or
    `a.jsonl and 7 files more`.
    """
    description = unit.name
    if len(unit.files) > 1:
        description += f" and {len(unit.files) - 1} files more"
    if unit.start:
        description += f" from {format_of(unit.files[0]).ordinals} {unit.start} on"
    return description


def prepare_formats(units: Iterable[Unit]) -> None:
    """Import the libraries that read the files of these units.

    Called before workers are forked; otherwise each worker would import the libraries.
    """
    formats = dict[int, Any]()
    for unit in units:
        for file in unit.files:
            format = format_of(file)
            formats[id(format)] = format  # each format once
    for format in formats.values():
        format.prepare()


def find_counted_key(unit: Unit) -> str:
    """Return the key of a record's place (`Item.place`) whose number starts again in each work
    unit, such as `line`; "" if the unit's format has no such key.

    The number of lines before a unit is known only after the earlier units were read. When a stream
    is published, the numbers in its files of bad records are changed to count from the file's
    start.
    """
    return format_of(unit.files[0]).counted


def _make_unit(template: Unit, files: list[SourceFile], **split: Any) -> Unit:
    """Return the work unit of these files.

    Args:
        template: a unit without files. Its `fields`, `parsed`, `text_or_messages` and `blobs` are
            left out of the result if no format of the files uses them.
        split: `start` and `end` of the unit if the unit is a split of one file.
    """
    formats = list(map(format_of, files))
    reads_fields = any(format.reads_fields for format in formats)
    cells_are_texts = any(format.cells_are_texts for format in formats)
    return replace(
        template,
        files=tuple(files),
        fields=template.fields if reads_fields else (),
        parsed=template.parsed if cells_are_texts else (),
        text_or_messages=template.text_or_messages if cells_are_texts else (),
        blobs=template.blobs if cells_are_texts else (),
        **split,
    )


def _estimate_sizes(files: Iterable[SourceFile]) -> list[int]:
    """Return the uncompressed bytes that each file is assumed to have."""
    return [format_of(file).weight(file) for file in files]


def _split_into_runs(
    files: list[SourceFile], weights: list[int], window_bytes: int
) -> Iterator[list[SourceFile]]:
    """Yield the files in runs (lists of consecutive files), in order. The files of a run have at
    most `window_bytes` bytes together.

    Args:
        weights: uncompressed bytes of each file, at most `window_bytes` each.
        window_bytes: the most uncompressed bytes of a run.
    """
    if sum(weights) <= window_bytes:
        if files:
            yield files
        return
    # Files of 5, 3 and 4 bytes have [0, 5, 8, 12] bytes before them; the last number is the total.
    bytes_before = np.concatenate([[0], np.cumsum(weights)])
    name_hashes = (xxhash.xxh3_64_intdigest(file.name.rpartition("/")[2]) for file in files)
    hashes = np.fromiter(name_hashes, np.uint64, len(files))

    # Take the first range of files. If it is too large, cut it into two ranges.
    waiting = [(0, len(files))]
    while waiting:
        begin, end = waiting.pop()
        if bytes_before[end] - bytes_before[begin] <= window_bytes:
            yield files[begin:end]
            continue
        # Cut before the file whose name has the highest hash, but not before the first file of the
        # range, because the first half would be empty. Among files of equal hash, the path decides.
        candidates = hashes[begin + 1 : end]
        highest = begin + 1 + np.flatnonzero(candidates == candidates.max())
        cut = int(max(highest, key=lambda number: _make_sort_key(files[number].name)))
        waiting += [(cut, end), (begin, cut)]


def _make_sort_key(name: str) -> tuple[int, ...]:
    """Return a sort key for file names whose last parts have equal hashes. A group of files that is
    too large is cut at the file with the highest key.

    For the path `a/b/c.jsonl` this is (hash of `c.jsonl`, 2, hash of `b`, hash of `a`), where 2 is
    the number of folders. So a folder at the beginning of all paths never decides, and may be
    renamed.
    """
    *folders, last = [xxhash.xxh3_64_intdigest(step) for step in name.split("/")]
    return last, len(folders), *reversed(folders)


MOST_SPLITS = 32
"The most splits whose beginnings are read."
BYTES = 128 << 10
"Uncompressed bytes that are decoded of each split; more if its first record is longer."
LEAST_WINDOW = 1 << 20
"The least bytes of a split for an estimate."
SPLITS_AT_ONCE = 4
"Splits that are read at a time. Each takes 4 MB, because its first block is read whole."


@frozen(kw_only=True)
class Beginning:
    """The first records of one split (a part of a source's file). The size of the whole source is
    estimated from a few such beginnings.
    """

    records: Sequence[Any]
    "Only good records; `weight` also includes the bytes of bad records."
    bad: Counter[str]
    "Reason code -> number of bad records."
    weight: float
    "Uncompressed bytes of the beginning, as `estimate_size` counts them."
    folder: Location
    "The folder of the split's file."


def choose_splits(
    files: Iterable[SourceFile], least_window: int = LEAST_WINDOW, **settings: Any
) -> list[Unit]:
    """Return at most 32 splits (work units of one file) from which a source is estimated. Hashes of
    the files' names decide which splits are chosen.

    Args:
        files: all files of the source.
        least_window: the least uncompressed bytes of a split.
        settings: further arguments of `plan_units`.
    """
    filled = [file for file in files if file.stat.size]
    chosen = sorted(filled, key=lambda file: _make_sampling_key(file, 0))[:MOST_SPLITS]
    window = _split_bytes(estimate_size(chosen), least_window)
    units = list[Unit]()
    for file in chosen:
        units += plan_units([file], window, **settings)
    return sorted(units, key=lambda unit: _make_sampling_key(unit.files[0], unit.start))[
        :MOST_SPLITS
    ]


def read_beginnings(units: Sequence[Unit], size: int | None) -> Iterator[Beginning]:
    """Yield the first records of each split (a part of a file), from which the whole source is
    estimated. Empty splits are left out.

    Args:
        units: the splits, from `choose_splits`.
        size: uncompressed bytes to decode of each split; None: 128 KiB.
    """
    read = partial(_read_beginning, most_bytes=size or BYTES)
    for begin in range(0, len(units), SPLITS_AT_ONCE):
        for beginning in map_threads(read, units[begin : begin + SPLITS_AT_ONCE]):
            if beginning:
                yield beginning


def _split_bytes(size: int, least: int) -> int:
    """Return how many bytes a split (a part of a file) shall have. For an estimate of the source
    the beginnings of splits are read. The result is `size` / MOST_SPLITS, rounded down to a power
    of two; at least `least`, and at most WINDOW_BYTES.

    Because of the rounding, the result usually stays the same when a source grows a little.

    Args:
        size: uncompressed bytes of the source.
        least: the least bytes of a split.
    """
    share = max(1, size // MOST_SPLITS)
    power_of_two = 1 << (share.bit_length() - 1)  # 8 for shares of 8 to 15
    return min(WINDOW_BYTES, max(least, power_of_two))


def _make_sampling_key(file: SourceFile, start: int) -> tuple[int, int, int]:
    """Return the pseudo-random key of a split (a part of a file). For an estimate of the source,
    only the splits with the least keys are read.

    The hash of the file's name without its folder is compared first. So the choice usually stays
    the same if a folder is moved or renamed.

    Args:
        start: where the split begins: the number of its first byte, row or sample.
    """
    last = xxhash.xxh3_64_intdigest(f"{start} {file.name.rpartition('/')[2]}")
    return last, xxhash.xxh3_64_intdigest(file.name), start


def _read_beginning(unit: Unit, most_bytes: int) -> Beginning | None:
    """Return the beginning of a split; None if the split is empty.

    Args:
        unit: the split, as a work unit of one file.
        most_bytes: about how many uncompressed bytes to decode.
    """
    # Copy the file into an object that remembers its readers.
    original = unit.files[0]
    attributes = {field.name: getattr(original, field.name) for field in fields(original)}
    file = _WatchedFile(**attributes)
    format = format_of(file)
    span = replace(unit, window_bytes=1 << 62).span()  # the whole split is one window

    # Read blocks until they have enough bytes.
    read = list[Block]()
    size = 0
    with closing(cast("Any", format.blocks(file, span))) as blocks:
        while size < most_bytes:
            block = next(blocks, None)
            if block is None:
                break
            read.append(block)
            size += block.size
        # The readers must still be open here: their positions show how much they have read.
        share = _share_that_was_read(unit, file.readers, read)
    if not size:
        return None

    # Keep only the first items of the last block: it may be much larger than requested.
    *whole, last = read
    count = max(1, min(last.count, most_bytes * last.count // last.size))
    beginning = [*whole, last.first(count)]

    records = list[Any]()
    bad = Counter[str]()
    for block in beginning:
        decoded, faults = block.decode()
        records += decoded
        bad.update(reason for reason in faults.values() if reason != BLANK)
    # The beginning has only a part of the bytes that were read, since the last block was cut.
    bytes_read = format.weight(original) * min(1.0, share)
    size_of_beginning = sum(block.size for block in beginning)
    return Beginning(
        records=records,
        bad=bad,
        weight=bytes_read * size_of_beginning / size,
        folder=original.location.parent,
    )


def _share_that_was_read(unit: Unit, readers: list[BinaryIO], blocks: Sequence[Block]) -> float:
    """Return how much of a whole file was read: by records if the file contains their number, by
    stored bytes if a reader counts them, otherwise by assumed bytes.

    Args:
        unit: the split (a part of the file) that is being read.
        readers: the readers of the file; empty if its format does not read stored bytes in order.
        blocks: all blocks that were read.
    """
    file = unit.files[0]
    format = format_of(file)
    records_of_file = format.records(file)
    if records_of_file:
        return sum(block.count for block in blocks) / records_of_file
    if readers:
        last_reader = readers[-1]
        return (_find_position(last_reader, unit) - unit.start) / file.stat.size
    return sum(block.size for block in blocks) / format.weight(file)


def _find_position(reader: BinaryIO, unit: Unit) -> int:
    """Return up to which stored byte of its file a split was read, for an estimate of the share
    that was read. A closed reader has read the split to its end.
    """
    if not reader.closed:
        return reader.tell()
    return unit.end or unit.files[0].stat.size


@frozen(kw_only=True, slots=True)
class _WatchedFile(SourceFile):
    """A file that remembers its readers, whose positions show how many stored bytes were read."""

    readers: list[BinaryIO] = field(default_factory=list, compare=False)

    def open(self, start: int = 0, until: int | None = None) -> BinaryIO:
        reader = SourceFile.open(self, start, until)
        self.readers.append(reader)
        return reader
