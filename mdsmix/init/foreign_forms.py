"""Forms of conversations that no shape reads, recognised by their fields, so that `mdsmix init` can
name the form and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mdsmix.init.data_files import FirstRecords
from mdsmix.kinds.turn_rows import is_message_text

EXAMPLE = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)
OR_READ = "or read the records with a function of your own (source.shape: my_shapes.py:read)"
CHANNELS = ("analysis", "commentary", "final")
"Channels of gpt-oss's answers."


class ForeignForm(NamedTuple):
    """A form of conversations that another program writes and no shape reads, such as Gemini's
    `contents`.
    """

    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    "Record -> whether it has this form."
    advice: str
    "How a user can convert such records."


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list, or the value itself if it is an object."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield item


def _is_gemini(record: Mapping[str, Any]) -> bool:
    """Check whether a record has the form of Gemini: `{"contents": [{"parts": ...}, ...]}`."""
    return any("parts" in turn for turn in _objects(record.get("contents")))


def _is_responses(record: Mapping[str, Any]) -> bool:
    """Check whether a record has the form of OpenAI's Responses interface: `input`, a string or a
    list of items, and `output`, a list of items. Messages are items with a role; other items have a
    type.
    """
    question = record.get("input")
    has_question = isinstance(question, str) or bool(list(_objects(question)))
    items = _objects(record.get("output"))
    return has_question and any("role" in item or "type" in item for item in items)


def _is_harmony(record: Mapping[str, Any]) -> bool:
    """Check whether a record has the form of gpt-oss: a message has a `channel`, as in CHANNELS."""
    messages = _objects(record.get("messages"))
    return any(message.get("channel") in CHANNELS for message in messages)


def _is_undecoded(record: Mapping[str, Any]) -> bool:
    """Check whether a field has a list of messages as text, as JSON or Python writes it. `datasets`
    and pandas write such fields to csv.
    """
    return any(isinstance(value, str) and is_message_text(value) for value in record.values())


FORMS = (
    ForeignForm(
        "Gemini (contents of parts)",
        _is_gemini,
        f"write each record as messages, as in {EXAMPLE}, with the role `assistant` instead of "
        f"`model` and systemInstruction as the first message, {OR_READ}",
    ),
    ForeignForm(
        "OpenAI's Responses (input and output items)",
        _is_responses,
        "write the items of input and output of each record as one list of messages, as in "
        f"{EXAMPLE}, {OR_READ}",
    ),
    ForeignForm(
        "harmony (gpt-oss's messages with a channel)",
        _is_harmony,
        "move each analysis into the key `thinking` of the message that follows it, and remove "
        f"`channel`, since the chat template of gpt-oss writes channels itself, {OR_READ}",
    ),
    ForeignForm(
        "messages as text (a string in place of a list)",
        _is_undecoded,
        "write the file again, as JSON Lines or parquet, with each string decoded: by json.loads, "
        f"or by ast.literal_eval if its quotes are single, {OR_READ}",
    ),
)


def find_foreign_form(head: FirstRecords) -> ForeignForm | None:
    """Return the form that at least half of the first records have; None if none of FORMS fits."""
    for form in FORMS:
        fitting = [record for record in head.objects if form.fits(record)]
        if fitting and 2 * len(fitting) >= len(head.objects):
            return form
    return None
