"""Record shapes: how people write a document, a pair, a conversation, a preference or a prompt into
a JSON object.

A shape has a function that reads a decoded record, and returns a `Document`, `Pair`,
`Conversation`, `Preference`, `UnpairedPreference` or `Prompt`. The function raises RecordRefused
with a reason code if the record cannot be read. A new shape is one more file and one line in
`SHAPES`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mdsmix.extensions import describe_package, load_extension
from mdsmix.shapes.functions import FunctionName, is_function, make_function_shape
from mdsmix.shapes.messages import MESSAGES, OPENAI, PROMPT_COMPLETION
from mdsmix.shapes.preference import (
    PREFERENCE,
    PREFERENCE_ALPACA,
    PREFERENCE_OPENAI,
    PREFERENCE_SHAREGPT,
)
from mdsmix.shapes.prompt import PROMPT, PROMPT_ALPACA
from mdsmix.shapes.shape import Fields, Shape
from mdsmix.shapes.sharegpt import FINEVISION, LLAVA, QWEN_VL, ROUNDS, SHAREGPT
from mdsmix.shapes.texts import ALPACA, PROMPT_RESPONSE, TEXT
from mdsmix.shapes.unpaired_preference import UNPAIRED_PREFERENCE

_ALL = (
    TEXT,
    PROMPT_RESPONSE,
    MESSAGES,
    OPENAI,
    SHAREGPT,
    ROUNDS,
    ALPACA,
    LLAVA,
    QWEN_VL,
    FINEVISION,
    PROMPT_COMPLETION,
    PREFERENCE,
    PREFERENCE_OPENAI,
    PREFERENCE_ALPACA,
    PREFERENCE_SHAREGPT,
    PROMPT,
    PROMPT_ALPACA,
    UNPAIRED_PREFERENCE,
)
SHAPES: dict[str, Shape] = {shape.name: shape for shape in _ALL}
ENTRY_POINTS = "mdsmix.shapes"
"The group of entry points under which other packages register a Shape."
_OF = " of "


def published_name(shape: Shape) -> str:
    """Return the name under which a published stream stores its shape (how its records are
    written), such as `alpaca`.

    For a shape that another package registers, the package and its version follow:
    `chatty of shapes-of-mine 1.2`.
    """
    version = "" if shape.name in SHAPES else describe_package(ENTRY_POINTS, shape.name)
    return f"{shape.name}{_OF}{version}" if version else shape.name


def find_shape(name: str | None, keys: Iterable[str]) -> Shape | None:
    """Return the shape (how records are written, such as `alpaca`) of this name. Without a name,
    return the first shape whose fields fit the keys of the source: `prompt` and `response` fit the
    shape prompt_response.

    Return None if no shape has this name, or the keys fit no shape.

    Args:
        name: a recipe's `shape:`, or a name that `published_name` returned; None if the stream
            names no shape.
        keys: the keys of the recipe's `source:` that name fields of a record, such as `prompt`.
    """
    if name is None:
        field_keys = set(keys)
        for shape in SHAPES.values():
            if shape.follows_from(field_keys):
                return shape
        return None
    if is_function(name):
        return make_function_shape(FunctionName.from_text(name))
    name = name.partition(_OF)[0]
    return SHAPES.get(name) or load_extension(ENTRY_POINTS, name)


__all__ = ["SHAPES", "Fields", "Shape", "find_shape", "published_name"]
