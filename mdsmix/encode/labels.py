"""Which tokens of a sample are trained: Foundry's target policies as one mask over a batch.

A sample is laid end to end as prompt, response, prompt, response ..., and a policy trains a whole prompt or response or does not.
That is decided once; whether anything is left to train, how many positions give a loss and what a loader cuts off are sums over the
mask. The labels themselves are made by the collator at training time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged

Lengths = NDArray[np.int64]
Flags = NDArray[np.bool_]

USABLE = ""
"The verdict on a sample that can be trained on; any other is a reason code."
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What finetuning trains on, in the words of the recipe and of Foundry, which `mdsmix.recipe.rules` has looked at."""

    max_seq_len: int
    "Tokens of a row; what is beyond is cut off by the collator."
    target_prompts: str = "none"
    "none | all | length>=N: the prompts that are trained, N in tokens."
    target_responses: str = "last"
    "last | all: the responses that are trained."
    decoder_only_format: bool = True
    "False: encoder-decoder, where the last response is the target and all before it the context."
    too_long: str = "cut"
    "cut | filter | first_turns: what becomes of a row of more than max_seq_len tokens; the last two leave none of them."

    @property
    def least_trained_prompt(self) -> int:
        """The number of tokens from which on a prompt is trained."""
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
    "The tokens of each prompt and response: prompt, response, prompt, response ..."
    counts: Lengths
    "int64 [n]: the turns of each sample."

    @property
    def firsts(self) -> Lengths:
        """int64 [n + 1]: the first prompt of sample i is row firsts[i] of `ids`."""
        return 2 * np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def samples(self) -> Ragged:
        """The tokens of each sample, its turns end to end."""
        return Ragged(self.ids.values, self.ids.offsets[self.firsts])

    def sums(self, values: NDArray[Any]) -> Lengths:
        """int64 [n]: the sum over each sample of one number (or flag) a prompt and response."""
        return np.diff(np.concatenate([[0], np.cumsum(values)])[self.firsts])

    def places(self, token: int) -> Lengths:
        """Where a token stands in `ids.values`."""
        return np.flatnonzero(self.ids.values == token)

    def count(self, token: int) -> Lengths:
        """int64 [n]: how often each sample holds a token."""
        return np.diff(np.searchsorted(self.places(token), self.samples.offsets))

    def take(self, keep: Flags) -> Turns:
        """The samples of a bool mask."""
        return Turns(self.ids.take(np.repeat(keep, 2 * self.counts)), self.counts[keep])


@dataclass(frozen=True, slots=True)
class Labels:
    """What a loader trains of a batch of samples."""

    targets: Targets
    turns: Turns
    trained: Flags
    "bool [tokens]: one sample behind the other."
    before: Lengths
    "int64 [tokens + 1]: how many tokens before each are trained."
    never: int | None
    "A token that no policy trains, such as the one that stands for an image."
    gets_eos: Flags
    "bool [n]: the samples that Foundry's collator ends with the EOS that they lack. That EOS is trained."

    def losses(self) -> Lengths:
        """int64 [n]: the positions that give a loss: with the EOS that the collator appends, cut to max_seq_len, and without the
        token at position 0, which nothing predicts. An encoder-decoder's target is not shifted, so that all of it counts."""
        longest = self.targets.max_seq_len
        if not self.targets.decoder_only_format:
            return np.asarray(np.minimum(self._last_responses + self.gets_eos, longest))
        has_room = self.turns.samples.lengths < longest
        return np.asarray(self._trained_between(1, longest) + (self.gets_eos & has_room))

    def cut(self) -> Lengths:
        """int64 [n]: the tokens beyond max_seq_len, which the collator cuts off; an encoder-decoder's context and target are cut apart."""
        whole = self.turns.samples.lengths
        last = 0 if self.targets.decoder_only_format else self._last_responses
        beyond = (np.maximum(part - self.targets.max_seq_len, 0) for part in (whole - last, last))
        return np.asarray(sum(beyond))

    def verdicts(self, grown: Lengths | None = None) -> NDArray[np.object_]:
        """object [n]: USABLE, or why a sample cannot be trained on.

        The rule of Foundry's `is_valid_ift_example`: no prompt and no response is empty, and at least one trained token is left
        after the cut to max_seq_len, before any EOS is appended. A sample is too long with the EOS that it gets. No image is ever cut:
        `grown` is the length of each prompt and response when its images have become as many tokens as a processor makes of them.
        """
        turns, longest = self.turns, self.targets.max_seq_len
        found = np.full(len(turns.counts), USABLE, object)
        if grown is not None and self.never is not None:
            found[(turns.sums(grown) > longest) & (turns.count(self.never) > 0)] = "images_too_long"
        if self.targets.decoder_only_format:
            found[self._trained_between(0, longest) == 0] = "no_loss_tokens"
        if self.targets.too_long != "cut":
            found[turns.samples.lengths + self.gets_eos > longest] = "too_long"
        owner = np.repeat(np.arange(len(found)), turns.counts)
        for side, verdict in ((1, "empty_response"), (0, "empty_prompt")):
            found[owner[turns.ids.lengths[side::2] == 0]] = verdict
        return found

    @property
    def _last_responses(self) -> Lengths:
        return np.asarray(self.turns.ids.lengths[self.turns.firsts[1:] - 1])

    def _trained_between(self, first: int, last: int) -> Lengths:
        """int64 [n]: the trained tokens of each sample at its positions from `first` to `last`, exclusive."""
        starts, ends = self.turns.samples.offsets[:-1], self.turns.samples.offsets[1:]
        upto, from_ = (self.before[np.minimum(starts + at, ends)] for at in (last, first))
        return np.asarray(upto - from_)


def label(targets: Targets, turns: Turns, eos: int | None, never: int | None = None) -> Labels:
    """The labels of a batch. `never`: a token that no policy trains."""
    lengths = turns.ids.lengths
    segments = np.full(len(lengths), targets.target_responses == "all")
    segments[0::2] = lengths[0::2] >= targets.least_trained_prompt
    segments[turns.firsts[1:] - 1] = True
    trained = np.repeat(segments, lengths)
    if never is not None:
        trained &= turns.ids.values != never
    before = np.zeros(len(trained) + 1, np.int64)
    np.cumsum(trained, out=before[1:])
    gets_eos = _lacks_eos(turns.ids.values, turns.samples.offsets[1:], eos)
    return Labels(targets, turns, trained, before, never, gets_eos)


def _lacks_eos(values: NDArray[Any], ends: Lengths, eos: int | None) -> Flags:
    """bool [n]: which of the rows that end there in `values` do not end in EOS; none where the tokenizer has no EOS."""
    if eos is None or not len(values):
        return np.zeros(len(ends), bool)
    return np.asarray(values[ends - 1] != eos)


def first_turns(
    turns: Turns, longest: int, eos: int | None, lengths: Lengths | None = None
) -> Turns:
    """Of each sample the turns that end within `longest` tokens, with the EOS that the loader appends; the first turn where none
    does. `lengths`: of prompts and responses, where images will have become more tokens."""
    ids, starts = turns.ids, turns.firsts[:-1] // 2
    ends = np.cumsum(ids.lengths if lengths is None else lengths)[1::2]
    before = np.concatenate([[0], ends])[starts]
    whole = ends - np.repeat(before, turns.counts) + _lacks_eos(ids.values, ids.offsets[2::2], eos)
    kept = np.repeat(whole <= longest, 2)
    kept[2 * starts] = kept[2 * starts + 1] = True
    return Turns(ids.take(kept), turns.sums(kept) // 2)
