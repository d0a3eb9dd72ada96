"""Which tokens of a conversation are trained: Foundry's target policies, worked out on lengths alone.

A conversation is laid end to end as prompt, response, prompt, response ... and a policy trains a
segment or does not. So whether anything is left to train on, and how many positions give a loss,
follow from the segments' lengths: one pass of numpy over a batch, never a loop over tokens. The
labels themselves are made by the collator at training time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.base import Rejected
from mdsmix.errors import RecipeError
from mdsmix.recipe.rules import target_contradictions

Lengths = NDArray[np.int64]

USABLE, EMPTY_PROMPT, EMPTY_RESPONSE, NO_LOSS_TOKENS, TOO_LONG = range(5)
VERDICTS = ("", "empty_prompt", "empty_response", "no_loss_tokens", "too_long")
"The reason code of each verdict of `judge`."

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What finetuning trains on, in the words of the recipe and of Foundry."""

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

    def __post_init__(self) -> None:
        if self.max_seq_len < 1:
            raise RecipeError(
                f"max_seq_len is {self.max_seq_len}, and a row needs at least one token: set it to the length that "
                "the model is trained at."
            )
        for sentence in target_contradictions(
            self.target_prompts, self.target_responses, self.decoder_only_format
        ):
            raise RecipeError(sentence)

    @property
    def last_response_only(self) -> bool:
        """True where the last response is all that is trained."""
        return self.target_prompts == "none" and self.target_responses == "last"

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
    """The lengths of a batch of conversations, each of at least one turn."""

    prompts: Lengths
    "int64 [turns]: tokens of each prompt."
    responses: Lengths
    "int64 [turns]: tokens of each response."
    offsets: Lengths
    "int64 [n + 1]: conversation i is the turns offsets[i] to offsets[i + 1]."

    @staticmethod
    def single(prompts: Lengths, responses: Lengths) -> Turns:
        """Conversations of one turn each."""
        return Turns(prompts, responses, np.arange(len(prompts) + 1))

    @staticmethod
    def interleaved(lengths: Lengths, counts: Lengths) -> Turns:
        """Conversations of `counts` turns, from the lengths of rows prompt, response, prompt, response ..."""
        return Turns(lengths[0::2], lengths[1::2], np.concatenate([[0], np.cumsum(counts)]))


def judge(targets: Targets, turns: Turns) -> NDArray[np.int64]:
    """int64 [n]: USABLE, or why a conversation cannot be trained on.

    The rule of Foundry's `is_valid_ift_example`: no prompt and no response is empty, and at least
    one trained token is left after the cut to max_seq_len, before any EOS is appended.
    Encoder-decoder rows cut context and target apart from each other, so that there a long prompt
    takes nothing from the response.
    """
    verdicts = np.full(len(turns.offsets) - 1, USABLE)
    if not len(verdicts):
        return verdicts
    if targets.decoder_only_format:
        starts, _, trained = _segments(targets, turns, turns.responses)
        first = _per_conversation(np.minimum, np.where(trained, starts, _NEVER), 2 * turns.offsets)
        verdicts[first >= targets.max_seq_len] = NO_LOSS_TOKENS
    if targets.too_long != "cut":
        verdicts[count_cut(targets, turns) > 0] = TOO_LONG
    verdicts[_per_conversation(np.minimum, turns.responses, turns.offsets) == 0] = EMPTY_RESPONSE
    verdicts[_per_conversation(np.minimum, turns.prompts, turns.offsets) == 0] = EMPTY_PROMPT
    return verdicts


def filtered_by(verdicts: NDArray[np.int64], positions: Sequence[int]) -> list[Rejected]:
    """The records none of whose rows can be trained on, each with the reason of its first row."""
    dropped = np.flatnonzero(verdicts != USABLE).tolist()
    if not dropped:
        return []
    written = {positions[i] for i in np.flatnonzero(verdicts == USABLE).tolist()}
    reasons = {positions[i]: VERDICTS[verdicts[i]] for i in reversed(dropped)}
    return [Rejected(at, why, True) for at, why in sorted(reasons.items()) if at not in written]


