"""The tokens that stand for images: counted row by row, and how long a row is once each has become its tokens."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mdsmix.encode import forms
from mdsmix.encode.labels import USABLE, Labels, Targets, Turns
from mdsmix.kinds.conversations import Conversations
from mdsmix.kinds.finetuning import TurnRows
from mdsmix.kinds.pictured import ConversationsWithImages
from mdsmix.ragged import Ragged
from mdsmix.record import RecordRefused, RichConversation
from mdsmix.shards.manifest import Encoding

IMAGE = 9


def talk(*images: int) -> RichConversation:
    """A question with so many images and its answer, for each number."""
    messages = list[dict[str, Any]]()
    for count in images:
        parts = [{"type": "image"}] * count + [{"type": "text", "text": "Which?"}]
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "This."}]
    return RichConversation(messages, None, None, ["a.jpg"] * sum(images))


def kind(max_seq_len: int = 100) -> ConversationsWithImages:
    encoding: Any = {"kind": "finetuning", "loader": "", "columns": {}, "max_seq_len": max_seq_len, "decoder_only_format": True, "target_prompts": "none", "target_responses": "last", "special_tokens_in_text": "escape"}  # fmt: skip
    return ConversationsWithImages(
        Encoding(**encoding, images={"id": IMAGE, "token": "<image>", "processor": "b1"})
    )


def rows(*turns: list[list[int]]) -> Turns:
    """Rows of prompts and responses."""
    parts = [part for row in turns for part in row]
    return Turns(Ragged.of(parts, "uint16"), np.array([len(row) // 2 for row in turns]))


def printing(monkeypatch: pytest.MonkeyPatch, *texts: str) -> Any:
    """`rows_of` where the template prints these texts, each a row of one turn."""
    made, found = kind(), [[(text, "This.")] for text in texts]
    monkeypatch.setattr(Conversations, "rows_of", lambda *_: found)
    monkeypatch.setattr(forms, "with_images", lambda chat, token, conversation: conversation)
    made.chat = None  # type: ignore[assignment]
    return lambda said: made.rows_of(said, Counter())


def test_each_row_counts_its_own() -> None:
    turns = rows([[IMAGE, 1], [2]], [[3], [4], [IMAGE, IMAGE], [IMAGE]], [[5], []])
    assert turns.count(IMAGE).tolist() == [1, 3, 0]


def test_more_and_fewer_than_images_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    for printed in range(4):
        rows_of = printing(monkeypatch, "<image>" * printed)
        if printed == 2:
            assert rows_of(talk(2)) == [[("<image><image>", "This.")]]
            continue
        with pytest.raises(RecordRefused) as bad:
            rows_of(talk(2))
        assert (bad.value.why, bad.value.why.detail) == (
            "image_placeholders",
            {"images": 2, "placeholders": printed},
        )


def test_of_several_rows_of_a_conversation_each_has_the_images_before_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where one of them is wrong, none is left."""
    image = "<image>"
    assert len(printing(monkeypatch, image, image * 3)(talk(1, 2))) == 2
    assert len(printing(monkeypatch, image * 3)(talk(1, 2))) == 1, "all turns, or the last one"
    for wrong in ((image, image * 2), (image * 2, image * 3), (image * 2,)):
        with pytest.raises(RecordRefused, match="image_placeholders"):
            printing(monkeypatch, *wrong)(talk(1, 2))


def test_a_row_is_as_long_as_its_images_make_it_and_none_is_cut() -> None:
    """The third row ends early and holds the first of its images alone; what is too long without an image is cut as any."""
    turns = rows([[IMAGE, 1, IMAGE], [2]], [[3] * 9, [4]], [[IMAGE], [5, 5]])
    spans = [[4, 3], [], [6, 100]]
    images = [[SimpleNamespace(tokens=n) for n in of] for of in spans]
    grown = kind().grown(turns, TurnRows(turns, [0, 1, 2], {}, images=images))
    assert grown is not None
    assert grown.tolist() == [4 + 1 + 3, 1, 9, 1, 6, 2]
    for longest, keep in ((9, [True] * 3), (8, [False, True, True]), (7, [False, True, False])):
        targets = Targets(max_seq_len=longest, target_prompts="all")
        verdicts = Labels(targets, turns, None, IMAGE).verdicts(grown).tolist()
        assert verdicts == [USABLE if kept else "images_too_long" for kept in keep]
