"""What a raw record becomes before any encoder sees it: a document, a pair, or a conversation.

Shapes make these and encoders take them, so neither knows of the other: another way in which people write a conversation
is another shape, and no encoder changes. They are named tuples, since one is made for every record: 0.2 us each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
"`role` and `content` as a chat template is given them, and what else the template reads (`tool_calls`, ...)."


class Document(NamedTuple):
    """A text to be trained on as it is."""

    text: str


class Pair(NamedTuple):
    """A prompt and the response to it, rendered by no template."""

    prompt: str
    response: str


class Conversation(NamedTuple):
    """What a chat template is given."""

    messages: list[Message]
    trained: Sequence[bool] | None = None
    "A flag a message: an answer that is not trained becomes part of the next prompt. None: the recipe's policies alone decide."
    tools: list[Any] | None = None
    "What the assistant may call, as the template takes it."

    @property
    def said(self) -> str:
        """The contents of all messages, a line or more each."""
        return "\n".join([message["content"] for message in self.messages])


Record = Document | Pair | Conversation


def is_encodable(text: str) -> bool:
    """False for a text with a lone surrogate: it has no UTF-8 form, and no tokenizer takes it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
