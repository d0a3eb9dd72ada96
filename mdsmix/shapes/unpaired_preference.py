"""Unpaired preferences: an answer to a prompt, with a label that says whether it is desirable.

TRL writes them as `{"prompt": ..., "completion": ..., "label": true}`, for Kahneman-Tversky
optimization (KTO). Prompt and completion are strings, or lists of messages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mdsmix.record import Conversation, Message, Pair, RecordRefused
from mdsmix.shapes.conversation_rules import CONVERSATION_REASONS, read_messages
from mdsmix.shapes.extras import EXTRAS_REASONS, OBJECTS, VARIABLES, with_extras
from mdsmix.shapes.messages import parse_openai_messages
from mdsmix.shapes.shape import RawRecord, Shape
from mdsmix.shapes.spans import drop_losses
from mdsmix.shapes.tools import TOOLS_OF_TEXT
from mdsmix.shapes.training_marks import drop_listed_marks

LABEL = "label"
"The key of `source:` for the field with the label, and the column that stores it."
_LABELS_OF_PANDAS = {"True": True, "False": False}
"Labels as pandas writes them to a csv file; other cells with a label are read as JSON."


class UnpairedPreference(NamedTuple):
    """An answer to a prompt, with the label that says whether it is desirable."""

    answer: Pair | Conversation
    "The prompt and the answer to it, which is the last message of a conversation."
    is_desirable: bool


def parse_unpaired_preference(raw: RawRecord) -> UnpairedPreference:
    """Read a record with the fields `prompt`, `completion` and `label`.

    Raises RecordRefused if a field is missing or of another type, or messages break a rule.
    """
    are_texts = [isinstance(raw.required_value(key), str) for key in ("prompt", "completion")]
    is_desirable = _read_label(raw)
    if not all(are_texts):
        return UnpairedPreference(_read_conversation(raw), is_desirable)
    if raw.value("tools"):
        raise RecordRefused("tools_of_text")
    return UnpairedPreference(Pair(raw.text("prompt"), raw.text("completion")), is_desirable)


def _read_label(raw: RawRecord) -> bool:
    """Return the label. Raises RecordRefused (bad_label) if it is not true, false, 1 or 0."""
    label = raw.required_value(LABEL)
    if isinstance(label, str):
        label = _LABELS_OF_PANDAS.get(label)
    if type(label) not in (bool, int) or label not in (0, 1):
        raise RecordRefused("bad_label")
    return bool(label)


def _parse_messages(raw: RawRecord) -> Conversation:
    """Return the conversation of a prompt and its completion.

    Raises RecordRefused if the completion has no message (no_messages) or several messages
    (several_completions), or is marked as not used for training (nothing_trained).
    """
    prompt = _read_messages_of(raw, "prompt", "user")
    completion = _read_messages_of(raw, "completion", "assistant")
    if not completion:
        raise RecordRefused("no_messages")
    if len(completion) > 1:
        raise RecordRefused("several_completions")
    # A list of marks cannot fit both lists, so it is ignored.
    conversation = parse_openai_messages(drop_listed_marks(raw), [*prompt, *completion])
    if conversation.trained and not conversation.trained[-1]:
        raise RecordRefused("nothing_trained")
    return drop_losses(conversation)._replace(trained=None)


def _read_messages_of(raw: RawRecord, key: str, role: str) -> list[Any]:
    """Return the messages in a field, which contains a list, one message or a string.

    Args:
        raw: the record.
        key: `prompt` or `completion`.
        role: the role of the message that a string becomes.
    """
    value = raw.required_value(key)
    if isinstance(value, str):
        message: Message = {"role": role, "content": raw.text(key)}
        return [message]
    if isinstance(value, dict):
        raw = raw._replace(record={**raw.record, raw.fields[key]: [value]})
    return read_messages(raw, key)


_read_conversation = with_extras(_parse_messages)
UNPAIRED_REASONS = {
    "bad_label": "The label of the completion is not true, false, 1 or 0.",
    "several_completions": (
        "The completion has several messages, such as a call, its result and an answer. Trainers "
        "of unpaired preferences train all text after the prompt, so they would train results of "
        "tools and questions too."
    ),
    **TOOLS_OF_TEXT,
}
"Reason codes of unpaired preferences -> their explanations."
UNPAIRED_PREFERENCE = Shape(
    name="unpaired_preference",
    gives=UnpairedPreference,
    fields=("prompt", "completion", LABEL),
    optional=("tools",),
    structured=("prompt", "completion", LABEL, "tools"),
    text_or_messages=("prompt", "completion"),
    extras=(VARIABLES, OBJECTS),
    options=("nulls",),
    guess=lambda *_: ({"nulls": "drop"},),
    reasons={
        **CONVERSATION_REASONS,
        **EXTRAS_REASONS,
        **UNPAIRED_REASONS,
        "unknown_tool_call": "The tool_call_id of a result is not the id of any call.",
    },
    parse=parse_unpaired_preference,
)
