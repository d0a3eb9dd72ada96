"""Forms of conversations that no shape reads, known by their fields: so `mdsmix init` can name them
and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mdsmix.init.data_files import FirstRecords

PLAIN = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)
OWN = "write them so, or read them by a function of your own (source.shape: my_shapes.py:read)"
CHANNELS = ("analysis", "commentary", "final")
"Channels of gpt-oss's answers."


class ForeignForm(NamedTuple):
    """A form that an interface or a model's own format gives to conversations."""

    name: str
    is_of: Callable[[Mapping[str, Any]], bool]
    "Whether a record has this form."
    way: str
    "What a user can do."


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            yield each


def _is_gemini(record: Mapping[str, Any]) -> bool:
    return any("parts" in turn for turn in _objects(record.get("contents")))


def _is_responses(record: Mapping[str, Any]) -> bool:
    """OpenAI's Responses: lists of items, of which messages have a role and others a type."""
    items = [*_objects(record.get("output"))]
    asked = record.get("input")
    is_asked = isinstance(asked, str) or any(True for _ in _objects(asked))
    return is_asked and any("role" in item or "type" in item for item in items)


def _is_harmony(record: Mapping[str, Any]) -> bool:
    messages = _objects(record.get("messages"))
    return any(message.get("channel") in CHANNELS for message in messages)


FORMS = (
    ForeignForm(
        "Gemini (contents of parts)",
        _is_gemini,
        f"the role model is the assistant, and systemInstruction the first message: as {PLAIN}; {OWN}",
    ),
    ForeignForm(
        "OpenAI's Responses (input and output items)",
        _is_responses,
        f"the items of input and output are one list of messages: as {PLAIN}; {OWN}",
    ),
    ForeignForm(
        "harmony (gpt-oss's messages with a channel)",
        _is_harmony,
        "the chat template of gpt-oss writes channels itself: make the analysis the key `thinking` of the "
        f"message that follows it, and take `channel` out; {OWN}",
    ),
)


def foreign_form(head: FirstRecords) -> ForeignForm | None:
    """Return the form that most of the first records have; None if it is none of FORMS."""
    for form in FORMS:
        count = sum(map(form.is_of, head.objects))
        if count and 2 * count >= len(head.objects):
            return form
    return None
