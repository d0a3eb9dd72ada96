"""The tokens that stand for images: counted row by row, and how long a row is once each has become its tokens."""

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


def kind() -> ConversationsWithImages:
    images = {"id": IMAGE, "token": "<image>", "processor": "b1"}
    encoding: Any = {"kind": "finetuning", "loader": "", "columns": {}, "max_seq_len": 100, "decoder_only_format": True, "target_prompts": "none", "target_responses": "last", "special_tokens_in_text": "escape"}  # fmt: skip
    return ConversationsWithImages(Encoding(**encoding, images=images))


def rows(*turns: list[list[int]]) -> Turns:
    """Rows of prompts and responses."""
    parts = [part for row in turns for part in row]
    return Turns(Ragged.of(parts, "uint16"), np.array([len(row) // 2 for row in turns]))


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`rows_of` where the template prints these texts, each a row of one turn."""

    def made(said: RichConversation, *texts: str) -> Any:
        kind_of, found = kind(), [[(text, "This.")] for text in texts]
        monkeypatch.setattr(Conversations, "rows_of", lambda *_: found)
        monkeypatch.setattr(forms, "with_images", lambda chat, token, conversation: conversation)
        kind_of.chat = None  # type: ignore[assignment]
        return kind_of.rows_of(said, Counter())

    return made


def test_each_row_counts_its_own() -> None:
    turns = rows([[IMAGE, 1], [2]], [[3], [4], [IMAGE, IMAGE], [IMAGE]], [[5], []])
    assert turns.count(IMAGE).tolist() == [1, 3, 0]


def test_more_and_fewer_than_images_are_bad(printing: Any) -> None:
    """Each of several rows has the images before its answer, and where one of them is wrong, none is left."""
    image = "<image>"
    assert printing(talk(2), image * 2) == [[(image * 2, "This.")]]
    for printed in (0, 1, 3):
        with pytest.raises(RecordRefused, match="image_placeholders") as bad:
            printing(talk(2), image * printed)
        assert bad.value.why.detail == {"images": 2, "placeholders": printed}
    assert len(printing(talk(1, 2), image, image * 3)) == 2
    assert len(printing(talk(1, 2), image * 3)) == 1, "all turns, or the last one"
    for wrong in ((image, image * 2), (image * 2, image * 3), (image * 2,)):
        with pytest.raises(RecordRefused, match="image_placeholders"):
            printing(talk(1, 2), *wrong)


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
