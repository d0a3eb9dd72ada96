"""Reads and writes JSON at the speed of orjson, and with whole numbers of any size.

orjson makes a float of a whole number beyond 64 bits, and refuses a whole number beyond the largest
float. Python's own reader keeps every digit, but is several times slower. So it reads only JSON
that contains a long run of digits, unless orjson has found an object without floats. The search for
such a run takes 0.3 ns a byte.

Two sorts of numbers are refused. The first is a number with a fraction or an exponent that is
larger than any float, such as 1e400: Python would read it as infinity, which JSON cannot express.
The second is a number of more than 4,300 digits, which Python neither reads nor prints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import isinf
from typing import Any, NoReturn

import orjson

LONG_RUN = re.compile(rb"-[0-9]{19}|[0-9]{20}")
"""Matches the first digits of each whole number that does not fit 64 bits. A few numbers that do
fit begin in the same way.
"""
_STEPS = (9, 3)
"""`has_long_numbers` looks at each ninth byte of JSON. If digits are everywhere, as in base64, it
then looks at each third byte.
"""
_MOST_CANDIDATES = 1000
"How many runs of digits are examined before each third byte is looked at instead."
_MARKED = bytes(ord("d") if byte in b"0123456789" else ord(" ") for byte in range(256))
"A table for `bytes.translate`: a digit becomes `d`, any other byte becomes a space."
_WITHOUT_FLOATS = {str, int, bool, type(None)}
"Types of JSON values that are not floats and do not contain any."
TOO_LARGE = "infinity"
"A word of orjson's message about a number beyond the largest float."


class UnreadableNumber(ValueError):
    """Raised for a number in JSON that Python cannot represent, such as 1e400."""


def has_long_numbers(text: bytes) -> bool:
    """Check whether JSON contains a run of digits that may be a whole number beyond 64 bits. Digits
    inside strings count too.

    To be fast, it looks only at each ninth byte: a long number has at least two digits in a row
    there. Only around such a place are all bytes searched.
    """
    for step in _STEPS:
        # A number of 19 digits has at least this many digits in a row in the sample.
        run = b"d" * (19 // step)
        sample = text[::step].translate(_MARKED)
        is_last_step = step == _STEPS[-1]
        candidates = 0
        offset = sample.find(run)
        while offset >= 0 and (is_last_step or candidates < _MOST_CANDIDATES):
            # Search all bytes around the run.
            start = step * offset
            if LONG_RUN.search(text, max(0, start - step), start + 40):
                return True
            candidates += 1
            offset = sample.find(run, offset + 1)
        is_searched = offset < 0
        if is_searched:
            return False
    return False


def read_json(text: bytes | str) -> Any:
    """Return the value of JSON.

    Raises ValueError, with orjson's message, if `text` is not JSON.
    Raises UnreadableNumber if a number cannot be represented in Python.
    Raises RecursionError if lists and objects are nested too deeply.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if TOO_LARGE in str(error):
            return read_exactly(text)
        raise
    # Without this, half of the texts of 1 MB are read by Python, since they contain some identifier
    # or hash with as many digits: a tenth of a conversion.
    if _has_no_floats(value):
        return value
    raw = text.encode() if isinstance(text, str) else text
    return read_exactly(text) if has_long_numbers(raw) else value


def _has_no_floats(value: Any) -> bool:
    """Check whether a value that orjson has read is an object of strings, whole numbers, true,
    false and null. Then none of its numbers is beyond 64 bits, since orjson makes a float of such a
    number.
    """
    return type(value) is dict and _WITHOUT_FLOATS.issuperset(map(type, value.values()))


def read_exactly(text: bytes | str) -> Any:
    """Return the value of JSON, read by Python's own reader, which keeps all digits of a whole
    number.

    Raises the errors that `read_json` raises.
    """
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

    Args:
        value: the value.
        default: a function that returns a JSON value for an object of another type.
        option: flags of orjson, such as `orjson.OPT_SORT_KEYS`.

    Raises TypeError or ValueError if the value cannot be written as JSON, or contains a string that
    cannot be encoded as UTF-8.
    """
    try:
        return orjson.dumps(value, default, option)
    except TypeError:
        text = json.dumps(value, default=default, ensure_ascii=False, separators=(",", ":"))
        return text.encode()


def _parse_float(digits: str) -> float:
    """Return the float of a JSON number with a fraction or an exponent. Raises UnreadableNumber if
    it is larger than any float.
    """
    value = float(digits)
    if isinf(value):
        raise UnreadableNumber(f"the number {digits[:40]} is larger than any float")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    """Refuse NaN, Infinity and -Infinity, which Python's reader takes although they are not
    JSON.
    """
    raise json.JSONDecodeError(f"{constant} is not JSON", constant, 0)
