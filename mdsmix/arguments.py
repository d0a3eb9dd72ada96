"""Refuses wrong arguments of the Python API, each in one sentence. On the command line Typer
refuses them; a function of Python would take any value.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

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


def refuse_wrong_arguments(
    arguments: Mapping[str, Any], required: Collection[str] = ("stream",)
) -> None:
    """Raise RecipeError if an argument has a value that it cannot have.

    Args:
        arguments: the arguments of a function of the API, by their names.
        required: the paths among them that may not be None.
    """
    for name, value in arguments.items():
        least = LEAST.get(name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if least is not None and value is not None and not (is_whole and value >= least):
            raise _refusal(name, value, f"a whole number from {least}")
        if name in TEXTS and not _is_list_of(str, value):
            raise _refusal(name, value, f'a list of strings, such as {name}=["..."]')
        if name == "to" and not isinstance(value, str):
            raise _refusal(name, value, 'the name of a format, such as "parquet"')
        if name == "engine" and not isinstance(value, str):
            raise _refusal(name, value, '"local", "ray" or "ray://HOST:PORT"')
        is_path = isinstance(value, (str, os.PathLike)) or (value is None and name not in required)
        if name in PATHS and not is_path:
            raise _refusal(name, value, "a path or URL")
        if name == "numbers" and not (_is_list_of(int, value) and min(value, default=0) >= 0):
            raise _refusal(name, value, "a list of whole numbers from 0")
        if name == "evals" and value not in EVALS:
            raise _refusal(name, value, f"one of {', '.join(EVALS)}")
        if name == "progress" and not (isinstance(value, bool) or callable(value)):
            raise _refusal(name, value, "True, False, or a function that takes a Progress")
        if name == "tokens_per_second" and value is not None and not value > 0:
            raise _refusal(name, value, "above 0")
        if name in ("mix", "streams"):
            _refuse_no_mix(name, value)


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
        raise _refusal(name, value, "a recipe, a training YAML, or a list of published streams")


def _refusal(name: str, value: Any, words: str) -> RecipeError:
    return RecipeError(f"{name} is {repr(value)[:60]}; it must be {words}.")
