"""Prompts and responses, rendered by no template: the samples that Foundry's converter makes.

A batch is one call of the tokenizer, with all its prompts and responses in one list; what follows is arithmetic on lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.encoded import Encoded, Rejected
from mdsmix.encode.layouts import add_special_tokens
from mdsmix.encode.special import encode_texts
from mdsmix.encode.targets import Targets, Turns, label
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.finetuning import Finetuning
from mdsmix.kinds.kind import packed_columns
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Pair


class Pairs(Finetuning):
    name = "pairs"
    reads = Pair

    @classmethod
    def columns(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
        if stream.pack:
            return packed_columns(f"ndarray:{tokenizer.dtype}", has_targets=True)
        return dict.fromkeys(("input_ids", "labels"), f"ndarray:{tokenizer.dtype}")

    def encode(self, pairs: Sequence[Pair]) -> Encoded:
        """One row per pair that can be trained on."""
        texts = [text for pair in pairs for text in pair]
        ids, *found = encode_texts(
            self.backend, texts, self.encoding.special_tokens_in_text, self.tokenizer
        )
        marked, refused = (sorted({row // 2 for row in rows}) for rows in found)
        rejected = [Rejected(position, "special_token_in_text", False) for position in refused]
        keep = np.ones(len(pairs), bool)
        keep[refused] = False
        turns = Turns(self._with_own_tokens(ids), np.ones(len(pairs), np.int64)).take(keep)
        labels = label(self._policy, turns, self.tokenizer.eos_id)
        positions, whole = np.flatnonzero(keep).tolist(), turns.samples.lengths
        encoded, _ = self.samples(labels, positions, whole, rejected)
        return replace(encoded, specials=len(marked))

    @property
    def _policy(self) -> Targets:
        """The loader cuts a prompt to max_seq_len before it looks at its length, so that none has more."""
        is_reached = self.targets.least_trained_prompt <= self.targets.max_seq_len
        return self.targets if is_reached else replace(self.targets, target_prompts="none")

    def _with_own_tokens(self, ids: Ragged) -> Ragged:
        """Prompts and responses with what the tokenizer adds around a text; a BOS that begins both leaves the response."""
        known = self.tokenizer
        rows = add_special_tokens(ids, known.prefix_ids, known.suffix_ids, known.dtype)
        if known.bos_id is None:
            return rows
        both = _begins_with(rows, known.bos_id)
        both[1::2] &= both[0::2]
        both[0::2] = False
        return rows.cut(both.astype(np.int64), rows.lengths - both)


def _begins_with(rows: Ragged, token: int) -> NDArray[np.bool_]:
    """bool [n]: the rows whose first token is `token`; an empty row has none."""
    begins = rows.lengths > 0
    begins[begins] = rows.values[rows.offsets[:-1][begins]] == token
    return begins
