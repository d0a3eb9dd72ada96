"""Records of a prompt and a response -> token samples, the ones that Foundry's converter makes.

A batch is one call of the tokenizer, with all its prompts and responses in one list; what follows is arithmetic on lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoded, Rejected
from mdsmix.encode.documents import as_documents, side_by_side
from mdsmix.encode.pairs import cut, encode_pairs
from mdsmix.encode.pretraining import add_special_tokens
from mdsmix.encode.special import encode_texts
from mdsmix.encode.targets import (
    USABLE,
    Targets,
    Turns,
    filtered_by,
    judge,
    ways_out,
)
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.ragged import Ragged
from mdsmix.record import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResponse:
    """The encoder of records with a prompt and a response."""

    tokenizer: Tokenizer
    backend: Backend
    targets: Targets
    special_tokens_in_text: str
    is_packed: bool = False
    "Columns input_ids and loss_mask, as documents to be packed, instead of input_ids and labels."

    def encode(self, pairs: Sequence[Pair]) -> Encoded:
        """Columns `input_ids` and `labels`, one row per pair that can be trained on; packed, a document."""
        prompts, responses = ([pair[side] for pair in pairs] for side in (0, 1))
        contexts, targets, marked, refused = self._tokenize(prompts, responses)
        positions = np.delete(np.arange(len(pairs)), refused)
        rejected = [Rejected(position, "special_token_in_text", False) for position in refused]
        if refused:
            contexts, targets = contexts.take(positions), targets.take(positions)
        # The loader cuts either column to max_seq_len before it looks at the length of a prompt.
        longest = self.targets.max_seq_len
        cut_lengths = (np.minimum(rows.lengths, longest) for rows in (contexts, targets))
        verdicts = judge(self.targets, Turns.single(*cut_lengths))
        whole = Turns.single(contexts.lengths, targets.lengths)
        keep = verdicts == USABLE
        rejected += filtered_by(verdicts, positions.tolist())
        kept = contexts.take(keep), targets.take(keep)
        encoded = encode_pairs(*kept, self.targets, self.tokenizer, rejected, len(marked))
        if self.is_packed:
            encoded = self._packed(encoded)
        return replace(encoded, ways_out=ways_out(self.targets, whole, verdicts))

    def _packed(self, pairs: Encoded) -> Encoded:
        """The documents of pairs that were cut as they are stored."""
        contexts, targets = pairs.columns["input_ids"], pairs.columns["labels"]
        encoded = as_documents(
            side_by_side(contexts, targets),
            Turns.single(contexts.lengths, targets.lengths),
            self.targets,
            self.tokenizer,
            pairs.rejected,
            pairs.specials,
        )
        return replace(encoded, lost_tokens=encoded.lost_tokens + pairs.lost_tokens)

    def _tokenize(
        self, prompts: list[str], responses: list[str]
    ) -> tuple[Ragged, Ragged, list[int], list[int]]:
        """Both with what the tokenizer adds around a text (a BOS that begins both leaves the response), which pairs hold
        a special token, and which of these are refused."""
        n, rule = len(prompts), self.special_tokens_in_text
        ids, *found = encode_texts(self.backend, prompts + responses, rule, self.tokenizer)
        marked, refused = (sorted({row % n for row in rows}) for rows in found)
        head, tail = self.tokenizer.prefix_ids, self.tokenizer.suffix_ids
        bos, dtype = self.tokenizer.bos_id, self.tokenizer.dtype
        after_bos = head[1:] if bos is not None and head[:1] == [bos] else head
        contexts = add_special_tokens(ids.slice(0, n), head, tail, dtype)
        targets = add_special_tokens(ids.slice(n, 2 * n), after_bos, tail, dtype)
        if head or bos is None:
            return contexts, targets, marked, refused
        both = _begins_with(contexts, bos) & _begins_with(targets, bos)
        return (
            contexts,
            cut(targets, both.astype(np.int64), targets.lengths - both),
            marked,
            refused,
        )


def _begins_with(rows: Ragged, token: int) -> NDArray[np.bool_]:
    """bool [n]: the rows whose first token is `token`; an empty row has none."""
    begins = rows.lengths > 0
    begins[begins] = rows.values[rows.offsets[:-1][begins]] == token
    return begins
