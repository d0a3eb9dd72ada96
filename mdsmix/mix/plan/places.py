"""Records at places of a source that is not converted, read and made into rows as a conversion would.

Places are spread evenly over the bytes of all files, and at each a few records are read, one behind the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from mdsmix import sources
from mdsmix.encode.backends import Unequal, open_backend
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds import kind_of
from mdsmix.kinds.reading import open_reading
from mdsmix.kinds.registry import fields_parsed, fields_read
from mdsmix.recipe import StreamSpec
from mdsmix.shards.counts import Totals
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.mds import Layout
from mdsmix.sources import RecordBatch, SourceFile, Unit
from mdsmix.sources.registry import format_of
from mdsmix.storage import Location, locate

PLACES = 32
"At which records are read. An error from fewer is itself uncertain: from 32 it is right to an eighth."
TRIED = 4
"Units of which some records tell how long one is."
LEAST_BYTES = 1 << 10
"No place is a smaller part of a source."
OFFSET_BYTES = 4
"Of each sample, in the table of a shard."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Records of one unit, and what they became."""

    weight: float = 0
    "The share of the places that it stands for."
    covered: float = 0
    "Bytes of the source that its records stand for."
    records: int = 0
    is_whole: bool = False
    totals: Totals
    tokens: float
    raw: float
    "Bytes of its rows in a shard."
    body: bytes
    left_out: Counter[str]


def units_of(files: list[SourceFile], encoding: Encoding, window: int) -> list[tuple[Unit, float]]:
    """Places to read at, in the order of the source, and the bytes of each: parts of a file are taken for equal."""
    # What is passed over counts where the size of a file is all that tells how far reading has come.
    has_counts = all(
        format_of(f).records(f) is not None for f in files if format_of(f).reads_fields
    )
    units = sources.plan(
        files,
        window_bytes=window,
        fields=sorted(fields_read(encoding)) if has_counts else (),
        parsed=sorted(fields_parsed(encoding)),
    )
    parts = Counter(unit.files[0].location.url for unit in units)
    return [(u, sources.size_of(u.files) / parts[u.files[0].location.url]) for u in units]


def chosen_of(weights: Sequence[float]) -> dict[int, float]:
    """Numbers of the units to read, evenly over all bytes, and the share of the places that each stands for."""
    ends = np.array(list(accumulate(weights)))
    if len(weights) <= PLACES:  # all of them, by their size
        return {n: weight / ends[-1] for n, weight in enumerate(weights)}
    at = np.searchsorted(ends, (np.arange(PLACES) + 0.5) / PLACES * ends[-1], "right")
    numbers, hits = np.unique(np.minimum(at, len(weights) - 1), return_counts=True)
    return {int(n): int(k) / PLACES for n, k in zip(numbers, hits, strict=True)}


class Rows:
    """What makes rows of records; opened once, since the fast tokenizer is proved equal each time. Where it turns out to differ,
    the reference does the rest."""

    def __init__(
        self, encoding: Encoding, tokenizer: Tokenizer, backend: str, spec: StreamSpec
    ) -> None:
        self._encoding, self._tokenizer = encoding, tokenizer
        root = spec.images.root if spec.images else None
        self._root = locate(root) if root else None
        self._open(backend)

    def _open(self, backend: str) -> None:
        opened = open_backend(self._tokenizer, backend)
        self._reading = open_reading(self._encoding, self._tokenizer, opened, root=self._root)

    def of(self, batches: Sequence[RecordBatch], files: Sequence[SourceFile]) -> Place:
        records = [record for batch in batches for record in batch.records]
        beside = {file.name: file.location.parent for file in files}
        folders = list[Location]()
        if kind_of(self._encoding).has_images and not self._root:
            names = (name for batch in batches for name in batch.files(range(len(batch.records))))
            folders = [beside[name] for name in names]
        try:
            return self._of(records, folders)
        except Unequal:
            self._open("reference")
            return self._of(records, folders)

    def _of(self, records: Sequence[Any], folders: Sequence[Location]) -> Place:
        encoding = self._encoding
        layout = Layout.of(encoding.columns, encoding.compression)
        encoded = self._reading.encode(records, folders=folders)
        rows = kind_of(encoding).open_rows(layout, self._tokenizer.dtype)
        parts = [*rows.add(encoded)]
        rest, totals, leftover, _ = rows.finish()
        parts.append(rest)
        body = b"".join(part.body.tobytes() for part in parts) + leftover.tobytes()
        count = sum(map(len, parts)) + len(leftover) / encoding.max_seq_len
        return Place(
            totals=totals,
            tokens=totals.tokens + len(leftover),
            raw=len(body) + OFFSET_BYTES * count,
            body=body,
            left_out=Counter(each.reason for each in encoded.rejected),
        )


def span_of(units: Sequence[Unit], records: int) -> int:
    """The bytes that so many records take, by the first ones of some units."""
    some = units[:: max(1, len(units) // TRIED)]
    batches = [batch for unit in some for batch in sources.read(unit, records)]
    count = sum(len(batch.records) for batch in batches)
    return max(LEAST_BYTES, sum(batch.size for batch in batches) * records // max(1, count))


def read_at(unit: tuple[Unit, float], share: float, limit: int, span: int, rows: Rows) -> Place:
    """What becomes of the first records of a unit.

    Where a file can be cut anywhere these are all that begin in so many bytes: as many records at each place would count a place of short
    ones too high.
    """
    where, weight = unit
    cut = sources.cut(where, span)
    most = None if cut else limit + 1
    batches = list(sources.read(cut or where, most))
    bad = Counter(each.reason for batch in batches for each in batch.bad)
    count = sum(len(batch.records) for batch in batches) + bad.total()
    is_whole = cut == where if cut else count <= limit
    size = sum(batch.size for batch in batches)
    covered = sources.length_of(cut) if cut else _covered(where, weight, count, size, is_whole)
    made = rows.of(batches, where.files)
    return replace(
        made,
        weight=share,
        covered=covered,
        records=count,
        is_whole=is_whole,
        left_out=made.left_out + bad,
    )


def _covered(unit: Unit, weight: float, count: int, read: int, is_whole: bool) -> float:
    """How many bytes of the source, as it is planned, the records that were read stand for."""
    held = [format_of(file).records(file) for file in unit.files]
    known = [each for each in held if each is not None]
    if known and len(known) == len(held):
        return sources.size_of(unit.files) * count / max(1, sum(known))
    file = unit.files[0]
    planned = sources.size_of([file]) / max(1, file.stat.size)
    if planned == 1:
        return float(read)
    return weight if is_whole else read * planned / sources.expansion(file)
