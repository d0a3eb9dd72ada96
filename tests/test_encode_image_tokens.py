"""The tokens that stand for images: counted row by row, and how long a row is once each has become its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mdsmix.encode.image_tokens import ImageToken, overgrown
from mdsmix.ragged import Ragged
from mdsmix.record import PicturedConversation

IMAGE = 9
TOKEN = ImageToken("<image>", IMAGE)


def talk(*images: int) -> PicturedConversation:
    """A question with so many images and its answer, for each number."""
    messages = list[dict[str, Any]]()
    for count in images:
        parts = [{"type": "image"}] * count + [{"type": "text", "text": "Which?"}]
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "This."}]
    return PicturedConversation(messages, None, None, ["a.jpg"] * sum(images))


def rows(*turns: list[list[int]]) -> tuple[Ragged, Any]:
    """Rows of prompts and responses, and how many turns each has."""
    parts = [part for row in turns for part in row]
    return Ragged.of(parts, "uint16"), np.array([len(row) // 2 for row in turns])


def test_each_row_counts_its_own() -> None:
    ids, counts = rows([[IMAGE, 1], [2]], [[3], [4], [IMAGE, IMAGE], [IMAGE]], [[5], []])
    assert TOKEN.count(ids, counts).tolist() == [1, 3, 0]


@pytest.mark.parametrize(("printed", "is_kept"), [(0, False), (1, False), (2, True), (3, False)])
def test_more_and_fewer_than_images_are_bad(printed: int, is_kept: bool) -> None:
    ids, counts = rows([[1], [2]], [[IMAGE] * printed, [2]])
    wrong = TOKEN.miscounted(ids, counts, [4, 5], {4: talk(0), 5: talk(2)})  # type: ignore[arg-type]
    assert wrong.keep.tolist() == [True, is_kept]
    assert [(bad.position, bad.reason, bad.detail) for bad in wrong.rejected] == (
        [] if is_kept else [(5, "image_placeholders", {"images": 2, "placeholders": printed})]
    )
    left, turns, positions = wrong.take(ids, counts, [4, 5])
    assert (len(left), turns.tolist(), positions) == (2 + 2 * is_kept, [1] * len(positions), [4, 5][: 1 + is_kept])  # fmt: skip


def test_of_several_rows_of_a_conversation_each_has_the_images_before_its_answer() -> None:
    """And where one of them is wrong, none is left."""
    ids, counts = rows([[IMAGE], [1]], [[IMAGE, 5, IMAGE, IMAGE], [1]])
    said = [talk(1, 2)]
    assert TOKEN.miscounted(ids, counts, [0, 0], said).keep.all()
    ids, counts = rows([[IMAGE], [1]], [[IMAGE, 5, IMAGE], [1]])
    wrong = TOKEN.miscounted(ids, counts, [0, 0], said)
    assert not wrong.keep.any()
    assert [bad.position for bad in wrong.rejected] == [0]


def test_a_row_is_as_long_as_its_images_make_it_and_none_is_cut() -> None:
    """The third row ends early and holds the first of its images alone; what is too long without an image is cut as any."""
    ids, counts = rows([[IMAGE, 1, IMAGE], [2]], [[3] * 9, [4]], [[IMAGE], [5, 5]])
    spans = [[4, 3], [], [6, 100]]
    grown = TOKEN.grown(ids, counts, spans)
    assert grown.tolist() == [4 + 1 + 3, 1, 9, 1, 6, 2]
    may = TOKEN.count(ids, counts) > 0
    for longest, keep in ((9, [True] * 3), (8, [False, True, True]), (7, [False, True, False])):
        wrong = overgrown(may, grown, counts, [0, 1, 2], longest)
        assert wrong.keep.tolist() == keep
        gone = [number for number, kept in enumerate(keep) if not kept]
        assert [(bad.position, bad.reason, bad.filtered) for bad in wrong.rejected] == [
            (number, "images_too_long", True) for number in gone
        ]
    two = overgrown(may, grown, counts, [7, 8, 7], 8)
    assert two.keep.tolist() == [False, True, True]
    assert two.rejected == [], "a row of the record is left"
