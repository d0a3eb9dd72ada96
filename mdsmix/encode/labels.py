"""The trained tokens of samples: Foundry's target policies as a flag for each prompt and response
of a batch.

A sample is laid end to end as prompt, response, prompt, response ..., and a policy trains a prompt
or response as a whole or not at all. Whether a token is left to train, how many positions give a
loss, and how many tokens a loader cuts off are sums over prompts and responses. The collator makes
the labels themselves at training time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged

Lengths = NDArray[np.int64]
Flags = NDArray[np.bool_]

USABLE = ""
"The verdict on a sample that can be trained on; any other verdict is a reason code."
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The target policies of finetuning, by the names of the recipe and of Foundry.
    `mdsmix.recipe.rules` has checked the values.
    """

    max_seq_len: int
    "Tokens of a row; the collator cuts off tokens beyond."
    target_prompts: str = "none"
    "none | all | length>=N: the prompts that are trained, N in tokens."
    target_responses: str = "last"
    "last | all: the responses that are trained."
    decoder_only_format: bool = True
    "False: encoder-decoder, where the last response is the target and all before it the context."
    too_long: str = "cut"
    """A row of more than max_seq_len tokens: cut (by the loader) | filter (dropped) | first_turns
    (the turns that fit are kept).
    """

    @property
    def least_trained_prompt(self) -> int:
        """The least number of tokens of a prompt that is trained."""
        if self.target_prompts.startswith("length>="):
            return int(self.target_prompts[8:])
        return 0 if self.target_prompts == "all" else _NEVER

    def trains_prompt(self, tokens: int) -> bool:
        return tokens >= self.least_trained_prompt

    def trains_response(self, is_last: bool) -> bool:
        return is_last or self.target_responses == "all"


@dataclass(frozen=True, slots=True)
class Turns:
    """A batch of samples, each of one turn or more."""

    ids: Ragged
    "One row of token ids per prompt and response: prompt, response, prompt, response ..."
    counts: Lengths
    "int64 [n]: how many turns each sample has."

    @property
    def firsts(self) -> Lengths:
        """int64 [n + 1]: the first prompt of sample i is row firsts[i] of `ids`."""
        return 2 * np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def samples(self) -> Ragged:
        """The tokens of each sample, its turns end to end."""
        return Ragged(self.ids.values, self.ids.offsets[self.firsts])

    def sums(self, values: NDArray[Any]) -> Lengths:
        """int64 [n]: the sum over each sample of `values`, which has a number or flag for each
        prompt and response.
        """
        return np.diff(np.concatenate([[0], np.cumsum(values)])[self.firsts])

    def places(self, token: int) -> Lengths:
        """The positions in `ids.values` of a token."""
        return np.flatnonzero(self.ids.values == token)

    def count(self, token: int) -> Lengths:
        """int64 [n]: how often each sample holds a token."""
        return np.diff(np.searchsorted(self.places(token), self.samples.offsets))

    def take(self, keep: Flags) -> Turns:
        """The samples whose flag in `keep` (bool [n]) is set."""
        return Turns(self.ids.take(np.repeat(keep, 2 * self.counts)), self.counts[keep])