def ways_out(targets: Targets, turns: Turns, verdicts: NDArray[np.int64]) -> dict[str, int]:
    """Of the conversations that have nothing to train on: setting of the recipe -> how many it would keep."""
    if not (lost := verdicts == NO_LOSS_TOKENS).any():
        return {}
    changes: dict[str, dict[str, Any]] = {
        f"max_seq_len: {2 * targets.max_seq_len}": {"max_seq_len": 2 * targets.max_seq_len}
    }
    if targets.target_responses == "last":
        changes["target_responses: all"] = {"target_responses": "all"}
    kept = {
        said: int(np.sum(judge(replace(targets, **change), turns)[lost] == USABLE))
        for said, change in changes.items()
    }
    return {said: n for said, n in kept.items() if n}


def count_losses(
    targets: Targets,
    turns: Turns,
    gets_eos: NDArray[np.bool_],
    untrained: NDArray[np.bool_] | None = None,
) -> Lengths:
    """int64 [n]: the positions of each conversation that give a loss. `untrained`: which of all their tokens, one conversation
    behind the other, no policy trains.

    Counted as the model sees a row after Foundry's collator: with the EOS that it appends to a last
    response without one (`gets_eos`), cut to max_seq_len, and less the token at position 0, which
    nothing predicts. An encoder-decoder's target is not shifted, so that all of it counts.
    """
    if not len(gets_eos):
        return np.zeros(0, np.int64)
    last = turns.offsets[1:] - 1
    responses = turns.responses.copy()
    responses[last] += gets_eos
    if not targets.decoder_only_format:
        return np.asarray(np.minimum(responses[last], targets.max_seq_len))
    starts, ends, trained = _segments(targets, turns, responses)
    starts, ends = (np.clip(at, 1, targets.max_seq_len) for at in (starts, ends))
    kept = ends - starts
    if untrained is not None and untrained.any():
        kept -= _within(turns, starts, ends, untrained)
    return _per_conversation(np.add, kept * trained, 2 * turns.offsets)


def _within(
    turns: Turns, starts: Lengths, ends: Lengths, marked: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """int64 [2 * turns]: how many marked tokens stand between two places of each prompt's and response's conversation, behind
    which an EOS may stand that is among no tokens yet."""
    before = np.concatenate([[0], np.cumsum(marked)])
    tokens = np.concatenate([[0], np.cumsum(turns.prompts + turns.responses)])[turns.offsets]
    begins, ends_at = (
        np.repeat(at, 2 * np.diff(turns.offsets)) for at in (tokens[:-1], tokens[1:])
    )
    first, last = (before[np.minimum(begins + at, ends_at)] for at in (starts, ends))
    return np.asarray(last - first)


def count_cut(targets: Targets, turns: Turns) -> Lengths:
    """int64 [n]: the tokens of each conversation that Foundry's collator cuts off, because they are beyond max_seq_len; an
    encoder-decoder's context and target are each cut to max_seq_len."""
    lasts = turns.offsets[1:] - 1
    whole = (
        _per_conversation(np.add, turns.prompts + turns.responses, turns.offsets)
        if len(lasts)
        else lasts
    )
    if targets.decoder_only_format:
        return np.maximum(whole - targets.max_seq_len, 0)
    target = turns.responses[lasts]
    beyond = (np.maximum(part - targets.max_seq_len, 0) for part in (whole - target, target))
    return np.asarray(sum(beyond))


def _segments(
    targets: Targets, turns: Turns, responses: Lengths
) -> tuple[Lengths, Lengths, NDArray[np.bool_]]:
    """Start and end of every prompt and response (interleaved) in its conversation, and whether it is trained."""
    lengths = np.stack([turns.prompts, responses], axis=1).ravel()
    ends = np.cumsum(lengths)
    bases = (ends - lengths)[2 * turns.offsets[:-1]]
    ends -= np.repeat(bases, 2 * np.diff(turns.offsets))
    return ends - lengths, ends, trained_segments(targets, turns)


def trained_segments(targets: Targets, turns: Turns) -> NDArray[np.bool_]:
    """bool [2 * turns]: whether each prompt and each response (interleaved) is trained."""
    trained = np.zeros((len(turns.responses), 2), bool)
    trained[:, 0] = turns.prompts >= targets.least_trained_prompt
    trained[:, 1] = targets.target_responses == "all"
    trained[turns.offsets[1:] - 1, 1] = True
    return trained.ravel()


def _per_conversation(reduce: np.ufunc, values: NDArray[Any], offsets: Lengths) -> NDArray[Any]:
    return np.asarray(reduce.reduceat(values, offsets[:-1]))
