"""Conversations longer than max_seq_len: what the recipe's `too_long` makes of them, and what each of its values would keep.

LLM-Foundry's loader cuts a row where max_seq_len ends, in the middle of an answer too, and what has nothing trained left is
dropped before. `filter` leaves such a conversation out; `first_turns` ends it after the last answer that fits whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.pairs import lacks_eos
from mdsmix.encode.targets import USABLE, Targets, Turns, count_cut, count_losses, judge
from mdsmix.ragged import Ragged

Counts = NDArray[np.int64]
"int64 [n]: the turns of each conversation, of rows prompt, response, prompt, response ..."


def row_lengths(ids: Ragged, counts: Counts) -> NDArray[np.int64]:
    """int64 [n]: the tokens of each conversation."""
    return np.diff(ids.offsets[2 * np.concatenate([[0], np.cumsum(counts)])])


def first_turns(
    ids: Ragged, counts: Counts, longest: int, lengths: NDArray[np.int64] | None = None
) -> tuple[Ragged, Counts]:
    """Of each conversation the turns that end within `longest` tokens; the first turn where none does. `lengths`: of prompts and
    responses, where they are others than those of `ids`."""
    turns = Turns.interleaved(ids.lengths if lengths is None else lengths, counts)
    ends = np.cumsum(turns.prompts + turns.responses)
    before = np.concatenate([[0], ends])[turns.offsets[:-1]]
    first = np.zeros(len(ends), bool)
    first[turns.offsets[:-1]] = True
    kept = first | (ends - np.repeat(before, counts) <= longest)
    return ids.take(np.repeat(kept, 2)), np.add.reduceat(kept, turns.offsets[:-1], dtype=np.int64)


def kept_by(
    ids: Ragged, counts: Counts, targets: Targets, eos: int | None, image: int | None = None
) -> Mapping[str, int]:
    """Of the conversations that are too long: how many there are, how many `cut` and `first_turns` keep, and with how many
    tokens that give a loss; empty where there is none. `image`: the token that stands for one, which gives none."""
    if not targets.decoder_only_format or not len(counts):
        return {}
    turns = Turns.interleaved(ids.lengths, counts)
    is_long = count_cut(targets, turns) > 0
    if not is_long.any():
        return {}
    ids, counts = ids.take(np.repeat(is_long, 2 * counts)), counts[is_long]
    cut, cut_tokens = _kept(ids, counts, replace(targets, too_long="cut"), eos, image)
    shortened = first_turns(ids, counts, targets.max_seq_len)
    first, first_tokens = _kept(*shortened, replace(targets, too_long="filter"), eos, image)
    return {
        "conversations": len(counts),
        "cut": cut,
        "cut_tokens": cut_tokens,
        "first_turns": first,
        "first_turns_tokens": first_tokens,
    }


def _kept(
    ids: Ragged, counts: Counts, targets: Targets, eos: int | None, image: int | None
) -> tuple[int, int]:
    """The conversations that can be trained on, and the tokens of them that give a loss."""
    keep = judge(targets, Turns.interleaved(ids.lengths, counts)) == USABLE
    ids, counts = ids.take(np.repeat(keep, 2 * counts)), counts[keep]
    turns = Turns.interleaved(ids.lengths, counts)
    whole = Ragged(ids.values, ids.offsets[2 * turns.offsets])
    untrained = None if image is None else ids.values == image
    return len(counts), int(count_losses(targets, turns, lacks_eos(whole, eos), untrained).sum())
