"""JSON values exactly as they are written: at the speed of orjson, and with whole numbers of any
size.

orjson makes a float of a whole number beyond 64 bits, and refuses one beyond the largest float.
Python's own reader keeps every digit, but is several times slower, so it only reads JSON with a
long run of digits, which takes 0.3 ns a byte to find. A number with a fraction or an exponent that
no float can represent, such as 1e400, is refused: Python would make infinity of it, which is not
JSON. So is one of more than 4,300 digits, which Python neither reads nor prints.
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
"""Each ninth byte is sampled first, and then each third if the JSON has digits everywhere, as
base64 has.
"""
_FEW = 1000
"The most possible long numbers that are examined before every third byte is sampled instead."
_MARKED = bytes(ord("d") if byte in b"0123456789" else ord(" ") for byte in range(256))
"A translation table: `d` for a digit, a space for any other byte."
TOO_LARGE = "infinity"
"A word of orjson's message about a number beyond the largest float."


class UnreadableNumber(ValueError):
    """Raised for a number in JSON that has no form in Python."""


def has_long_numbers(text: bytes) -> bool:
    """Return whether there is a run of digits that may be a whole number beyond 64 bits, inside a
    string too.
    """
    for step in _STEPS:
        # Of 19 digits in a row, at least this many are sampled.
        run = b"d" * (19 // step)
        sample = text[::step].translate(_MARKED)
        candidates = 0
        offset = sample.find(run)
        while offset >= 0 and (candidates < _FEW or step == _STEPS[-1]):
            start = step * offset
            if _LONG.search(text, max(0, start - step), start + 40):
                return True
            offset = sample.find(run, offset + 1)
            candidates += 1
        if offset < 0:
            return False
    return False


def read_json(text: bytes | str) -> Any:
    """Return the value of JSON.

    Raises ValueError if it is not JSON (as orjson's error, with its message) or contains a number
    that has no form in Python (UnreadableNumber), and RecursionError if it nests too deep.
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
    """Return the value of JSON by Python's own reader. Raises as `read_json` does."""
    decoded = text.decode() if isinstance(text, bytes) else text
    try:
        return json.loads(decoded, parse_float=_parse_float, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnreadableNumber):
        raise
    except ValueError as error:  # more digits than Python's limit
        raise UnreadableNumber(str(error)) from None


def write_json(value: Any, default: Callable[[Any], Any] | None = None, option: int = 0) -> bytes:
    """Return the value as compact JSON. Only a value that orjson refuses, for example a whole
    number beyond 64 bits, is written by Python.

    Raises TypeError or ValueError if the value has no form in JSON, or contains a string that has
    none in UTF-8.
    """
    try:
        return orjson.dumps(value, default, option)
    except TypeError:
        text = json.dumps(value, default=default, ensure_ascii=False, separators=(",", ":"))
        return text.encode()


def _parse_float(digits: str) -> float:
    value = float(digits)
    if isinf(value):
        raise UnreadableNumber(f"no float is as large as {digits[:40]}")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise json.JSONDecodeError(f"{constant} is not JSON", constant, 0)
