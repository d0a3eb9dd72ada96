"""Begins to open the tokenizer of a conversion as soon as its recipe is read.

The libraries and modules of a conversion take 0.15 s to import, and Typer 0.03 s. A thread opens
the tokenizer meanwhile, on another processor (fast_model.py), if the run has work. A process
describes a tokenizer that is new to this machine (snapshot.py). So this module imports no other
module of its package, and no library but those that read a recipe.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from mdsmix.cache import locate_known_sources
from mdsmix.encode.fast_model import begin_opening, forget_openings
from mdsmix.errors import MdsmixError
from mdsmix.recipe import Recipe, load_recipe
from mdsmix.recipe.read import RecipeInput
from mdsmix.schema import Misfit
from mdsmix.storage import is_url
from mdsmix.tokenizer.card import find_tokenizer
from mdsmix.tokenizer.snapshot import begin_description, forget_descriptions

WITH_WORK = {
    *("--budget", "--engine", "--json", "--limit", "--log-file", "--max-bad"),
    *("--memory", "--only", "--part", "--quarantine-crashes", "--quiet", "--reencode"),
    *("--verify-source", "--verify-target", "--workers", "-q"),
}
"""The options of `mdsmix convert` with which it converts. With `--help`, `--dry-run` or a wrong
option it converts nothing, and would wait at its end for the thread: 5 s for Gemma 3. With
`--finish` parts of an array have probably converted all.
"""


def open_tokenizer_early(
    recipe: RecipeInput,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    limit: int | None = None,
    finish: bool = False,
) -> AbstractContextManager[None]:
    """Begin to open the tokenizer of a conversion, in a thread, for the `with` block that converts.
    If its folder is new to this machine, begin to describe it, in a process. At the end of the
    block a model or process that was not used is forgotten.

    Nothing is begun if all streams may be up to date or converted in parts (`finish`), or if
    anything is wrong: the conversion then opens the tokenizer itself, or reports what is wrong.

    Args:
        recipe: the recipe, as `open_recipe` takes it.
        overrides: `key=value` each.
        only: the streams to convert; empty: all.
        limit: convert only so many first records of each stream; None: all.
        finish: whether the run joins the parts of an array.
    """
    if finish:
        return nullcontext()
    return _open_meanwhile(
        recipe, overrides, lambda recipe: any(_find_new_streams(recipe, only, limit))
    )


def open_tokenizer_for_command(words: Sequence[str]) -> AbstractContextManager[None]:
    """Begin to open the tokenizer of `mdsmix convert`, as `open_tokenizer_early` does, for the
    `with` block that imports Typer, parses the words and converts.

    Options are not parsed here. So the tokenizer is opened only if all streams of the recipe are
    new: then the run has work, whatever `--only` and `--limit` are. In all other cases
    `open_tokenizer_early` decides. If the value of an option is wrong, the process ends
    before the tokenizer is open (cli/process_end.py).

    Args:
        words: the words of the command line after `convert`: the recipe first.
    """
    overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
    options = {word.partition("=")[0] for word in words if word.startswith("-")}
    if not words or not options <= WITH_WORK:
        return nullcontext()
    return _open_meanwhile(words[0], overrides, lambda recipe: all(_find_new_streams(recipe)))


@contextmanager
def _open_meanwhile(
    recipe: RecipeInput, overrides: Sequence[str], has_work: Callable[[Recipe], bool]
) -> Iterator[None]:
    """Begin to open or to describe the tokenizer for the `with` block, if nothing is wrong. At the
    end of the block, forget what was not used. The arguments are those of `_begin_opening`.
    """
    try:
        with suppress(MdsmixError, Misfit, OSError, ValueError):
            _begin_opening(recipe, overrides, has_work)
        yield
    finally:
        forget_openings()
        forget_descriptions()


def _begin_opening(
    recipe: RecipeInput, overrides: Sequence[str], has_work: Callable[[Recipe], bool]
) -> None:
    """Begin to open or to describe the tokenizer if the run has work.

    Args:
        recipe: the recipe, as `open_recipe` takes it.
        overrides: `key=value` each.
        has_work: whether the run has work, if it is of this recipe.
    """
    # A pipe can be read only once: leave it to the conversion.
    if isinstance(recipe, (str, os.PathLike)) and not os.path.isfile(recipe):
        return
    if not isinstance(recipe, Recipe) or not recipe.is_opened:
        recipe = load_recipe(recipe, overrides)  # it takes 1 to 3 ms to read it once more
    if not has_work(recipe):
        return
    tokenizer = find_tokenizer(recipe.tokenizer)
    if tokenizer:
        begin_opening(tokenizer, recipe.tokenizer.backend)
    else:
        begin_description(recipe.tokenizer.name, recipe.tokenizer.kwargs)


def _find_new_streams(
    recipe: Recipe, only: Sequence[str] = (), limit: int | None = None
) -> list[bool]:
    """Return for each stream that is to be converted whether it has no folder yet. A store is not
    asked, since that takes as long as the imports. A stream in a store counts as new if this
    machine has converted no part of it.

    Args:
        recipe: the recipe.
        only: the streams to convert; empty: all.
        limit: convert only so many first records of each stream; None: all.
    """
    are_new = list[bool]()
    for stream in recipe.choose_sourced(only):
        target = recipe.target(stream, limit)
        path = locate_known_sources(target) if is_url(target) else target
        are_new.append(not os.path.exists(path))
    return are_new