class Labels:
    """The tokens that a loader trains of a batch of samples."""

    def __init__(
        self, targets: Targets, turns: Turns, eos: int | None, never: int | None = None
    ) -> None:
        """`eos`: the tokenizer's EOS; `never`: a token that no policy trains, such as the image
        token.
        """
        self.targets, self.turns, self.never = targets, turns, never
        lengths = turns.ids.lengths
        self._sides: Flags = np.full(len(lengths), targets.target_responses == "all")
        "bool: whether each prompt and response is trained."
        self._sides[0::2] = lengths[0::2] >= targets.least_trained_prompt
        self._sides[turns.firsts[1:] - 1] = True
        self.gets_eos = _lacks_eos(turns.ids.values, turns.samples.offsets[1:], eos)
        "bool [n]: samples that lack a final EOS. Foundry's collator appends it, and it is trained."

    @property
    def trained(self) -> Flags:
        """bool [tokens]: whether a token is trained; the samples' tokens end to end."""
        trained = np.repeat(self._sides, self.turns.ids.lengths)
        return trained if self.never is None else trained & (self.turns.ids.values != self.never)

    def losses(self) -> Lengths:
        """int64 [n]: how many positions of each sample give a loss. The EOS that the collator
        appends counts. Tokens beyond max_seq_len and the token at position 0, which nothing
        predicts, do not. All tokens of an encoder-decoder's target count: it is not shifted.
        """
        longest = self.targets.max_seq_len
        if not self.targets.decoder_only_format:
            return np.asarray(np.minimum(self._last_responses + self.gets_eos, longest))
        return np.asarray(self._trained_from(1) + self.appended())

    def appended(self) -> Flags:
        """Return bool [n]: to which samples the collator appends an EOS that stays. An
        encoder-decoder's target gets it.
        """
        is_whole = self.targets.decoder_only_format
        lengths = self.turns.samples.lengths if is_whole else self._last_responses
        return np.asarray(self.gets_eos & (lengths < self.targets.max_seq_len))

    def cut(self) -> Lengths:
        """int64 [n]: how many tokens of each sample the collator cuts off. An encoder-decoder's
        context and target are cut separately.
        """
        whole = self.turns.samples.lengths
        last = 0 if self.targets.decoder_only_format else self._last_responses
        beyond = (np.maximum(part - self.targets.max_seq_len, 0) for part in (whole - last, last))
        return np.asarray(sum(beyond))

    def verdicts(self, grown: Lengths | None = None) -> NDArray[np.object_]:
        """object [n]: USABLE, or the reason code of a sample that cannot be trained on.

        The rule of Foundry's `is_valid_ift_example`: no prompt and no response is empty, and at
        least one trained token is left after the cut to max_seq_len, before any EOS is appended.
        The EOS counts for `too_long`. Images are never cut, so a sample whose images do not fit is
        refused. `grown`: int64, the length of each prompt and response with its images as the
        processor's tokens.
        """
        turns, longest = self.turns, self.targets.max_seq_len
        found = np.full(len(turns.counts), USABLE, object)
        if grown is not None and self.never is not None:
            found[(turns.sums(grown) > longest) & (turns.count(self.never) > 0)] = "images_too_long"
        if self.targets.decoder_only_format:
            found[self._trained_from(0) == 0] = "no_loss_tokens"
        if self.targets.too_long != "cut":
            found[turns.samples.lengths + self.gets_eos > longest] = "too_long"
        owner = np.repeat(np.arange(len(found)), turns.counts)
        for side, verdict in ((1, "empty_response"), (0, "empty_prompt")):
            found[owner[turns.ids.lengths[side::2] == 0]] = verdict
        return found

    @property
    def _last_responses(self) -> Lengths:
        return np.asarray(self.turns.ids.lengths[self.turns.firsts[1:] - 1])

    def _trained_from(self, first: int) -> Lengths:
        """int64 [n]: how many tokens of each sample are trained at its positions from `first` up
        to, not including, max_seq_len. They are counted by prompts and responses: by tokens it took
        a twentieth of a conversion of pairs.
        """
        turns, edges, longest = self.turns, self.turns.ids.offsets, self.targets.max_seq_len
        begins = np.repeat(turns.samples.offsets[:-1], 2 * turns.counts)
        inside = np.diff(
            np.clip([edges[:-1] - begins, edges[1:] - begins], first, longest), axis=0
        )[0]
        if self.never is not None:
            places = turns.places(self.never)
            sides = np.searchsorted(edges, places, "right") - 1
            at = places - begins[sides]
            is_inside = (at >= first) & (at < longest)
            inside -= np.bincount(sides[is_inside], minlength=len(inside))
        return turns.sums(inside * self._sides)


def _lacks_eos(values: NDArray[Any], ends: Lengths, eos: int | None) -> Flags:
    """bool [n]: which rows do not end in EOS; none where the tokenizer has no EOS. `ends`: where
    each row ends in `values`, exclusive.
    """
    if eos is None or not len(values):
        return np.zeros(len(ends), bool)
    return np.asarray(values[ends - 1] != eos)


def move_stop_tokens(
    turns: Turns, stops: Sequence[int], leads: Sequence[Sequence[int]] = ()
) -> Turns:
    """Return the turns with the stop token that a prompt begins with as the end of the response
    before, if that does not end in one.

    Where the next role's token ends an answer, that token is what the model must write. The tokens
    of a sample stay as they are; the last response has no prompt behind it. A prompt of no other
    tokens and a response without tokens stay too.

    Args:
        stops: the ids at which the model stops to generate.
        leads: the ids of white space that a template may print before the stop token, and that the
            model must write too.
    """
    ids, lengths = turns.ids, turns.ids.lengths
    is_later = np.zeros(len(ids), bool)
    is_later[0::2] = True
    is_later[turns.firsts[:-1]] = False
    offsets = ids.offsets.copy()
    for lead in ((), *leads):
        later = np.flatnonzero(is_later)
        later = later[(lengths[later] > len(lead) + 1) & (lengths[later - 1] > 0)]
        begins = ids.offsets[later]
        is_moved = np.isin(ids.values[begins + len(lead)], stops)
        is_moved &= ~np.isin(ids.values[begins - 1], stops)
        for place, id in enumerate(lead):
            is_moved &= ids.values[begins + place] == id
        offsets[later[is_moved]] += len(lead) + 1
        is_later[later[is_moved]] = False
    return Turns(Ragged(ids.values, offsets), turns.counts)


def keep_first_turns(turns: Turns, longest: int, eos: int | None, lengths: Lengths | None) -> Turns:
    """Samples cut to the turns that end within `longest` tokens, the loader's EOS included. The
    first turn always stays. `lengths`: int64, of each prompt and response with its images as the
    processor's tokens; None: as stored.
    """
    ids, starts = turns.ids, turns.firsts[:-1] // 2
    ends = np.cumsum(ids.lengths if lengths is None else lengths)[1::2]
    before = np.concatenate([[0], ends])[starts]
    whole = ends - np.repeat(before, turns.counts) + _lacks_eos(ids.values, ids.offsets[2::2], eos)
    kept = np.repeat(whole <= longest, 2)
    kept[2 * starts] = kept[2 * starts + 1] = True
    return Turns(ids.take(kept), turns.sums(kept) // 2)
