"""Begins to open the tokenizer of a conversion as soon as its recipe is read.

The libraries and modules of a conversion take 0.15 s to import. A thread opens the tokenizer
meanwhile, on another processor (fast_model.py), if the run certainly has work. A process describes
a tokenizer that is new to this machine (snapshot.py). So this module imports no other module of its
package, and no library but those that read a recipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from mdsmix.encode.fast_model import begin_opening, forget_openings
from mdsmix.errors import MdsmixError
from mdsmix.recipe import Recipe, load_recipe
from mdsmix.recipe.read import RecipeInput
from mdsmix.schema import Misfit
from mdsmix.storage import is_url
from mdsmix.tokenizer.card import find_tokenizer
from mdsmix.tokenizer.snapshot import begin_description, forget_descriptions


@contextmanager
def open_tokenizer_early(
    recipe: RecipeInput,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    limit: int | None = None,
) -> Iterator[None]:
    """Begin to open the tokenizer of a conversion, in a thread, for the `with` block that converts.
    If its folder is new to this machine, begin to describe it, in a process. At the end of the
    block a model or process that was not used is forgotten.

    Nothing is begun if all streams may be up to date, or if anything is wrong: the conversion then
    opens the tokenizer itself, or reports what is wrong.

    Args:
        recipe: the recipe, as `open_recipe` takes it.
        overrides: `key=value` each.
        only: the streams to convert; empty: all.
        limit: convert only so many first records of each stream; None: all.
    """
    try:
        with suppress(MdsmixError, Misfit, OSError, ValueError):
            _begin_opening(recipe, overrides, only, limit)
        yield
    finally:
        forget_openings()
        forget_descriptions()


def _begin_opening(
    recipe: RecipeInput, overrides: Sequence[str], only: Sequence[str], limit: int | None
) -> None:
    """Begin to open or to describe the tokenizer if the run certainly has work. The arguments are
    those of `open_tokenizer_early`.
    """
    # A pipe can be read only once: leave it to the conversion.
    if isinstance(recipe, (str, os.PathLike)) and not os.path.isfile(recipe):
        return
    if not isinstance(recipe, Recipe) or not recipe.is_opened:
        recipe = load_recipe(recipe, overrides)  # it takes 1 to 3 ms to read it once more
    if not _has_new_stream(recipe, only, limit):
        return
    tokenizer = find_tokenizer(recipe.tokenizer)
    if tokenizer:
        begin_opening(tokenizer, recipe.tokenizer.backend)
    else:
        begin_description(recipe.tokenizer.name, recipe.tokenizer.kwargs)


def _has_new_stream(recipe: Recipe, only: Sequence[str], limit: int | None) -> bool:
    """Return whether a stream that is to be converted has no folder yet. A store is not asked,
    since that takes as long as the imports.

    Args:
        recipe: the recipe.
        only: the streams to convert; empty: all.
        limit: convert only so many first records of each stream; None: all.
    """
    for stream in recipe.choose_sourced(only):
        target = recipe.target(stream, limit)
        if not is_url(target) and not os.path.exists(target):
            return True
    return False
