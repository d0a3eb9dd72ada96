"""What drawn samples come to, counted from their tokens: the totals of a mix are exact, whatever was drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mdsmix.kinds import kind_of
from mdsmix.shards.manifest import Manifest, Totals, histogram
from mdsmix.shards.tokens import Tokens


def count(tokens: Tokens, copies: NDArray[np.int64], manifest: Manifest | None) -> Totals:
    """What the samples come to, each taken `copies` times; without a manifest no more than their number and tokens."""
    lengths, drawn = tokens.ids.lengths, copies > 0
    plain = Totals(samples=int(copies.sum()), tokens=int(lengths @ copies))
    if manifest is None or not drawn.any():
        return plain
    kind = kind_of(manifest.encoding)
    cut = kind.cut(tokens, manifest.encoding)
    return replace(
        plain,
        loss_tokens=int(kind.losses(tokens, manifest.encoding, manifest.tokenizer.eos_id) @ copies),
        largest_id=int(tokens.largest[drawn].max()),
        longest=int(lengths[drawn].max()),
        cut_rows=int((cut > 0) @ copies),
        cut_tokens=int(cut @ copies),
        lengths=histogram(np.repeat(lengths, copies)),
    )
