"""Fields beside those that a recipe names, which any record of a conversation may have and which
change what is trained.

`chat_template_kwargs` is TRL's column: an object of variables that `apply_chat_template` gets.
`loss_mask` is a list of marks, which `conversation_rules` reads. `objects` is ms-swift's: what its
`<ref-object>` and `<bbox>` in the texts stand for. ms-swift prints them in the form of one model,
and boxes in the pixels of that model's images, so such a record is set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mdsmix.record import Conversation, RecordRefused, is_encodable
from mdsmix.schema import shorten
from mdsmix.shapes.conversation_rules import MASK, decoded, followed
from mdsmix.shapes.shape import RawRecord

EXTRAS_REASONS = {
    "bad_template_kwargs": (
        "The record's chat_template_kwargs are no object, or name what mdsmix itself "
        "gives to the template, such as tools."
    ),
    "objects_not_filled": (
        "Texts hold <ref-object> or <bbox>, for which ms-swift fills in the record's "
        "objects by the rules of one model."
    ),
}
"Reason codes of a shape that is read `with_extras` -> their explanations."

VARIABLES, OBJECTS = "chat_template_kwargs", "objects"
EXTRAS = (VARIABLES, MASK, OBJECTS)
NAMES = frozenset(EXTRAS)
FILLED_IN = ("<ref-object>", "<bbox>")
"Placeholders in texts for which ms-swift fills in the record's `objects`."
OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
)
"Variables that every rendering gets from mdsmix, whatever a record says."
ARGUMENTS = frozenset(
    {"conversation", "chat_template", "continue_final_message", "tokenize", "padding"}
    | {"truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)
"Arguments of transformers' `apply_chat_template` that are no variables of a template."


def with_extras(parse: Callable[[RawRecord], Any]) -> Callable[[RawRecord], Any]:
    """The function that reads a record by `parse`, and then its extras."""

    def parse_with_extras(raw: RawRecord) -> Any:
        found = parse(raw)
        if NAMES.isdisjoint(raw.record) and not any("." in path for path in raw.fields.values()):
            return found
        variables = variables_of(raw.extra(VARIABLES))
        is_one = isinstance(found, Conversation)
        said = [found] if is_one else [half for half in found if isinstance(half, Conversation)]
        if raw.extra(OBJECTS) and any(word in each.all_text for word in FILLED_IN for each in said):
            raise RecordRefused("objects_not_filled")
        if not variables or not said:
            return found
        if is_one:
            return found._replace(variables=variables)
        return found._replace(
            chosen=found.chosen._replace(variables=variables),
            rejected=found.rejected._replace(variables=variables),
        )

    return parse_with_extras


def variables_of(value: Any) -> Mapping[str, Any] | None:
    """The variables of a record's `chat_template_kwargs`, an object or its JSON text; None without
    any.

    Null entries are left out at any depth: Arrow adds them where the objects of a column differ.

    Raises:
        RecordRefused: the value is no object, or names a variable that is not the record's to give
        (bad_template_kwargs).
    """
    given = value
    if isinstance(value, str):
        value = decoded(value) if value.strip() else None
        value = {} if given.strip() in ("", "null") else value
    if value is None and not isinstance(given, str):
        return None
    if not isinstance(value, dict):
        raise RecordRefused("bad_template_kwargs", why=f"it is {shorten(given)}, no object")
    variables: dict[str, Any] = followed(value, True)
    for name in variables:
        if name in OWN_VARIABLES:
            raise RecordRefused("bad_template_kwargs", why=f"mdsmix itself gives {name}")
        if name in ARGUMENTS:
            why = f"{name} is an argument of apply_chat_template, no variable of a template"
            raise RecordRefused("bad_template_kwargs", why=why)
    if not is_encodable("\n".join(Conversation([], variables=variables).texts)):
        raise RecordRefused("lone_surrogate")
    return variables or None
