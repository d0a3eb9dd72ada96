"""Tokens in the samples of a whole shard, counted from their bytes: the totals of a mix are exact, whatever was drawn.

Columns of arrays are cut out by arithmetic on all samples at once; turns are JSON and are parsed, which sets the pace
(about 30 M tokens/s). Columns that hold no ids of a stated dtype (text, bytes, images) are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.encode.pairs import lacks_eos
from mdsmix.encode.targets import Lengths, Targets, Turns, count_losses
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.shards.manifest import Encoding, Manifest, Totals, histogram
from mdsmix.shards.whole import Samples

SHAPES = (("turns",), ("input_ids", "labels"), ("tokens",))
"The columns that hold a sample's ids, in the order in which a loader looks for them."


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of each sample, and where its prompts and responses end."""

    ids: Ragged
    turns: Turns

    @property
    def largest(self) -> NDArray[np.int64]:
        """int64 [n]: the largest id of each sample, none of which is empty."""
        return np.maximum.reduceat(self.ids.values, self.ids.offsets[:-1]).astype(np.int64)


def tokens_of(shard: Shard, samples: Samples) -> Tokens | None:
    """None where the columns hold no ids of a stated dtype. ValueError or IndexError where the bytes contradict the columns."""
    shape = next((s for s in SHAPES if set(s) <= set(shard.column_names)), ())
    if not shape or not len(samples):
        return None
    cells = {name: cell for name, *cell in _cells(shard, samples) if name in shape}
    if shape == ("turns",):
        return _of_turns(samples, *cells["turns"]) if shard.columns["turns"] == "json" else None
    dtypes = {_dtype(shard.columns[name]) for name in shape}
    dtype = dtypes.pop()
    if dtypes or dtype is None:
        return None
    return _of_arrays(
        samples, [_payload(shard.columns[n], samples, *cells[n]) for n in shape], dtype
    )


def count(tokens: Tokens, copies: NDArray[np.int64], card: Manifest | None) -> Totals:
    """What the samples come to, each taken `copies` times; without a card no more than their number and tokens."""
    lengths, drawn = tokens.ids.lengths, copies > 0
    plain = Totals(samples=int(copies.sum()), tokens=int(lengths @ copies))
    if card is None or not drawn.any():
        return plain
    return replace(
        plain,
        loss_tokens=int(_losses(tokens, card.encoding, card.tokenizer.eos_id) @ copies),
        largest_id=int(tokens.largest[drawn].max()),
        longest=int(lengths[drawn].max()),
        lengths=histogram(np.repeat(lengths, copies)),
    )


def _losses(tokens: Tokens, encoding: Encoding, eos: int | None) -> Lengths:
    """int64 [n]: positions of each sample that give a loss, by the rules by which it was encoded."""
    if encoding.kind == "pretraining":
        return tokens.ids.lengths - 1
    targets = Targets(
        max_seq_len=encoding.max_seq_len,
        target_prompts=encoding.target_prompts,
        target_responses=encoding.target_responses,
        decoder_only_format=encoding.decoder_only_format,
    )
    return count_losses(targets, tokens.turns, lacks_eos(tokens.ids, eos))


def _cells(shard: Shard, samples: Samples) -> Iterator[tuple[str, Lengths, Lengths]]:
    """(column, starts, stops) in the shard's bytes."""
    data = np.frombuffer(samples.data, np.uint8)
    at = samples.offsets[:-1]
    varying = 4 * sum(not size for size in shard.column_sizes)
    heads = data[at[:, None] + np.arange(varying)].view("<u4").astype(np.int64)
    at = at + varying
    sizes = iter(heads.T)
    for name, size in zip(shard.column_names, shard.column_sizes, strict=True):
        stops = at + (size or next(sizes))
        yield name, at, stops
        at = stops
    if (at != samples.offsets[1:]).any():
        raise ValueError("the columns of a sample are not as long as the sample")


def _dtype(encoding: str) -> np.dtype[Any] | None:
    """The dtype of a column of ids; None where its encoding does not state one."""
    kind, *settings = encoding.split(":")
    if kind != "ndarray" or not settings or np.dtype(settings[0]).kind not in "iu":
        return None
    return np.dtype(settings[0])


def _payload(
    encoding: str, samples: Samples, starts: Lengths, stops: Lengths
) -> tuple[Lengths, Lengths]:
    """Where the values lie: behind the array's own shape, where the encoding does not fix it."""
    if encoding.count(":") == 2:
        return starts, stops
    heads = np.frombuffer(samples.data, np.uint8)[starts]
    if (heads >> 2 != 1).any():
        raise ValueError("a row of ids has more than one dimension")
    return starts + 1 + (1 << (heads & 3).astype(np.int64)), stops


def _of_arrays(
    samples: Samples, parts: list[tuple[Lengths, Lengths]], dtype: np.dtype[Any]
) -> Tokens:
    lengths = [(stops - starts) // dtype.itemsize for starts, stops in parts]
    bounds = np.stack([edge for part in parts for edge in part], axis=1).tolist()
    pieces = [samples.data[b[i] : b[i + 1]] for b in bounds for i in range(0, len(b), 2)]
    ids = Ragged.from_lengths(np.frombuffer(b"".join(pieces), dtype), np.sum(lengths, axis=0))
    prompts = lengths[0] if len(parts) == 2 else np.zeros_like(lengths[0])
    return Tokens(ids, Turns.single(prompts, lengths[-1]))


def _of_turns(samples: Samples, starts: Lengths, stops: Lengths) -> Tokens:
    data = memoryview(samples.data)
    rows, counts = [], []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        turns = orjson.loads(data[start:stop])
        counts.append(len(turns))
        rows += [turn[column] for turn in turns for column in ("input_ids", "labels")]
    parts = Ragged.of(rows, np.int64)
    offsets = np.cumsum([0, *counts])
    return Tokens(
        Ragged(parts.values, parts.offsets[2 * offsets]),
        Turns(parts.lengths[0::2], parts.lengths[1::2], offsets),
    )
