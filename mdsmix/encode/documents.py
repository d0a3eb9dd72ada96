"""Pairs and conversations -> documents to be packed: token ids, and which of them are trained.

What LLM-Foundry's collator does with each sample of a batch is done here once, when converting: turns end to end, the EOS that a last
response lacks, the target policies, the cut at max_seq_len. A row that holds several samples can state none of it any more: the
collator would end and cut the row. `tests/foundry/test_packed.py` holds both against each other.
"""

from __future__ import annotations

import numpy as np

from mdsmix.encode.base import Encoded, Rejected
from mdsmix.encode.pairs import first_of, lacks_eos, largest_id
from mdsmix.encode.targets import Targets, Turns, count_cut, trained_segments
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.ragged import Ragged


def as_documents(
    segments: Ragged,
    turns: Turns,
    targets: Targets,
    tokenizer: Tokenizer,
    rejected: list[Rejected],
    specials: int,
) -> Encoded:
    """Columns `input_ids` (of the tokenizer's dtype) and `loss_mask` (uint8, 1 where a token is trained), a row a sample.

    `segments`: prompt, response, prompt, response ... of samples that can be trained on, which `turns` counts.
    """
    eos, whole = tokenizer.eos_id, Ragged(segments.values, segments.offsets[2 * turns.offsets])
    gets_eos = lacks_eos(whole, eos)
    ids = np.insert(whole.values, whole.offsets[1:][gets_eos], eos or 0).astype(tokenizer.dtype)
    lengths = segments.lengths
    lengths[2 * turns.offsets[1:] - 1] += gets_eos
    mask = np.repeat(trained_segments(targets, turns).view(np.uint8), lengths)
    documents, trained = (
        first_of(Ragged.from_lengths(values, whole.lengths + gets_eos), targets.max_seq_len)
        for values in (ids, mask)
    )
    trained.values[trained.offsets[:-1]] = 0  # nothing stands before it that could predict it
    return Encoded(
        columns={"input_ids": documents, "loss_mask": trained},
        tokens=len(documents.values),
        loss_tokens=int(trained.values.sum()),
        lengths=documents.lengths,
        largest_id=largest_id(documents),
        rejected=rejected,
        specials=specials,
        lost_tokens=int(count_cut(targets, turns).sum()),
    )


def side_by_side(contexts: Ragged, targets: Ragged) -> Ragged:
    """Context, target, context, target ...: slices of bytes joined, which costs 0.3 us a row and a copy."""
    lengths = np.stack([contexts.lengths, targets.lengths], axis=1).reshape(-1)
    pieces = list[memoryview]()
    sides = [
        (memoryview(side.values).cast("B"), (side.offsets * side.values.itemsize).tolist())
        for side in (contexts, targets)
    ]
    for row in range(len(contexts)):
        pieces += [data[bounds[row] : bounds[row + 1]] for data, bounds in sides]
    return Ragged.from_lengths(np.frombuffer(b"".join(pieces), contexts.values.dtype), lengths)
