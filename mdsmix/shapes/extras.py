"""Fields that a record of any conversation shape may have although its recipe does not name them,
and that change what is trained.

`chat_template_kwargs` is TRL's column: an object of variables that `apply_chat_template` gets.
`loss_mask` is a list of marks, which `conversation_rules` reads. `objects` is ms-swift's: it
replaces `<ref-object>` and `<bbox>` in the texts. ms-swift prints them in the form of one model,
and boxes in the pixels of that model's images, so such a record is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mdsmix.record import Conversation, RecordRefused, is_encodable
from mdsmix.schema import shorten_value
from mdsmix.shapes.conversation_rules import MASK, copy_nested, decode_json
from mdsmix.shapes.shape import RawRecord

EXTRAS_REASONS = {
    "bad_template_kwargs": (
        "The record's chat_template_kwargs are not an object, or name a variable that mdsmix "
        "itself gives to the template, such as tools."
    ),
    "objects_not_filled": (
        "Texts contain <ref-object> or <bbox>, which ms-swift replaces with the record's "
        "objects by the rules of one model."
    ),
}
"Reason codes of a shape that is read `with_extras` -> their explanations."

VARIABLES = "chat_template_kwargs"
OBJECTS = "objects"
EXTRAS = (VARIABLES, MASK, OBJECTS)
NAMES = frozenset(EXTRAS)
FILLED_IN = ("<ref-object>", "<bbox>")
"Placeholders in texts that ms-swift replaces with the record's `objects`."
OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
)
"Variables that every rendering gets from mdsmix, and that a record cannot set."
ARGUMENTS = frozenset(
    {"conversation", "chat_template", "continue_final_message", "tokenize", "padding"}
    | {"truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)
"Arguments of transformers' `apply_chat_template` that are not variables of a template."


def with_extras(parse: Callable[[RawRecord], Any]) -> Callable[[RawRecord], Any]:
    """Return a function that reads a record with `parse`, and then its extras."""

    def parse_with_extras(raw: RawRecord) -> Any:
        """Read a record with `parse`, add the variables of its `chat_template_kwargs`, and refuse
        it if its texts contain placeholders that its `objects` would replace.
        """
        record = parse(raw)
        if NAMES.isdisjoint(raw.record) and not any("." in path for path in raw.fields.values()):
            return record
        variables = read_variables(raw.extra(VARIABLES))
        is_conversation = isinstance(record, Conversation)
        # A preference is its two halves, the prompt with each answer, and its rewards.
        halves = [record] if is_conversation else record
        conversations = [half for half in halves if isinstance(half, Conversation)]
        if raw.extra(OBJECTS):
            for conversation in conversations:
                if any(word in conversation.all_text for word in FILLED_IN):
                    raise RecordRefused("objects_not_filled")
        if not variables or not conversations:
            return record
        if is_conversation:
            return record._replace(variables=variables)
        return record._replace(
            chosen=record.chosen._replace(variables=variables),
            rejected=record.rejected._replace(variables=variables),
        )

    return parse_with_extras


def read_variables(value: Any) -> Mapping[str, Any] | None:
    """Return the variables in a record's `chat_template_kwargs`; None if there are none.

    Null entries are dropped at any depth, since Arrow adds them if the objects of a column have
    different keys.

    Args:
        value: an object, or its JSON text.

    Raises RecordRefused (bad_template_kwargs) if the value is not an object, or names a variable
    that a record cannot set.
    """
    tree = value
    if isinstance(value, str):
        is_blank = value.strip() in ("", "null")
        tree = {} if is_blank else decode_json(value)
    elif value is None:
        return None
    if not isinstance(tree, dict):
        raise RecordRefused(
            "bad_template_kwargs", why=f"it is {shorten_value(value)}, not an object"
        )
    variables: dict[str, Any] = copy_nested(tree, True)
    for name in variables:
        if name in OWN_VARIABLES:
            raise RecordRefused("bad_template_kwargs", why=f"mdsmix itself gives {name}")
        if name in ARGUMENTS:
            why = f"{name} is an argument of apply_chat_template, not a variable of a template"
            raise RecordRefused("bad_template_kwargs", why=why)
    if not is_encodable("\n".join(Conversation([], variables=variables).texts)):
        raise RecordRefused("lone_surrogate")
    return variables or None
