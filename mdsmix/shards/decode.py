"""A whole shard decoded to see whether it can be, and counted: numbers and arrays all at once, text and JSON one by one.

Pickles and images stay bytes, since a check must never run what a shard holds.
"""

from __future__ import annotations

import json

from mdsmix.shards.cells import array_dtype, cells, payload
from mdsmix.shards.codecs import codec_of
from mdsmix.shards.counts import Totals, histogram
from mdsmix.shards.index import Shard
from mdsmix.shards.tokens import token_columns, tokens_of
from mdsmix.shards.whole import Samples


def decode(shard: Shard, samples: Samples) -> Totals | None:
    """What the samples of a shard come to, None where they hold no ids; an error says what does not decode."""
    _check_settings(shard, samples)
    counted = token_columns(shard)
    for part in cells(shard, samples):
        codec, settings = codec_of(part.column.encoding)
        if part.column.name in counted or not codec.is_decoded:
            continue
        if array_dtype(part.column):
            payload(samples, part)
            continue
        for start, stop in zip(part.starts.tolist(), part.stops.tolist(), strict=True):
            codec.decode(settings, samples.data[start:stop])
    tokens = tokens_of(shard, samples)
    if tokens is None:
        return Totals() if counted else None
    ids, lengths = tokens.ids.values, tokens.ids.lengths
    return Totals(
        samples=len(samples),
        tokens=len(ids),
        largest_id=int(ids.max()) if len(ids) else -1,
        longest=int(lengths.max()),
        lengths=histogram(lengths),
        documents=0 if tokens.trained is None else len(tokens.responses),
    )


def _check_settings(shard: Shard, samples: Samples) -> None:
    """A shard says itself which columns it has, between its table of samples and the first of them."""
    head = samples.data[4 * (len(samples) + 2) : int(samples.offsets[0])]
    said = json.loads(head)
    for what in ("column_names", "column_encodings", "column_sizes"):
        if said[what] != getattr(shard, what):
            raise ValueError(
                f"its {what} are {said[what]}, and its index says {getattr(shard, what)}"
            )
