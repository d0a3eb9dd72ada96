"""The tokens that stand for images: counted row by row, and how long a row is once each has become its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mdsmix.encode.labels import USABLE, Targets, Turns, label
from mdsmix.kinds.finetuning import TurnRows
from mdsmix.kinds.pictured import ConversationsWithImages
from mdsmix.ragged import Ragged
from mdsmix.record import PicturedConversation
from mdsmix.shards.manifest import Encoding

IMAGE = 9


def talk(*images: int) -> PicturedConversation:
    """A question with so many images and its answer, for each number."""
    messages = list[dict[str, Any]]()
    for count in images:
        parts = [{"type": "image"}] * count + [{"type": "text", "text": "Which?"}]
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "This."}]
    return PicturedConversation(messages, None, None, ["a.jpg"] * sum(images))


def kind(max_seq_len: int = 100) -> ConversationsWithImages:
    encoding: Any = {"kind": "finetuning", "loader": "", "columns": {}, "max_seq_len": max_seq_len, "decoder_only_format": True, "target_prompts": "none", "target_responses": "last", "special_tokens_in_text": "escape"}  # fmt: skip
    made = ConversationsWithImages(Encoding(**encoding, images={"id": IMAGE, "token": "<image>"}))
    made.counts = True  # type: ignore[assignment]
    return made


def rows(*turns: list[list[int]]) -> Turns:
    """Rows of prompts and responses."""
    parts = [part for row in turns for part in row]
    return Turns(Ragged.of(parts, "uint16"), np.array([len(row) // 2 for row in turns]))


def left(turns: Turns, positions: list[int], said: Any) -> TurnRows:
    """What is left of rows without those that have more or fewer placeholders than images."""
    found = TurnRows(turns, positions, [])
    kind()._refuse_miscounted(found, said)
    return found


def test_each_row_counts_its_own() -> None:
    turns = rows([[IMAGE, 1], [2]], [[3], [4], [IMAGE, IMAGE], [IMAGE]], [[5], []])
    assert turns.count(IMAGE).tolist() == [1, 3, 0]


@pytest.mark.parametrize(("printed", "is_kept"), [(0, False), (1, False), (2, True), (3, False)])
def test_more_and_fewer_than_images_are_bad(printed: int, is_kept: bool) -> None:
    found = left(rows([[1], [2]], [[IMAGE] * printed, [2]]), [4, 5], {4: talk(0), 5: talk(2)})
    assert [(bad.position, bad.reason, bad.detail) for bad in found.rejected] == (
        [] if is_kept else [(5, "image_placeholders", {"images": 2, "placeholders": printed})]
    )
    assert found.positions == [4, 5][: 1 + is_kept]
    assert (len(found.turns.ids), found.turns.counts.tolist()) == (2 + 2 * is_kept, [1] * len(found.positions))  # fmt: skip


def test_of_several_rows_of_a_conversation_each_has_the_images_before_its_answer() -> None:
    """And where one of them is wrong, none is left."""
    said = [talk(1, 2)]
    whole = rows([[IMAGE], [1]], [[IMAGE, 5, IMAGE, IMAGE], [1]])
    assert left(whole, [0, 0], said).positions == [0, 0]
    wrong = left(rows([[IMAGE], [1]], [[IMAGE, 5, IMAGE], [1]]), [0, 0], said)
    assert wrong.positions == []
    assert [bad.position for bad in wrong.rejected] == [0]


def test_a_row_is_as_long_as_its_images_make_it_and_none_is_cut() -> None:
    """The third row ends early and holds the first of its images alone; what is too long without an image is cut as any."""
    turns = rows([[IMAGE, 1, IMAGE], [2]], [[3] * 9, [4]], [[IMAGE], [5, 5]])
    spans = [[4, 3], [], [6, 100]]
    images = [[SimpleNamespace(tokens=n) for n in of] for of in spans]
    grown = kind().grown(turns, TurnRows(turns, [0, 1, 2], [], images=images))
    assert grown is not None
    assert grown.tolist() == [4 + 1 + 3, 1, 9, 1, 6, 2]
    for longest, keep in ((9, [True] * 3), (8, [False, True, True]), (7, [False, True, False])):
        targets = Targets(max_seq_len=longest, target_prompts="all")
        verdicts = label(targets, turns, None, IMAGE).verdicts(grown).tolist()
        assert verdicts == [USABLE if kept else "images_too_long" for kept in keep]
