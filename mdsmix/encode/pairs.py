"""A context and a target per sample, as the two columns `input_ids` and `labels`.

A row is stored only as far as max_seq_len lets it train, since the rest of a huge record would cost bytes
in every run and train nothing. The collator makes the same sample of the shortened row, the end of
an encoder's context included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.base import Encoded, Rejected
from mdsmix.encode.targets import Lengths, Targets, Turns, count_losses
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.ragged import Ragged


def encode_pairs(
    contexts: Ragged,
    targets: Ragged,
    policy: Targets,
    tokenizer: Tokenizer,
    rejected: list[Rejected],
    specials: int,
) -> Encoded:
    """Samples from pairs of rows that can be trained on, none of them empty."""
    before = len(contexts.values) + len(targets.values)
    if policy.decoder_only_format:
        contexts, targets = _cut_together(contexts, targets, policy.max_seq_len)
    else:
        contexts = _cut_context(contexts, policy.max_seq_len, tokenizer.eos_id)
        targets = first_of(targets, policy.max_seq_len)
    turns = Turns.single(contexts.lengths, targets.lengths)
    tokens = len(contexts.values) + len(targets.values)
    return Encoded(
        columns={"input_ids": contexts, "labels": targets},
        tokens=tokens,
        loss_tokens=int(count_losses(policy, turns, lacks_eos(targets, tokenizer.eos_id)).sum()),
        lengths=contexts.lengths + targets.lengths,
        largest_id=largest_id(contexts, targets),
        rejected=rejected,
        specials=specials,
        lost_tokens=before - tokens,
    )


def cut(rows: Ragged, starts: Lengths, lengths: Lengths) -> Ragged:
    """Of each row `lengths[i]` values, from `starts[i]` on; the rows themselves where that is all."""
    if np.array_equal(lengths, rows.lengths):
        return rows
    shift = rows.offsets[:-1] + starts - (np.cumsum(lengths) - lengths)
    return Ragged.from_lengths(
        rows.values[np.arange(lengths.sum()) + np.repeat(shift, lengths)], lengths
    )


def first_of(rows: Ragged, most: int | Lengths) -> Ragged:
    """At most the first `most` values of each row."""
    return cut(rows, np.zeros(len(rows), np.int64), np.minimum(rows.lengths, most))


def largest_id(*columns: Ragged) -> int:
    """The largest token of all, -1 where there is none."""
    return max((int(rows.values.max()) for rows in columns if len(rows.values)), default=-1)


def lacks_eos(targets: Ragged, eos: int | None) -> NDArray[np.bool_]:
    """bool [n]: the rows (none empty) that Foundry's collator ends with the EOS that they lack."""
    if eos is None:
        return np.zeros(len(targets), bool)
    return np.asarray(targets.values[targets.offsets[1:] - 1] != eos)


def _cut_together(contexts: Ragged, targets: Ragged, longest: int) -> tuple[Ragged, Ragged]:
    """Both to max_seq_len tokens in all. One target token is always left, since the collator reads the last one."""
    contexts = first_of(contexts, longest)
    return contexts, first_of(targets, np.maximum(longest - contexts.lengths, 1))


def _cut_context(contexts: Ragged, longest: int, eos: int | None) -> Ragged:
    """To max_seq_len, with EOS in the last place, as the collator would end what it cuts itself."""
    cut_rows = contexts.lengths > longest
    contexts = first_of(contexts, longest)
    if eos is not None and cut_rows.any():
        contexts.values[contexts.offsets[1:][cut_rows] - 1] = eos
    return contexts
