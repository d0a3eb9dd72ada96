"""Records of questions and answers: `{"instruction": "...", "input": "...", "output": "...", "history": [["q", "a"], ...]}`, alpaca, with
`system` and `tools`; and `{"conversation": [{"human": "...", "assistant": "..."}, ...]}`, as ms-swift reads ShareGPT.

Alpaca's question is the instruction and the input, joined. Projects join them differently: LLaMA-Factory up to 0.9 and ms-swift by a
line break, which is the default here; LLaMA-Factory 1 by nothing (`joined_by: ""`).
"""

from __future__ import annotations

from typing import Any

from mdsmix.record import Conversation, Message, is_encodable
from mdsmix.shapes.conversation_rules import (
    conversation_of,
    exchange,
    list_of,
    system_of,
    tools_for,
)
from mdsmix.shapes.shape import Fields, RecordRefused, Shape, refusing, text_of, value_of


@refusing
def read_alpaca(record: Any, fields: Fields, joined_by: str = "\n") -> Conversation:
    instruction = text_of(record, fields["instruction"])
    more = _text_or_nothing(record, fields, "input")
    output = text_of(record, fields["output"])
    system = _text_or_nothing(record, fields, "system")
    past = _history(record, fields)
    question = joined_by.join(filter(None, (instruction, more)))
    if not question:
        raise RecordRefused("empty_question")
    if not output:
        raise RecordRefused("empty_answer")
    head = [{"role": "system", "content": system}] if system else []
    messages = [*head, *past, *exchange(question, output)]
    tools = tools_for(record, fields, "keep", messages)
    if tools:
        return conversation_of([(message, None) for message in messages], tools, "reject")
    return Conversation(messages)


def _text_or_nothing(record: Any, fields: Fields, key: str) -> str:
    return "" if value_of(record, fields, key) is None else text_of(record, fields[key])


def _history(record: Any, fields: Fields) -> list[Message]:
    """The exchanges before this one."""
    past = value_of(record, fields, "history")
    if past is None:
        return []
    if not isinstance(past, list) or not all(map(_is_exchange, past)):
        raise RecordRefused("bad_history")
    if not is_encodable("\n".join([text for pair in past for text in pair])):
        raise RecordRefused("lone_surrogate")
    return [message for pair in past for message in exchange(*pair)]


def _is_exchange(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


@refusing
def read_rounds(record: Any, fields: Fields) -> Conversation:
    rounds = list_of(record, fields, "conversation", nulls="keep")
    messages = [message for each in rounds for message in _round(each)]
    marked = [*system_of(record, fields), *((message, None) for message in messages)]
    return conversation_of(marked, None, "reject")


def _round(each: Any) -> list[Message]:
    if not isinstance(each, dict) or set(each) != {"human", "assistant"}:
        raise RecordRefused("bad_message_keys")
    if not all(isinstance(text, str) for text in each.values()):
        raise RecordRefused("content_not_text")
    return exchange(each["human"], each["assistant"])


ALPACA = Shape(
    name="alpaca",
    gives=Conversation,
    fields=("instruction", "output"),
    optional=("input", "history", "system", "tools"),
    structured=("history", "tools"),
    options=("joined_by",),
    read=read_alpaca,
)
ROUNDS = Shape(
    name="rounds",
    gives=Conversation,
    fields=("conversation",),
    optional=("system",),
    structured=("conversation",),
    also_called={"conversation": ("conversations", "history", "dialogue")},
    read=read_rounds,
)
