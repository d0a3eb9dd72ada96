"""What is shown as trained is what gets a loss, for every layout and policy."""

from typing import Any

import numpy as np

from mdsmix.encode.pretrained import Decoder
from mdsmix.kinds import stored_pieces
from mdsmix.report.shown_samples import Segment, runs_of, segments, shortened

TURNS = {"turns": [{"input_ids": [1, 2], "labels": [3]}, {"input_ids": [4], "labels": [5, 6]}]}
PAIR = {"input_ids": np.array([1, 2], "u2"), "labels": np.array([3, 4], "u2")}


class Spelling:
    """A tokenizer's model that shows which ids it is given together, and drops the space in front as many do."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(f" {i}" for i in ids).removeprefix(" ")


class Persian:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "می\u200cخواهم\u3000第一章 oui\xa0! \u202e\x1b[2J\u2028"


def joined(parts: list[Segment], decoder: Decoder | None) -> str:
    return "".join(text for text, _ in runs_of(parts, decoder))


def test_the_trained_tokens_are_bracketed() -> None:
    one: dict[str, Any] = {"tokens": np.array([7, 8, 9], "u2")}
    split = {"input_ids": np.array([7], "u2"), "labels": np.array([8, 9], "u2")}
    for sample, prompts, responses, text in (
        (one, "none", "last", "7 ⟦8 9 ⟧"),
        (split, "none", "last", "7 ⟦8 9 ⟧"),
        (PAIR, "none", "last", "1 2 ⟦3 4 ⟧"),
        (PAIR, "all", "all", "1 ⟦2 3 4 ⟧"),
        (TURNS, "none", "last", "1 2 3 4 ⟦5 6 ⟧"),
        (TURNS, "none", "all", "1 2 ⟦3 ⟧4 ⟦5 6 ⟧"),
        (TURNS, "all", "last", "1 ⟦2 ⟧3 ⟦4 5 6 ⟧"),
        (TURNS, "length>=2", "all", "1 ⟦2 3 ⟧4 ⟦5 6 ⟧"),
    ):
        assert joined(segments(stored_pieces(sample, prompts, responses)), None) == text


def test_neighbours_are_decoded_together_control_tokens_apart_and_what_steers_is_named() -> None:
    """A character may be several tokens. Joiners and the spaces of other languages stay, changes of direction do not."""
    for parts, decoder, text in (
        ([Segment([1, 2], False), Segment([3], True, before=2)], Decoder(Spelling(), frozenset()), "1 2⟦ 3⟧"),
        ([Segment([9, 9, 1], False), Segment([2, 9], True, before=1)], Decoder(Spelling(), frozenset({9})), "⟨9⟩⟨ 9⟩ 1⟦ 2⟨ 9⟩⟧"),
        ([Segment([1], False)], Decoder(Persian(), frozenset()), "می\u200cخواهم\u3000第一章 oui\xa0! \\u202e\\x1b[2J\\u2028"),
    ):  # fmt: skip
        assert joined(parts, decoder) == text


def test_a_long_sample_keeps_its_ends() -> None:
    pieces = [([*range(3)], False), ([*range(3, 8)], True), ([8, 9], False)]
    for most in (2, 4, 8, 10, 99):
        found = shortened(segments(pieces), most)
        kept = [token for part in found for token in part.ids]
        ends = [*range(most // 2), *range(10 - most // 2, 10)]
        assert kept == ([*range(10)] if most >= 10 else ends)
        assert sum(part.gap for part in found) == max(0, 10 - most)
        assert all(part.before in (None, part.ids[0] - 1) for part in found)
        trained = [token for part in found if part.is_trained for token in part.ids]
        assert trained == [token for token in kept if 3 <= token < 8]
