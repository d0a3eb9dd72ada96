"""The token ids of a whole shard, sample by sample, whatever columns they lie in.

Columns of arrays are cut out without looking at a single value; turns are JSON and are parsed, which sets the pace (about
14 M tokens/s). Columns that hold no ids of a stated dtype (text, bytes, images) have none to give.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.ragged import Ragged
from mdsmix.shards.cells import Cells, array_dtype, cells, payload
from mdsmix.shards.index import Shard
from mdsmix.shards.turns import PACKED, layout_of
from mdsmix.shards.whole import Samples

TOGETHER = 64
"Samples of JSON whose numbers become one array: few enough that they are still in the processor's cache."


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of each sample, and where its prompts and responses end."""

    ids: Ragged
    prompts: NDArray[np.int64]
    "int64 [turns]: tokens of each prompt; plain rows are one turn without a prompt."
    responses: NDArray[np.int64]
    turns: NDArray[np.int64]
    "int64 [n + 1]: sample i is the turns `turns[i]` to `turns[i + 1]`; of a packed row each document is a turn without a prompt."
    trained: NDArray[np.int64] | None = None
    "int64 [n]: the trained tokens of each packed row, which says so itself; None of other samples."

    @property
    def largest(self) -> NDArray[np.int64]:
        """int64 [n]: the largest id of each sample, none of which is empty."""
        return np.maximum.reduceat(self.ids.values, self.ids.offsets[:-1]).astype(np.int64)


def token_columns(shard: Shard) -> tuple[str, ...]:
    """The columns whose ids are counted; none where they are of no stated dtype."""
    names = layout_of(shard.columns)
    if names == PACKED:
        names = tuple(name for name in (*PACKED, "loss_mask") if name in shard.columns)
        return names if all(_holds_numbers(shard.columns[name]) for name in names) else ()
    encodings = {shard.columns[name] for name in names}
    if names == ("turns",):
        return names if encodings == {"json"} else ()
    dtypes = {e.split(":")[1] for e in encodings if _holds_numbers(e)}
    return names if len(dtypes) == 1 and all(map(_holds_numbers, encodings)) else ()


def _holds_numbers(encoding: str) -> bool:
    """Arrays of whole numbers of a stated dtype."""
    kind, dtype, *_ = [*encoding.split(":"), ""]
    return kind == "ndarray" and bool(dtype) and np.dtype(dtype).kind in "iu"


def tokens_of(shard: Shard, samples: Samples) -> Tokens | None:
    """None where the columns hold no ids of a stated dtype. ValueError, LookupError or TypeError where the bytes contradict
    the columns."""
    names = token_columns(shard)
    if not names or not len(samples):
        return None
    found = {part.column.name: part for part in cells(shard, samples)}
    if names == ("turns",):
        return _of_turns(samples, found["turns"])
    parts = [payload(samples, found[name]) for name in names]
    return (
        _of_packed(samples, *parts)
        if layout_of(shard.columns) == PACKED
        else _of_arrays(samples, parts)
    )


def _of_packed(samples: Samples, ids: Cells, starts: Cells, mask: Cells | None = None) -> Tokens:
    """ValueError where a row's documents do not begin inside it, one behind the other from 0 on, or its mask is not as long."""
    rows, begins = _values(samples, ids), _values(samples, starts)
    trained = _values(samples, mask) if mask else None
    if trained and (trained.lengths != rows.lengths).any():
        raise ValueError("what is trained of a row is not as long as its tokens")
    first = rows.offsets[:-1]
    places = begins.values.astype(np.int64) + np.repeat(first, begins.lengths)
    ends = np.append(places[1:], len(rows.values))
    is_first = np.array_equal(places[begins.offsets[:-1]], first)
    if not begins.lengths.all() or not is_first or (places >= ends).any():
        raise ValueError("the documents of a row do not begin where it says")
    counts = rows.lengths - begins.lengths
    if trained:
        # The first of a document is never trained, whatever is said of it.
        sums = np.add.reduceat(trained.values > 0, first, dtype=np.int64)
        firsts = np.add.reduceat(trained.values[places] > 0, begins.offsets[:-1], dtype=np.int64)
        counts = sums - firsts
    lengths = ends - places
    return Tokens(rows, np.zeros_like(lengths), lengths, begins.offsets, counts)


def _values(samples: Samples, part: Cells) -> Ragged:
    pieces = [
        samples.data[a:b] for a, b in zip(part.starts.tolist(), part.stops.tolist(), strict=True)
    ]
    dtype = array_dtype(part.column)
    return Ragged.from_lengths(
        np.frombuffer(b"".join(pieces), dtype), part.sizes // part.column.dtype.itemsize
    )


def _of_arrays(samples: Samples, parts: list[Cells]) -> Tokens:
    dtype = array_dtype(parts[0].column)
    lengths = [part.sizes // part.column.dtype.itemsize for part in parts]
    bounds = np.stack([edge for p in parts for edge in (p.starts, p.stops)], axis=1).tolist()
    pieces = [samples.data[b[i] : b[i + 1]] for b in bounds for i in range(0, len(b), 2)]
    ids = Ragged.from_lengths(np.frombuffer(b"".join(pieces), dtype), np.sum(lengths, axis=0))
    prompts = lengths[0] if len(parts) == 2 else np.zeros_like(lengths[0])
    return Tokens(ids, prompts, lengths[-1], np.arange(len(samples) + 1))


def _of_turns(samples: Samples, part: Cells) -> Tokens:
    data, bounds = memoryview(samples.data), np.stack([part.starts, part.stops], axis=1).tolist()
    values, lengths, counts = list[NDArray[np.int64]](), list[int](), [0]
    for first in range(0, len(bounds), TOGETHER):
        samples_turns = [orjson.loads(data[a:b]) for a, b in bounds[first : first + TOGETHER]]
        counts += map(len, samples_turns)
        rows = [t[c] for turns in samples_turns for t in turns for c in ("input_ids", "labels")]
        ends = list(map(len, rows))
        values.append(np.fromiter(chain.from_iterable(rows), np.int64, sum(ends)))
        lengths += ends
    segments = Ragged.from_lengths(np.concatenate(values), np.array(lengths, np.int64))
    offsets = np.cumsum(counts)
    ids = Ragged(segments.values, segments.offsets[2 * offsets])
    return Tokens(ids, segments.lengths[0::2], segments.lengths[1::2], offsets)
