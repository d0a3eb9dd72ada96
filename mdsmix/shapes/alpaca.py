"""`{"instruction": "...", "input": "...", "output": "...", "history": [["q", "a"], ...], "system": "..."}`: one exchange, and those
before it.

The question is the instruction and the input, joined. Projects join them differently: LLaMA-Factory up to 0.9 and ms-swift by a
line break, which is the default here; LLaMA-Factory 1 by nothing (`joined_by: ""`).
"""

from __future__ import annotations

from typing import Any

from mdsmix.record import Conversation, Message, is_encodable
from mdsmix.shapes.base import ABSENT, Fields, Shape, not_an_object, text_of, value_of


def read(record: Any, fields: Fields, joined_by: str = "\n") -> Conversation | str:
    if not isinstance(record, dict):
        return not_an_object(record)
    texts = {}
    for key in ("instruction", "output", "input", "system"):
        texts[key], fault = _text(record, fields, key)
        if fault:
            return fault
    past = _history(record, fields)
    if isinstance(past, str):
        return past
    question = joined_by.join(filter(None, (texts["instruction"], texts["input"])))
    if not question:
        return "empty_question"
    if not texts["output"]:
        return "empty_answer"
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return Conversation([*system, *past, *exchange(question, texts["output"])])


def exchange(question: str, answer: str) -> list[Message]:
    """One question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _text(record: Any, fields: Fields, key: str) -> tuple[str, str]:
    """The text under a key and the reason code of why there is none; a field that may be lacking may also be null."""
    if key not in fields or (
        key in SHAPE.optional and value_of(record, fields[key]) in (None, ABSENT)
    ):
        return "", ""
    return text_of(record, fields[key])


def _history(record: Any, fields: Fields) -> list[Message] | str:
    """The exchanges before this one, or a reason code."""
    past = value_of(record, fields["history"]) if "history" in fields else None
    if past in (None, ABSENT):
        return []
    if not isinstance(past, list) or not all(map(_is_exchange, past)):
        return "bad_history"
    if not is_encodable("\n".join([text for pair in past for text in pair])):
        return "lone_surrogate"
    return [message for pair in past for message in exchange(*pair)]


def _is_exchange(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


SHAPE = Shape(
    name="alpaca",
    gives=Conversation,
    fields=("instruction", "output"),
    optional=("input", "history", "system"),
    structured=("history",),
    options=("joined_by",),
    read=read,
)
