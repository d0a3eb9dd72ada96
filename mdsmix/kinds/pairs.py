"""Prompts and responses, rendered by no template: the samples that Foundry's converter makes.

A batch is one call of the tokenizer, with all its prompts and responses in one list; what follows is arithmetic on lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from mdsmix.encode.encoded import Encoded, Rejected
from mdsmix.encode.labels import Targets, Turns
from mdsmix.encode.layouts import add_special_tokens
from mdsmix.encode.special import encode_texts
from mdsmix.kinds.finetuning import Finetuning, TurnRows, placeholders_in
from mdsmix.ragged import Ragged
from mdsmix.record import Pair


class Pairs(Finetuning):
    name = "pairs"
    reads = Pair

    @cached_property
    def targets(self) -> Targets:
        """The loader cuts a prompt to max_seq_len before it looks at its length, so that none has more."""
        targets = super().targets
        is_reached = targets.least_trained_prompt <= targets.max_seq_len
        return targets if is_reached else replace(targets, target_prompts="none")

    def encode(self, pairs: Sequence[Pair]) -> Encoded:
        """One row per pair that can be trained on."""
        rule = self.encoding.special_tokens_in_text
        texts = [text for pair in pairs for text in pair]
        ids, *found = encode_texts(self.backend, texts, rule, self.tokenizer)
        marked, refused = ({row // 2 for row in rows} for rows in found)
        rejected = [Rejected(at, "special_token_in_text", False) for at in sorted(refused)]
        keep = np.ones(len(pairs), bool)
        keep[list(refused)] = False
        turns = Turns(self._with_own_tokens(ids), np.ones(len(pairs), np.int64)).take(keep)
        said = {"placeholders": placeholders_in(["\n".join(pair) for pair in pairs])}
        rows = TurnRows(turns, np.flatnonzero(keep).tolist(), rejected, len(marked), said)
        return self.samples(rows)

    def _with_own_tokens(self, ids: Ragged) -> Ragged:
        """Prompts and responses with what the tokenizer adds around a text; a BOS that begins both leaves the response."""
        known = self.tokenizer
        rows = add_special_tokens(ids, known.prefix_ids, known.suffix_ids, known.dtype)
        begins = rows.lengths > 0
        begins[begins] = rows.values[rows.offsets[:-1][begins]] == known.bos_id
        begins[1::2] &= begins[0::2]
        begins[0::2] = False
        return rows.cut(begins.astype(np.int64), rows.lengths - begins)
