"""Parts of sentences: numbers with their nouns, verbs that agree, the key that was most likely
meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sized
from decimal import Decimal
from fractions import Fraction
from itertools import islice

WRITTEN = "\n\t\xa0\u3000\u200c\u200d"
"""Characters that ordinary texts need though Python calls them unprintable: line breaks and tabs;
the spaces of French and Chinese; the joiners that hold Persian and Hindi words, and families of
emoji, together. None steers a terminal or changes a text's direction.
"""
Say = Callable[[str], None]
"Takes a sentence that the user should read now."


def plural(count: int, word: str) -> str:
    """`1 sample`, `2,000 samples`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def join_counts(counts: Mapping[str, int]) -> str:
    """`2 empty, 1,000 not_json`."""
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())


def format_percent(share: Fraction | str) -> str:
    """A fraction, or its text in a manifest (`41/500`), in percent: `8.2%`."""
    number = Decimal(f"{float(100 * Fraction(share)):.6g}")
    return f"{number:f}%"  # plain digits, never 8e-05%


def join_names(names: Collection[str], most: int = 3) -> str:
    """The first `most` names and the number of the rest: `a, b, c and 4 more`."""
    more = len(names) - most
    return ", ".join(islice(names, most)) + (f" and {more} more" if more > 0 else "")


def choose_verb(things: Sized, one: str, more: str) -> str:
    """The verb that agrees with the number of things: `one` for one thing, else `more`."""
    return one if len(things) == 1 else more


def make_printable(text: str, keep: str = "") -> str:
    """The text with characters that steer a terminal (escape codes, line breaks, changes of
    direction) written as `\\x1b`: names and samples may come from anyone. `keep`: unprintable
    characters that stay.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def flatten_error(error: Exception) -> str:
    """The words of another library's error as a part of one of our sentences."""
    return " ".join(str(error).split()).rstrip(".")


def format_yaml_value(value: object) -> str:
    """The value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def find_nearest(key: str, known: Collection[str]) -> str | None:
    """The known key that was probably meant; None where no key is near."""
    return next(iter(difflib.get_close_matches(key, sorted(known), 1, 0.5)), None)


def suggest_key(key: str, known: Collection[str], are: str = "the keys are") -> str:
    """The end of a sentence on an unknown key: the nearest known key, else all known keys."""
    near = find_nearest(key, known)
    return f"did you mean {near}?" if near else f"{are} {', '.join(known)}."
