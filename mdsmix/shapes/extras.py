"""Reads extras: fields of a conversation's record that change what is trained, although no key of
the recipe names them.

- `chat_template_kwargs`, as in TRL: an object of variables that `apply_chat_template` gets.
- `loss_mask`: a list of marks (which messages are trained), which `training_marks` reads.
- `objects`, as in ms-swift: names and boxes that replace `<ref-object>` and `<bbox>` in the texts.
  ms-swift writes boxes in the pixels of one model's images, so a record that needs them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mdsmix.record import Conversation, RecordRefused, is_encodable
from mdsmix.schema import shorten_value
from mdsmix.shapes.nested_values import copy_nested, decode_json
from mdsmix.shapes.shape import RawRecord
from mdsmix.shapes.training_marks import MASK

EXTRAS_REASONS = {
    "bad_template_kwargs": (
        "The record's chat_template_kwargs are not an object, or they set a variable that mdsmix "
        "itself gives to the chat template, such as tools."
    ),
    "objects_not_filled": (
        "Texts of the record contain <ref-object> or <bbox>. ms-swift replaces these with the "
        "record's objects by the rules of one model, and mdsmix cannot."
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
"Variables that mdsmix itself gives to every chat template, and that a record cannot set."
ARGUMENTS = frozenset(
    {"conversation", "chat_template", "continue_final_message", "tokenize", "padding"}
    | {"truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)
"Arguments of transformers' `apply_chat_template` that are not variables of a template."


def with_extras(parse: Callable[[RawRecord], Any]) -> Callable[[RawRecord], Any]:
    """Return a function that reads a record with `parse`, and then its extras: the fields
    `chat_template_kwargs` (variables of the chat template) and `objects`, which no key of the
    recipe names.

    Args:
        parse: a function that returns a Conversation or a Preference.
    """

    def parse_with_extras(raw: RawRecord) -> Any:
        """Read a record with `parse`, and add the variables of its field `chat_template_kwargs`.

        Raises RecordRefused (objects_not_filled) if its texts contain `<ref-object>` or `<bbox>`
        and it has the field `objects`: ms-swift would fill them in by the rules of one model, and
        mdsmix cannot.
        """
        record = parse(raw)
        # Most records have no extras at the top, nor next to a field that is named by a path.
        has_paths = any("." in path for path in raw.fields.values())
        if NAMES.isdisjoint(raw.record) and not has_paths:
            return record
        variables = read_variables(raw.extra(VARIABLES))
        is_conversation = isinstance(record, Conversation)
        # A preference is a tuple: the prompt with each of the two answers, and the rewards.
        members = [record] if is_conversation else record
        conversations = [member for member in members if isinstance(member, Conversation)]
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
    """Return the variables in a record's `chat_template_kwargs`; None if the record sets none.

    Null entries are dropped at any depth, since Arrow fills in nulls if the objects of a column
    have different keys.

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
    variables: dict[str, Any] = copy_nested(tree, drops_nulls=True)
    for name in variables:
        if name in OWN_VARIABLES:
            why = f"{name} is set by mdsmix itself, so a record cannot set it"
            raise RecordRefused("bad_template_kwargs", why=why)
        if name in ARGUMENTS:
            why = f"{name} is an argument of apply_chat_template, not a variable of a template"
            raise RecordRefused("bad_template_kwargs", why=why)
    if not is_encodable("\n".join(Conversation([], variables=variables).texts)):
        raise RecordRefused("lone_surrogate")
    return variables or None
