"""Refuses wrong arguments of the Python API, each in one sentence. On the command line Typer
refuses them; a function of Python would take any value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from mdsmix.errors import RecipeError

LEAST = {
    **dict.fromkeys(("limit", "workers", "nodes", "gpus", "batch"), 1),
    **dict.fromkeys(("samples", "seed", "per_reason", "common"), 0),
}
"Name of an argument that is a whole number or None -> its least value."
TEXTS = ("overrides", "only", "reasons", "evaluations")
"""Arguments that are lists of strings. A single string is refused: its letters would be the
elements.
"""
PATHS = ("stream", "out", "into", "run")
"Arguments that are a path or a URL."
EVALS = ("look", "keep", "drop")
MAY_BE_NONE = {*LEAST, "tokens_per_second"}


class _Rule(NamedTuple):
    """What the values of one argument may be."""

    is_kept: Callable[[Any], bool]
    "Whether a value may be."
    allowed: str
    "The values that may be, for the message."


def _are_positions(value: Any) -> bool:
    """Check whether a value is a list of whole numbers from 0."""
    return _is_list_of(int, value) and min(value, default=0) >= 0


RULES = {
    "to": _Rule(lambda value: isinstance(value, str), 'the name of a format, such as "parquet"'),
    "engine": _Rule(lambda value: isinstance(value, str), '"local", "ray" or "ray://HOST:PORT"'),
    "numbers": _Rule(_are_positions, "a list of whole numbers from 0"),
    "evals": _Rule(lambda value: value in EVALS, f"one of {', '.join(EVALS)}"),
    "progress": _Rule(
        lambda value: isinstance(value, bool) or callable(value),
        "True, False, or a function that takes a Progress",
    ),
    "tokens_per_second": _Rule(lambda value: value > 0, "above 0"),
}
"Name of an argument -> its rule, if no other argument has the same one."


def refuse_wrong_arguments(
    arguments: Mapping[str, Any], required: Collection[str] = ("stream",)
) -> None:
    """Raise RecipeError if an argument has a value that it cannot have.

    Args:
        arguments: the arguments of a function of the API, by their names.
        required: the paths among them that may not be None.
    """
    for name, value in arguments.items():
        if name in ("mix", "streams"):
            _refuse_no_mix(name, value)
        elif value is None and (name in MAY_BE_NONE or (name in PATHS and name not in required)):
            continue
        elif name in LEAST:
            least = LEAST[name]
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or value < least:
                raise _make_refusal(name, value, f"a whole number from {least}")
        elif name in TEXTS:
            if not _is_list_of(str, value):
                raise _make_refusal(name, value, f'a list of strings, such as {name}=["..."]')
        elif name in PATHS:
            if not isinstance(value, (str, os.PathLike)):
                raise _make_refusal(name, value, "a path or URL")
        elif name in RULES:
            rule = RULES[name]
            if not rule.is_kept(value):
                raise _make_refusal(name, value, rule.allowed)


def _is_list_of(kind: type, value: Any) -> bool:
    """Check whether a value is a list or another collection of elements of this type.

    A generator does not count: it yields its elements only once, and would then look like an empty
    list, which often means all.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        return False
    return all(isinstance(element, kind) for element in value)


def _refuse_no_mix(name: str, value: Any) -> None:
    """Raise RecipeError if the value cannot be a mix: an empty list, a list of anything else than
    paths and URLs, or a value that is neither a path nor keys and values.
    """
    if isinstance(value, (list, tuple)):
        is_mix = bool(value) and all(isinstance(stream, (str, os.PathLike)) for stream in value)
    else:
        is_mix = value is not None and not isinstance(value, (bytes, int, float))
    if not is_mix:
        raise _make_refusal(
            name, value, "a recipe, a training YAML, or a list of published streams"
        )


def _make_refusal(name: str, value: Any, words: str) -> RecipeError:
    return RecipeError(f"{name} is {repr(value)[:60]}; it must be {words}.")
