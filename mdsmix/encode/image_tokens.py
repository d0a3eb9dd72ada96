"""What stands for an image in the tokens of a conversation: one token, which a chat template prints where the image is.

Templates of models that see take messages whose content is a list of parts; some want it of every message, some of those with an
image alone, and one that knows no parts is given the token itself in the text. Which of these a template renders is tried once,
on a conversation made for it. Whatever it prints, the tokens are counted: as many as images, or the record is bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.chat import ChatTemplate, NotRendered, answers
from mdsmix.encode.encoded import Rejected
from mdsmix.ragged import Ragged
from mdsmix.record import Conversation, Message, PicturedConversation

Form = Literal["parts", "mixed", "text", ""]
"""Every content is a list of parts; that of messages with an image alone; all are texts, with the token in place of each image;
or the template prints no image in any of these forms."""
FORMS: tuple[Form, ...] = ("parts", "mixed", "text")

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sieve:
    """Rows with more or fewer placeholders than images."""

    keep: NDArray[np.bool_]
    rejected: list[Rejected] = field(default_factory=list)

    def take(
        self, ids: Ragged, counts: Counts, positions: list[int]
    ) -> tuple[Ragged, Counts, list[int]]:
        """What is left of rows of turns."""
        if self.keep.all():
            return ids, counts, positions
        kept = [at for at, keep in zip(positions, self.keep.tolist(), strict=True) if keep]
        return ids.take(np.repeat(self.keep, 2 * counts)), counts[self.keep], kept


@dataclass(frozen=True, slots=True)
class ImageToken:
    """The token."""

    text: str
    id: int
    around: tuple[str, str] = ("", "")
    "Text that the recipe's processor prints before and after an image."

    def in_text(self, text: str) -> str:
        """A rendered text with what the processor prints around each image."""
        return text.replace(self.text, self.text.join(self.around))

    def count(self, ids: Ragged, counts: Counts) -> Counts:
        """int64 [n]: how many stand in each row, of `counts` turns."""
        ends = ids.offsets[2 * np.concatenate([[0], np.cumsum(counts)])]
        before = np.concatenate([[0], np.cumsum(ids.values == self.id)])
        return np.diff(before[ends]).astype(np.int64)

    def miscounted(
        self, ids: Ragged, counts: Counts, positions: Sequence[int], said: Sequence[Conversation]
    ) -> Sieve:
        """The rows whose placeholders are not as many as the images of the messages in them; `positions`: which conversation
        each is of."""
        found = self.count(ids, counts)
        wanted = np.array(_wanted(positions, said), np.int64)
        keep = found == wanted
        bad = {positions[row]: row for row in np.flatnonzero(~keep).tolist()[::-1]}
        if not bad:
            return Sieve(keep)
        rejected = []
        for at, row in sorted(bad.items()):
            counts_of = {"images": int(wanted[row]), "placeholders": int(found[row])}
            rejected.append(Rejected(at, "image_placeholders", False, counts_of))
        return Sieve(np.array([at not in bad for at in positions], bool), rejected)

    def grown(
        self, ids: Ragged, counts: Counts, spans: Sequence[Sequence[int]]
    ) -> NDArray[np.int64]:
        """int64: the lengths of prompts and responses when each image has become its tokens; `spans`: those of each row's images, in
        order, of which a row that ends early holds the first."""
        held = self.count(ids, counts).tolist()
        tokens = [n for of, count in zip(spans, held, strict=True) for n in list(of)[:count]]
        extra = np.zeros(len(ids.values) + 1, np.int64)
        extra[1:][ids.values == self.id] = np.array(tokens, np.int64) - 1
        return np.asarray(ids.lengths + np.diff(np.cumsum(extra)[ids.offsets]))


def overgrown(
    may_outgrow: NDArray[np.bool_],
    grown: NDArray[np.int64],
    counts: Counts,
    positions: Sequence[int],
    longest: int,
) -> Sieve:
    """The rows that are longer than `longest` when their images have become tokens: no image is ever cut. `may_outgrow`: the rows
    with images whose text alone does not rule them out; `grown`: the lengths of prompts and responses."""
    firsts = 2 * np.concatenate([[0], np.cumsum(counts)])
    lengths = np.diff(np.concatenate([[0], np.cumsum(grown)])[firsts])
    keep = (lengths <= longest) | ~may_outgrow
    kept = {positions[row] for row in np.flatnonzero(keep).tolist()}
    gone = sorted({positions[row] for row in np.flatnonzero(~keep).tolist()} - kept)
    return Sieve(keep, [Rejected(at, "images_too_long", True) for at in gone])


def _wanted(positions: Sequence[int], said: Sequence[Conversation]) -> list[int]:
    """How many images the messages of each row have. A row ends with the last answer that is trained, or is one of several, each
    of which ends with another answer."""
    found, seen, rows = list[int](), dict[int, int](), dict[int, int]()
    for at in positions:
        rows[at] = rows.get(at, 0) + 1
    for at in positions:
        conversation = said[at]
        if not conversation.images:
            found.append(0)
            continue
        number = seen[at] = seen.get(at, -1) + 1
        ends = list(answers(conversation))
        end = ends[number] if rows[at] > 1 else ends[-1]
        found.append(sum(map(_images_in, conversation.messages[: end + 1])))
    return found


def _images_in(message: Message) -> int:
    content = message.get("content")
    if not isinstance(content, list):
        return 0
    return sum(part["type"] == "image" for part in content)


def fitted(template: ChatTemplate, token: ImageToken, conversation: Conversation) -> Conversation:
    """The conversation in a form that the template takes; NotRendered (image_not_printed) where it takes none."""
    form = form_of(template, token)
    if not conversation.images and form != "parts":
        return conversation
    if not form:
        why = f"it does not print {token.text} for an image, in parts or in a text"
        raise NotRendered("image_not_printed", {"template": why})
    messages = [_fit(message, form, token) for message in conversation.messages]
    if type(conversation) is Conversation:
        return PicturedConversation(messages, *conversation[1:])
    return conversation._replace(messages=messages)


def _fit(message: Message, form: Form, token: ImageToken) -> Message:
    content = message.get("content")
    if form == "text" and isinstance(content, list):
        return message | {"content": "".join(part.get("text", token.text) for part in content)}
    if form == "parts" and isinstance(content, str) and content:
        return message | {"content": [{"type": "text", "text": content}]}
    return message


@lru_cache(maxsize=16)
def form_of(template: ChatTemplate, token: ImageToken) -> Form:
    """The first form in which the template prints one token for an image, and every text as it is."""
    for first in ([{"role": "system", "content": "probe_system"}], []):
        for form in FORMS:
            if _is_printed(template, form, token, first):
                return form
    return ""


def _is_printed(
    template: ChatTemplate, form: Form, token: ImageToken, first: Sequence[Message]
) -> bool:
    asked = [{"type": "image"}, {"type": "text", "text": "probe_question"}]
    messages = [
        *first,
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "probe_answer"},
    ]
    try:
        text = template.render([_fit(message, form, token) for message in messages], False)
    except NotRendered:
        return False
    texts = [m["content"] for m in first] + ["probe_question", "probe_answer"]
    is_whole = all(text.count(said) == 1 for said in texts)
    return (
        is_whole and text.count(token.text) == 1 and "'type'" not in text and '"type"' not in text
    )
