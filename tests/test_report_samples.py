"""What is shown as trained is what gets a loss, for every layout and policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mdsmix.encode.pretrained import Decoder
from mdsmix.kinds import stored_pieces
from mdsmix.report.shown_samples import Segment, runs_of, segments, shortened

TURNS = {
    "turns": [{"input_ids": [1, 2], "labels": [3]}, {"input_ids": [4], "labels": [5, 6]}],
}
PAIR = {"input_ids": np.array([1, 2], "u2"), "labels": np.array([3, 4], "u2")}


@pytest.mark.parametrize(
    ("sample", "prompts", "responses", "text"),
    [
        ({"tokens": np.array([7, 8, 9], "u2")}, "none", "last", "7 ⟦8 9 ⟧"),
        ({"input_ids": np.array([7], "u2"), "labels": np.array([8, 9], "u2")}, "none", "last", "7 ⟦8 9 ⟧"),
        (PAIR, "none", "last", "1 2 ⟦3 4 ⟧"),
        (PAIR, "all", "all", "1 ⟦2 3 4 ⟧"),
        (TURNS, "none", "last", "1 2 3 4 ⟦5 6 ⟧"),
        (TURNS, "none", "all", "1 2 ⟦3 ⟧4 ⟦5 6 ⟧"),
        (TURNS, "all", "last", "1 ⟦2 ⟧3 ⟦4 5 6 ⟧"),
        (TURNS, "length>=2", "all", "1 ⟦2 3 ⟧4 ⟦5 6 ⟧"),
    ],
)  # fmt: skip
def test_the_trained_tokens_are_runs_of(
    sample: dict[str, Any], prompts: str, responses: str, text: str
) -> None:
    assert joined(segments(stored_pieces(sample, prompts, responses)), None) == text


class Spelling:
    """A tokenizer's model that shows which ids it is given together, and drops the space in front as many do."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(f" {i}" for i in ids).removeprefix(" ")


def joined(parts: list[Segment], decoder: Decoder | None) -> str:
    return "".join(text for text, _ in runs_of(parts, decoder))


def test_neighbours_are_decoded_together_and_control_tokens_stand_each_in_brackets() -> None:
    """A character may be several tokens: one by one they would decode to nothing readable."""
    parts = [Segment([1, 2], False), Segment([3], True, before=2)]
    assert joined(parts, Decoder(Spelling(), frozenset())) == "1 2⟦ 3⟧"
    parts = [Segment([9, 9, 1], False), Segment([2, 9], True, before=1)]
    assert joined(parts, Decoder(Spelling(), frozenset({9}))) == "⟨9⟩⟨ 9⟩ 1⟦ 2⟨ 9⟩⟧"


@pytest.mark.parametrize("most", [2, 4, 8, 10, 99])
def test_a_long_sample_keeps_its_ends(most: int) -> None:
    pieces = [([*range(3)], False), ([*range(3, 8)], True), ([8, 9], False)]
    found = shortened(segments(pieces), most)
    kept = [token for part in found for token in part.ids]
    assert kept == ([*range(10)] if most >= 10 else [*range(most // 2), *range(10 - most // 2, 10)])
    assert sum(part.gap for part in found) == max(0, 10 - most)
    assert all(part.before in (None, part.ids[0] - 1) for part in found)
    assert [t for part in found if part.is_trained for t in part.ids] == [t for t in kept if 3 <= t < 8]  # fmt: skip


def test_what_languages_are_written_with_stays_and_what_steers_is_named() -> None:
    """The joiner inside a Persian word, the spaces of Chinese and French, but no change of direction."""

    class Text:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "می\u200cخواهم\u3000第一章 oui\xa0! \u202e\x1b[2J\u2028"

    shown = joined([Segment([1], False)], Decoder(Text(), frozenset()))
    assert shown == "می\u200cخواهم\u3000第一章 oui\xa0! \\u202e\\x1b[2J\\u2028"
