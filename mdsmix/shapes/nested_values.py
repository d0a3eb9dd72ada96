"""Copies decoded JSON values, such as messages and tools, and finds nulls in them. A copy may leave
out nulls, and is refused if lists and objects are nested too deeply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from mdsmix.json_values import read_exactly
from mdsmix.record import RecordRefused

_SCALARS = frozenset({str, int, float, bool})
MAX_LEVELS = 200
"""How deeply lists and objects in messages and tools may be nested. Templates and Python itself
fail at some 900 levels.
"""


def copy_nested(value: Any, drops_nulls: bool, levels: int = MAX_LEVELS) -> Any:
    """Return a deep copy of a decoded JSON value.

    Args:
        value: the value.
        drops_nulls: whether null entries of objects are left out of the copy.
        levels: the largest number of levels of nested lists and objects.

    Raises RecordRefused (too_deep) if the value has more levels.
    """
    if isinstance(value, (dict, list)) and not levels:
        raise RecordRefused("too_deep")
    if isinstance(value, list):
        return [copy_nested(inner, drops_nulls, levels - 1) for inner in value]
    if not isinstance(value, dict):
        return value
    # Most objects have only strings and numbers.
    if _SCALARS.issuperset(map(type, value.values())):
        return {**value}
    return {
        key: inner if type(inner) is str else copy_nested(inner, drops_nulls, levels - 1)
        for key, inner in value.items()
        if inner is not None or not drops_nulls
    }


def contains_null(value: Any) -> bool:
    """Check whether an object has a null entry, in a value or anywhere inside it. A null under the
    key `content` does not count.

    Most values have no null, or only nulls under `content`: their JSON shows it in a tenth of the
    time of a search through all objects.
    """
    try:
        content = orjson.dumps(value)
    except TypeError:  # a value that JSON does not have, such as a date of an Arrow file
        return _finds_null(value)
    # A quotation mark inside a string is escaped, so these two are always keys.
    nulls_of_content = content.count(b',"content":null') + content.count(b'{"content":null')
    return content.count(b":null") != nulls_of_content and _finds_null(value)


def _finds_null(value: Any) -> bool:
    """Check the objects of a value as `contains_null` describes."""
    if isinstance(value, dict):
        return any(
            key != "content" if inner is None else _finds_null(inner)
            for key, inner in value.items()
        )
    return isinstance(value, list) and any(map(_finds_null, value))


def find_null_paths(value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the keys that lead to each null entry of an object, without the numbers of list
    entries: `("tool_calls", "function", "strict")`.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if inner is None:
                yield (key,)
            else:
                yield from ((key, *path) for path in find_null_paths(inner))
    elif isinstance(value, list):
        for item in value:
            yield from find_null_paths(item)


def decode_json(value: Any) -> Any:
    """Parse a string as JSON, and return None if the string is not valid JSON. Return a value of
    any other type unchanged. Whole numbers of any size keep all digits.

    Raises RecordRefused (too_deep) if the JSON is nested too deeply.
    """
    if not isinstance(value, str):
        return value
    try:
        # The copy raises an error for a value that is nested too deeply.
        return copy_nested(read_exactly(value), drops_nulls=False)
    except ValueError:
        return None
    except RecursionError:
        raise RecordRefused("too_deep") from None
