"""What is shown as trained is what gets a loss, for every layout and policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mdsmix.kinds import stored_pieces
from mdsmix.report.samples import Segment, marked, segments

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
def test_the_trained_tokens_are_marked(
    sample: dict[str, Any], prompts: str, responses: str, text: str
) -> None:
    assert marked(segments(stored_pieces(sample, prompts, responses)), None) == text


def test_neighbours_are_decoded_together() -> None:
    """A character may be several tokens: one by one they would decode to nothing readable."""
    parts = [Segment([1, 2], False), Segment([3], True)]
    assert marked(parts, lambda ids: f"<{','.join(map(str, ids))}>") == "<1,2>⟦<3>⟧"
