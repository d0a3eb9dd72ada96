"""Record shapes: how people write a document, a pair or a conversation into a JSON object.

A shape is one pure function from a decoded record to a `Document`, `Pair`, `Conversation` or
`Preference`; RecordRefused says why a record is none of these. A shape uses no I/O, no tokenizer
and no template. A further shape is one more file and one line in `SHAPES`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mdsmix.extensions import extension, version_of
from mdsmix.shapes.functions import function_shape, is_function
from mdsmix.shapes.messages import MESSAGES, OPENAI, PROMPT_COMPLETION
from mdsmix.shapes.preference import PREFERENCE, PREFERENCE_ALPACA, PREFERENCE_SHAREGPT
from mdsmix.shapes.shape import Fields, Shape
from mdsmix.shapes.sharegpt import FINEVISION, LLAVA, QWEN_VL, ROUNDS, SHAREGPT
from mdsmix.shapes.texts import ALPACA, PROMPT_RESPONSE, TEXT

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
    PREFERENCE_ALPACA,
    PREFERENCE_SHAREGPT,
)
SHAPES: dict[str, Shape] = {shape.name: shape for shape in _ALL}
ENTRY_POINTS = "mdsmix.shapes"
"The group by which other packages register a Shape."
OF = " of "


def published_name(shape: Shape) -> str:
    """The name by which a published stream knows a shape: `chatty of shapes-of-mine 1.2` where
    another package registers it.
    """
    version = "" if shape.name in SHAPES else version_of(ENTRY_POINTS, shape.name)
    return f"{shape.name}{OF}{version}" if version else shape.name


def find_shape(name: str | None, keys: Iterable[str]) -> Shape | None:
    """The shape of this name; without a name, the shape that follows from the keys of the source.
    None where there is none.
    """
    if name is not None:
        if is_function(name):
            return function_shape(name)
        name = name.partition(OF)[0]
        return SHAPES.get(name) or extension(ENTRY_POINTS, name)
    given = set(keys)
    return next((shape for shape in SHAPES.values() if shape.is_told_by(given)), None)


__all__ = ["SHAPES", "Fields", "Shape", "find_shape", "published_name"]
