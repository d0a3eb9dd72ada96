"""JSON values as their texts say: at the speed of orjson, and with whole numbers of any size.

orjson makes a float of a whole number beyond 64 bits, and refuses one beyond the largest float.
Python's own reader keeps every digit, but is several times slower, so it reads only texts with a
long run of digits, which takes 0.3 ns a byte to find. A number with a fraction or an exponent that
no float can hold, such as 1e400, is refused: Python would make infinity of it, which is not JSON.
So is one of more than 4,300 digits, which Python neither reads nor prints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import isinf
from typing import Any, NoReturn

import orjson

_LONG = re.compile(rb"-[0-9]{19}|[0-9]{20}")
"The first digits of any whole number that does not fit 64 bits, and of some that do."
_STEPS = (9, 3)
"""Each ninth byte is looked at first, and each third of a text with digits everywhere, as base64
has them.
"""
_FEW = 1000
"The most places that are looked at closely before each third byte is."
_MARKED = bytes(ord("d") if byte in b"0123456789" else ord(" ") for byte in range(256))
TOO_LARGE = "infinity"
"A word of orjson's message about a number beyond the largest float."


class UnreadableNumber(ValueError):
    """Raised for a number of a JSON text that has no form in Python."""


def has_long_numbers(text: bytes) -> bool:
    """Return whether the text holds a run of digits that may be a whole number beyond 64 bits, in a
    string too.
    """
    for step in _STEPS:
        # Of 19 digits so many are among the bytes that are looked at.
        looked_at, run = text[::step].translate(_MARKED), b"d" * (19 // step)
        at, places = looked_at.find(run), 0
        while at >= 0 and (places < _FEW or step == _STEPS[-1]):
            first = step * at
            if _LONG.search(text, max(0, first - step), first + 40):
                return True
            at, places = looked_at.find(run, at + 1), places + 1
        if at < 0:
            return False
    return False


def read_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if the text is not JSON (as orjson's error, with its message) or holds a
    number that has no form in Python (UnreadableNumber), and RecursionError if it nests too deep.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if TOO_LARGE in str(error):
            return read_exactly(text)
        raise
    raw = text.encode() if isinstance(text, str) else text
    return read_exactly(text) if has_long_numbers(raw) else value


def read_exactly(text: bytes | str) -> Any:
    """Return the value of a JSON text as Python's own reader has it. Raises as `read_json` does."""
    whole = text.decode() if isinstance(text, bytes) else text
    try:
        return json.loads(whole, parse_float=_float, parse_constant=_refuse)
    except (json.JSONDecodeError, UnreadableNumber):
        raise
    except ValueError as error:  # more digits than Python's limit
        raise UnreadableNumber(str(error)) from None


def write_json(value: Any, default: Callable[[Any], Any] | None = None, option: int = 0) -> bytes:
    """Return the value as compact JSON. Only a value that orjson refuses, for example a whole
    number beyond 64 bits, is written by Python.

    Raises TypeError or ValueError if the value has no form in JSON, or holds a text that has none
    in UTF-8.
    """
    try:
        return orjson.dumps(value, default, option)
    except TypeError:
        text = json.dumps(value, default=default, ensure_ascii=False, separators=(",", ":"))
        return text.encode()


def _float(digits: str) -> float:
    value = float(digits)
    if isinf(value):
        raise UnreadableNumber(f"no float is as large as {digits[:40]}")
    return value


def _refuse(constant: str) -> NoReturn:
    raise json.JSONDecodeError(f"{constant} is not JSON", constant, 0)
