"""Splits answers into tokens that are trained and tokens that are not.

LLM-Foundry trains a response as a whole or not at all. So an answer that is only partly trained
becomes several turns: its untrained tokens go to a prompt, its trained tokens to a response. The
tokens of the row stay the same: an answer is tokenized as a whole, and cut between tokens.

1. `mark_tokens` gives each token of a response a mark, by ranges of characters. The characters of
   tokens are only found for responses with several ranges (`token_spelling.py`).
2. `split_answers` makes turns of the marked tokens. It does so after whole turns were left out and
   after stop tokens were moved to the ends of answers (`labels.py`), since both need whole answers.

Packed rows are not split: they store a flag for each token, which `Labels` reads from the marks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mdsmix.encode.answer_parts import PARTS
from mdsmix.encode.answer_spans import WeightedRange
from mdsmix.encode.backends import Backend
from mdsmix.encode.labels import USABLE, Flags, Lengths, Turns, find_empty_sides, sum_between
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.ragged import Ragged

MARK = [("part", "u1"), ("weight", "<f4")]
"""The dtype of the mark of a token. `part`: the part of the answer that the token belongs to, its
place in PARTS from 1, or 0 for a token of a prompt; `weight`: 0 if the token is not trained,
otherwise its loss weight, usually 1.
"""
SPLIT_REASONS = {
    "ends_untrained": (
        "The last answer of a row has a part that is trained, and after it a part that is not. The "
        "loader would append EOS to the trained part and train it, so the model would learn to "
        "stop too early."
    ),
    "split_answer": (
        "Several pieces of the last answer are trained, with a piece between them that is not. "
        "target_responses: last trains only the last of these pieces."
    ),
}
"Reason codes of records whose answers cannot be split -> their explanations."


class MarkedRange(NamedTuple):
    """A range of characters of a response whose tokens get the same mark."""

    start: int
    stop: int
    "The position after the last character."
    part_number: int
    "The part of the answer that these characters belong to: its place in PARTS, from 1."
    weight: float
    "0 if the characters are not trained, otherwise their loss weight, usually 1."


def mark_weights(turns: Turns, weights: NDArray[np.float32] | float = 1.0) -> Turns:
    """Return the turns with these weights in the marks of their tokens (MARK). The marks' parts are
    0, as if no token belonged to a part of an answer.

    Args:
        turns: the samples.
        weights: float32 [tokens], or one weight for all tokens.
    """
    marks = np.zeros(len(turns.ids.values), MARK)
    marks["weight"] = weights
    return replace(turns, marks=marks)


def multiply_weights(
    ranges: Sequence[MarkedRange], weighed: Sequence[WeightedRange]
) -> list[MarkedRange]:
    """Return the ranges of a response, cut at the ends of the other ranges, with the product of
    both weights. Both lists cover the response, in order and without gaps.
    """
    cut = list[MarkedRange]()
    remaining = iter(weighed)
    factor = next(remaining, None)
    for marked in ranges:
        while factor and factor.start < marked.stop:
            start = max(marked.start, factor.start)
            stop = min(marked.stop, factor.stop)
            weight = marked.weight * factor.weight
            cut.append(MarkedRange(start, stop, marked.part_number, weight))
            if factor.stop > marked.stop:
                break
            factor = next(remaining, None)
    return cut


def mark_tokens(
    turns: Turns,
    responses: Sequence[str],
    ranges: Sequence[Sequence[MarkedRange]],
    backend: Backend,
) -> Turns:
    """Return the turns with a mark for each token of a response.

    A token with characters of several ranges is trained if one of its characters is, but white
    space does not count if the token has anything else: the space of " It" does not decide on this
    token. axolotl's `train_detail` trains the same tokens; TRL's masks of assistants, which begin
    and end next to control tokens, widen a range to whole tokens too.

    Raises Unequal if the reference gives other ids for a response than the backend.

    Args:
        turns: the tokenized samples, without marks.
        responses: the text of each response, in the order of the turns.
        ranges: for each response its ranges. They cover it from its first to its last character, in
            order and without gaps.
        backend: the backend that has made the ids.
    """
    ids = turns.ids
    # Mark each response as its first range; an empty response has none.
    first_marks = [
        (of_one[0].part_number, of_one[0].weight) if of_one else (0, 0.0) for of_one in ranges
    ]
    marks_of_sides = np.zeros(len(ids), MARK)
    marks_of_sides[1::2] = first_marks
    marked = Turns(ids, turns.counts, np.repeat(marks_of_sides, ids.lengths))
    # Responses with further ranges are marked token by token.
    divided = [number for number, of_one in enumerate(ranges) if len(of_one) > 1]
    if divided:
        _mark_divided(marked, divided, responses, ranges, backend)
    _extend_to_prompts(marked)
    return marked


def _mark_divided(
    turns: Turns,
    divided: Sequence[int],
    responses: Sequence[str],
    ranges: Sequence[Sequence[MarkedRange]],
    backend: Backend,
) -> None:
    """Write the marks of responses with several ranges. These responses are joined to one text, and
    their ranges to one list, so that one search finds the ranges of all tokens: searching in each
    response took a seventh of a conversion of records with `train_detail`.

    The responses "ab cd" and "ef", with ranges that end at 2 and 5, and at 1 and 2, give the text
    "ab cdef" and ranges that end at 2, 5, 6 and 7.

    Args:
        turns: the samples. Their marks are changed in place.
        divided: the numbers of these responses, ascending.
        responses: the text of each response.
        ranges: the ranges of each response.
        backend: the backend that has made the ids.
    """
    assert turns.marks is not None
    is_divided = np.zeros(len(turns.ids), bool)
    is_divided[2 * np.array(divided) + 1] = True
    ids = turns.ids.take(is_divided)

    # Join the responses. `bases`: where each of them begins in the text.
    texts = [responses[number] for number in divided]
    text = "".join(texts)
    bases = np.cumsum([0, *map(len, texts)])[:-1]

    # Find the characters of each token.
    located = backend.locate(texts, ids)
    starts = located.starts + np.repeat(bases, ids.lengths)
    ends = located.ends + np.repeat(bases, ids.lengths)

    # Join the ranges. `stops`: where each of them ends in the text.
    joined_ranges = [marked for number in divided for marked in ranges[number]]
    range_counts = np.array([len(ranges[number]) for number in divided])
    stops = np.array([marked.stop for marked in joined_ranges]) + np.repeat(bases, range_counts)
    marks_of_ranges = np.array(
        [(marked.part_number, marked.weight) for marked in joined_ranges], MARK
    )

    # Find the ranges of the first and of the last character of each token. A token without a
    # character belongs to the range of the character after it, but not to one of the next response.
    first = np.searchsorted(stops, starts, "right")
    last_of_response = np.repeat(np.cumsum(range_counts) - 1, ids.lengths)
    first = np.minimum(first, last_of_response)
    last = np.searchsorted(stops, ends - 1, "right")

    # Nearly all tokens have all their characters in one range. The others get a mark one by one.
    marks = marks_of_ranges[first]
    list_of_stops = stops.tolist()
    for token in np.flatnonzero(last > first).tolist():
        positions = _find_visible(text, starts[token], ends[token])
        numbers = [bisect_right(list_of_stops, position) for position in positions]
        marks["part"][token] = joined_ranges[numbers[0]].part_number
        marks["weight"][token] = max(joined_ranges[number].weight for number in numbers)
    turns.marks[np.repeat(is_divided, turns.ids.lengths)] = marks


def _find_visible(text: str, start: int, end: int) -> Sequence[int]:
    """Return the positions of the characters from `start` to before `end` that are not white space;
    all these positions if the characters are only white space.
    """
    positions = range(start, end)
    visible = [position for position in positions if not text[position].isspace()]
    return visible or positions


def _extend_to_prompts(turns: Turns) -> None:
    """Give the tokens of each prompt the mark of the last token before it. If a stop token is later
    moved from a prompt to the answer before it, it then belongs to the last part of that answer.

    Args:
        turns: the samples. Their marks are changed in place.
    """
    marks = turns.marks
    if marks is None or not len(marks):
        return
    # Every other side is a prompt, from the first on. Nothing is before the first.
    starts = turns.ids.offsets[2:-1:2]
    lengths = turns.ids.lengths[2::2]
    in_later_prompts = ~turns.in_responses
    in_later_prompts[: turns.ids.lengths[0]] = False
    # A sample's first prompt gets a mark of another sample. No token is moved out of it.
    marks_before = marks[np.maximum(starts - 1, 0)]
    marks[in_later_prompts] = np.repeat(marks_before, lengths)


def count_parts(turns: Turns) -> dict[str, int]:
    """Return part of an answer -> its tokens in all responses. Parts without tokens are left out,
    and so are all if the turns have no marks.
    """
    if turns.marks is None:
        return {}
    counts = np.bincount(turns.marks["part"][turns.in_responses], minlength=len(PARTS) + 1)
    return {name: int(count) for name, count in zip(PARTS, counts[1:], strict=True) if count}


def count_untrained(turns: Turns) -> int:
    """Return how many tokens of responses have marks that do not train them."""
    if turns.marks is None:
        return 0
    return int(np.count_nonzero(turns.in_responses & (turns.marks["weight"] == 0)))


def find_untrained(turns: Turns) -> Flags:
    """Return for each sample whether its marks train no token of a response: bool [n].

    Args:
        turns: samples with marks.
    """
    return np.asarray(sum_between(turns.response_weights > 0, turns.samples.offsets) == 0)


class SplitAnswers(NamedTuple):
    """Samples whose answers are split, and the samples for which this is not possible."""

    turns: Turns
    """The samples, with the marks of their tokens. A sample that cannot be split has one turn, with
    all its tokens as prompt.
    """
    verdicts: NDArray[np.object_]
    "object [n]: USABLE, or the reason code of a sample that cannot be split."
    cut: Lengths
    "int64 [n]: the untrained tokens that were cut off the end of each sample."


def split_answers(turns: Turns, trains_all: bool, eos: int | None) -> SplitAnswers:
    """Return samples whose responses have only trained tokens, and whose prompts have only tokens
    that are not trained. If capital letters are trained tokens, the turn (`a b`, `c D e F`) becomes
    the turns (`a b c`, `D`) and (`e`, `F`).

    LLM-Foundry always trains the last response of a sample. So a sample ends with its last trained
    token: the tokens after it give no loss, and are cut off. If that token is not the last of its
    answer, the model would learn to write the EOS there that the loader appends. Such a sample is
    refused.

    Args:
        turns: samples with marks. No prompt is trained.
        trains_all: whether all responses of a sample are trained; False: only the last one.
        eos: the tokenizer's EOS; None if it has no EOS.
    """
    assert turns.marks is not None
    samples = turns.samples
    is_trained = turns.response_weights > 0
    verdicts = find_empty_sides(turns)
    counts = sum_between(is_trained, samples.offsets)
    verdicts[(verdicts == USABLE) & (counts == 0)] = "nothing_trained"
    # Find the last trained token of each sample that has one, and the response that it is in.
    # Prompts and responses have numbers in one list, as in `turns.ids`.
    rows = np.flatnonzero(verdicts == USABLE)
    last = np.flatnonzero(is_trained)[np.cumsum(counts)[rows] - 1]
    responses = np.searchsorted(turns.ids.offsets[1:], last, "right")
    # Refuse samples whose last trained response is not trained to its end.
    ends_early = np.zeros(len(rows), bool)
    if eos is not None:
        is_inside = last + 1 != turns.ids.offsets[1:][responses]
        ends_early = is_inside & (samples.values[last] != eos)
    verdicts[rows[ends_early]] = "ends_untrained"
    if not trains_all:
        # Refuse those whose last trained response has several pieces: only the last one would be
        # trained.
        has_pieces = _count_pieces(turns, is_trained)[responses] > 1
        verdicts[rows[~ends_early & has_pieces]] = "split_answer"
    # Cut off the tokens after the last trained one.
    is_split = verdicts[rows] == USABLE
    kept_lengths = samples.lengths.copy()
    kept_lengths[rows[is_split]] = (last + 1 - samples.offsets[rows])[is_split]
    return SplitAnswers(
        turns=replace(
            _join_runs(samples, is_trained, kept_lengths, verdicts == USABLE),
            marks=Ragged(turns.marks, samples.offsets).first(kept_lengths).values,
        ),
        verdicts=verdicts,
        cut=samples.lengths - kept_lengths,
    )


def _count_pieces(turns: Turns, is_trained: Flags) -> Lengths:
    """Return how many runs of trained tokens begin in each prompt and response: int64 [2 * turns].
    For the response `c D e F`, of which `D` and `F` are trained: 2.

    Args:
        turns: samples whose prompts are not trained.
        is_trained: bool [tokens], whether each token is trained.
    """
    begins_piece = is_trained.copy()
    begins_piece[1:] &= ~is_trained[:-1]
    return sum_between(begins_piece, turns.ids.offsets)


def _join_runs(
    samples: Ragged, is_trained: Flags, kept_lengths: Lengths, is_usable: Flags
) -> Turns:
    """Return samples as turns: each run of untrained tokens is a prompt, each run of trained tokens
    a response. In the code a side is a prompt or a response. A sample of the tokens `a b c D e F`,
    of which `D` and `F` are trained, has four sides of 3, 1, 1 and 1 tokens, so two turns.

    Args:
        samples: the tokens of each sample.
        is_trained: bool [tokens], whether each token is trained.
        kept_lengths: int64 [n], how many of its first tokens each sample keeps.
        is_usable: bool [n], whether each sample begins with an untrained token and keeps a trained
            token as its last one. Any other sample becomes one turn with an empty response.
    """
    # Keep the first tokens of each sample. One that is not usable has no trained token.
    is_trained = is_trained & np.repeat(is_usable, samples.lengths)
    kept_flags = Ragged(is_trained, samples.offsets).first(kept_lengths).values
    tokens = samples.first(kept_lengths)
    # A side begins where the flag changes, and at the first token of each sample.
    begins_side = np.ones(len(kept_flags), bool)
    begins_side[1:] = kept_flags[1:] != kept_flags[:-1]
    first_tokens = tokens.offsets[:-1][tokens.lengths > 0]
    begins_side[first_tokens] = True
    # Count the sides of each sample, and the tokens of each side.
    sides_before_token = np.concatenate([[0], np.cumsum(begins_side)])
    sides_before_sample = sides_before_token[tokens.offsets]
    sides = np.diff(sides_before_sample)
    side_starts = np.flatnonzero(begins_side)
    side_lengths = np.diff(np.append(side_starts, len(kept_flags)))
    # A sample that is not usable has one side, or none if it has no token. Empty sides after it
    # make it one turn.
    missing = np.where(is_usable, 0, 2 - sides)
    ends_of_missing = np.repeat(sides_before_sample[1:], missing)
    side_lengths = np.insert(side_lengths, ends_of_missing, 0)
    return Turns(Ragged.from_lengths(tokens.values, side_lengths), (sides + missing) // 2)
