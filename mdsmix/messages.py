"""Makes parts of sentences for messages: numbers with their nouns, verbs that agree, and the key
that a user most likely meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sized
from decimal import Decimal
from fractions import Fraction
from itertools import islice

WRITTEN = "\n\t\xa0\u3000\u200c\u200d"
"""Characters that ordinary texts need though Python calls them unprintable: line breaks and tabs;
the spaces of French and Chinese; the joiners inside Persian and Hindi words and in families of
emoji. None of them controls a terminal or changes a text's direction.
"""
NEAR = 0.65
"""How similar a known key must be to one that was written, by difflib: 0.78 for seq_len and
max_seq_len, and 0.6 for seed and shared, which nobody confuses.
"""
Say = Callable[[str], None]
"A function that shows a sentence to the user at once."


def plural(count: int, word: str) -> str:
    """Return a count with its noun: `1 sample`, `2,000 samples`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def join_counts(counts: Mapping[str, int]) -> str:
    """Return counts with their names: `2 empty, 1,000 not_json`."""
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())


def format_percent(share: Fraction | str) -> str:
    """Return a fraction, or its form in a manifest (`41/500`), in percent: `8.2%`."""
    number = Decimal(f"{float(100 * Fraction(share)):.6g}")
    return f"{number:f}%"  # plain digits, never 8e-05%


def join_names(names: Collection[str], limit: int = 3) -> str:
    """Return the first `limit` names and how many follow: `a, b, c and 4 more`."""
    shown = ", ".join(islice(names, limit))
    hidden = len(names) - limit
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def choose_verb(things: Sized, singular: str, plural: str) -> str:
    """Return the verb that agrees with the things: `singular` for one thing, otherwise `plural`."""
    return singular if len(things) == 1 else plural


def make_printable(text: str, keep: str = "") -> str:
    """Return the text with its unprintable characters written as Python writes them: `\\x1b`.

    Such characters (escape codes, line breaks, changes of direction) could control a terminal, and
    names and samples may come from anyone.

    Args:
        text: the text.
        keep: unprintable characters that stay.
    """
    characters = list[str]()
    for character in text:
        if character.isprintable() or character in keep:
            characters.append(character)
        else:
            characters.append(ascii(character).strip("'"))
    return "".join(characters)


def format_field(name: str) -> str:
    """Return the name of a record's field without unprintable characters. A name that is empty, or
    begins or ends with a space, is in quotes, since nobody would see that.
    """
    is_visible = bool(name) and name == name.strip()
    return make_printable(name if is_visible else f"'{name}'")


def flatten_error(error: BaseException) -> str:
    """Return the message of another library's error on one line and without its full stop, so that
    it fits into a sentence of mdsmix.
    """
    return " ".join(str(error).split()).rstrip(".")


def format_yaml_value(value: object) -> str:
    """Return a value as YAML writes it: `null`, `true`, `7`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def find_nearest(key: str, known_keys: Collection[str]) -> str | None:
    """Return the known key that was probably meant; None if no key is similar."""
    matches = difflib.get_close_matches(key, sorted(known_keys), n=1, cutoff=NEAR)
    return matches[0] if matches else None


def suggest_key(key: str, known_keys: Collection[str], intro: str = "the keys are") -> str:
    """Return the end of a sentence on an unknown key: `did you mean source?`, or, if no known key
    is similar, `the keys are path, source.`

    Args:
        key: the unknown key.
        known_keys: the keys that are known.
        intro: the words before the list of all known keys.
    """
    similar = find_nearest(key, known_keys)
    return f"did you mean {similar}?" if similar else f"{intro} {', '.join(known_keys)}."
