"""`{"instruction": "...", "input": "...", "output": "...", "history": [["q", "a"], ...], "system": "...", "tools": "[...]"}`: one
exchange, and those before it.

The question is the instruction and the input, joined. Projects join them differently: LLaMA-Factory up to 0.9 and ms-swift by a
line break, which is the default here; LLaMA-Factory 1 by nothing (`joined_by: ""`).
"""

from __future__ import annotations

from typing import Any

from mdsmix.record import Conversation, Message, is_encodable
from mdsmix.shapes.base import ABSENT, Fault, Fields, Shape, refusing, text_of, value_of
from mdsmix.shapes.talks import conversation_of, tools_for


@refusing
def read(record: Any, fields: Fields, joined_by: str = "\n") -> Conversation:
    instruction, more, output, system = (
        _text(record, fields, key) for key in ("instruction", "input", "output", "system")
    )
    past = _history(record, fields)
    question = joined_by.join(filter(None, (instruction, more)))
    if not question:
        raise Fault("empty_question")
    if not output:
        raise Fault("empty_answer")
    head = [{"role": "system", "content": system}] if system else []
    messages = [*head, *past, *exchange(question, output)]
    tools = tools_for(record, fields, "keep", messages)
    if tools:
        return conversation_of([(message, None) for message in messages], tools, "reject")
    return Conversation(messages)


def exchange(question: str, answer: str) -> list[Message]:
    """One question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _text(record: Any, fields: Fields, key: str) -> str:
    """The text under a key; empty where the field may be lacking and is, or is null."""
    if key in SHAPE.optional and _is_lacking(record, fields, key):
        return ""
    text, fault = text_of(record, fields[key])
    if fault:
        raise Fault(fault)
    return text


def _history(record: Any, fields: Fields) -> list[Message]:
    """The exchanges before this one."""
    if _is_lacking(record, fields, "history"):
        return []
    past = value_of(record, fields["history"])
    if not isinstance(past, list) or not all(map(_is_exchange, past)):
        raise Fault("bad_history")
    if not is_encodable("\n".join([text for pair in past for text in pair])):
        raise Fault("lone_surrogate")
    return [message for pair in past for message in exchange(*pair)]


def _is_lacking(record: Any, fields: Fields, key: str) -> bool:
    return key not in fields or value_of(record, fields[key]) in (None, ABSENT)


def _is_exchange(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


SHAPE = Shape(
    name="alpaca",
    gives=Conversation,
    fields=("instruction", "output"),
    optional=("input", "history", "system", "tools"),
    structured=("history", "tools"),
    options=("joined_by",),
    read=read,
)
