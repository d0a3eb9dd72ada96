"""What drawn samples come to, counted from their tokens: the totals of a mix are exact, whatever was drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.pairs import lacks_eos
from mdsmix.encode.targets import Lengths, Targets, Turns, count_losses
from mdsmix.shards.manifest import Encoding, Manifest, Totals, histogram
from mdsmix.shards.tokens import Tokens


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
    turns = Turns(tokens.prompts, tokens.responses, tokens.turns)
    return count_losses(targets, turns, lacks_eos(tokens.ids, eos))
