"""Prompts alone, to which the model itself writes the answers in reinforcement learning. People
write them in two ways:

- `{"prompt": ...}`, as TRL and verl write them: a string, or messages that end with one of the
  user's or of a tool's.
- `{"instruction": ..., "input": ...}`: a question as in an Alpaca record. It becomes the user's
  message.

A record may have a verified answer, with which a reward function compares what the model writes. In
verl's records it is `reward_model.ground_truth`.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from mdsmix.record import Conversation, Message, RecordRefused, is_encodable
from mdsmix.shapes.conversation_rules import CONVERSATION_REASONS, make_conversation, read_messages
from mdsmix.shapes.extras import EXTRAS_REASONS, OBJECTS, VARIABLES, with_extras
from mdsmix.shapes.messages import parse_openai_messages
from mdsmix.shapes.shape import RawRecord, Shape
from mdsmix.shapes.texts import ALPACA_REASONS, SKIPPED_IF_FALSE, parse_alpaca_prompt
from mdsmix.shapes.tools import TOOLS_OF_TEXT
from mdsmix.shapes.training_marks import drop_listed_marks

ANSWER = "verified_answer"
"The key of `source:` for the field with the verified answer, and the column that stores it."
STAND_IN: Message = {"role": "assistant", "content": "answer"}
"An answer that follows the prompt while its messages are checked, and is removed again."
ASKING_ROLES = ("user", "tool", "function", "tool_response")
"The roles of a last message that a model answers."


class Prompt(NamedTuple):
    """A prompt that the model answers, with the answer that is known to be right."""

    prompt: str | Conversation
    "A string is used as it is. The last message of a conversation is the user's or a tool's."
    answer: str = ""
    "The verified answer; empty if the record has none."


def parse_prompt(raw: RawRecord) -> Prompt:
    """Read a record with the field `prompt`, a string or a list of messages.

    Raises RecordRefused if the prompt is of another type, or its messages break a rule.
    """
    if not isinstance(raw.required_value("prompt"), str):
        return Prompt(_read_conversation(raw), _read_answer(raw))
    if raw.value("tools"):
        raise RecordRefused("tools_of_text")
    return Prompt(raw.text("prompt"), _read_answer(raw))


def _parse_messages(raw: RawRecord) -> Conversation:
    """Return the conversation of a prompt that is a list of messages.

    Raises RecordRefused (last_not_user) if the last message is neither the user's nor a tool's.
    """
    items = read_messages(raw, "prompt")
    if not items:
        raise RecordRefused("no_messages")
    last = items[-1]
    if isinstance(last, dict) and "role" in last and last["role"] not in ASKING_ROLES:
        raise RecordRefused("last_not_user", role=str(last["role"])[:60])
    return _without_stand_in(parse_openai_messages(drop_listed_marks(raw), [*items, STAND_IN]))


def _without_stand_in(conversation: Conversation) -> Conversation:
    """Return the conversation without its last message, STAND_IN."""
    messages = conversation.messages[:-1]
    return conversation._replace(messages=messages, trained=None, losses=None)


def _read_answer(raw: RawRecord) -> str:
    """Return the verified answer of a record; "" if it has none. A number becomes its JSON text.

    Raises RecordRefused (bad_answer) if the answer is neither a string nor a number.
    """
    answer = raw.value(ANSWER)
    if answer is None:
        return ""
    # A whole number may be larger than any float, which `isfinite` would raise at.
    if type(answer) is int or (type(answer) is float and math.isfinite(answer)):
        return json.dumps(answer)
    if type(answer) is not str:
        raise RecordRefused("bad_answer")
    if not is_encodable(answer):
        raise RecordRefused("lone_surrogate")
    return answer


def parse_prompt_alpaca(raw: RawRecord) -> Prompt:
    """Read a question as in an Alpaca record, with the field `instruction`."""
    return Prompt(_read_question(raw), _read_answer(raw))


def _parse_question(raw: RawRecord) -> Conversation:
    """Return the conversation whose last message is the question of an Alpaca record."""
    messages = parse_alpaca_prompt(raw)
    has_system = messages[0]["role"] == "system"
    return _without_stand_in(
        make_conversation(drop_listed_marks(raw), [*messages, STAND_IN], int(has_system))
    )


_read_conversation = with_extras(_parse_messages)
_read_question = with_extras(_parse_question)
PROMPT_REASONS = {
    "last_not_user": (
        "The last message of the prompt is neither the user's nor a tool's, so the model has "
        "nothing to answer; the detail names its role."
    ),
    **TOOLS_OF_TEXT,
    "bad_answer": (
        "The verified answer is neither a string nor a number, or is empty or missing although the "
        "recipe names its field."
    ),
}
"Reason codes of prompts -> their explanations."
_ANSWER_SYNONYMS: dict[str, Any] = {
    # Of records with both, `answer` is the final answer, and `solution` the whole derivation.
    ANSWER: ("ground_truth", "answer", "expected_answer", "reference_answer", "solution")
}
PROMPT = Shape(
    name="prompt",
    gives=Prompt,
    fields=("prompt",),
    optional=(ANSWER, "tools"),
    structured=("prompt", "tools"),
    text_or_messages=("prompt",),
    extras=(VARIABLES, OBJECTS),
    options=("nulls",),
    also_called={**_ANSWER_SYNONYMS, "prompt": ("messages",)},
    guess=lambda *_: ({"nulls": "drop"},),
    reasons={
        **CONVERSATION_REASONS,
        **EXTRAS_REASONS,
        **PROMPT_REASONS,
        "unknown_tool_call": "The tool_call_id of a result is not the id of any call.",
    },
    parse=parse_prompt,
)
PROMPT_ALPACA = Shape(
    name="prompt_alpaca",
    gives=Prompt,
    fields=("instruction",),
    optional=("input", "history", "system", "tools", ANSWER),
    structured=("history", "tools"),
    skipped_if_false=SKIPPED_IF_FALSE,
    extras=(VARIABLES, OBJECTS),
    options=("joined_by",),
    also_called=_ANSWER_SYNONYMS,
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS | ALPACA_REASONS | PROMPT_REASONS,
    parse=parse_prompt_alpaca,
)
