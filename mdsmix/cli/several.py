"""Streams that a command looks at one after the other: those named, or all of a recipe. One that fails ends no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from mdsmix.cli.options import echo_json
from mdsmix.errors import MdsmixError, RecipeError, all_of

Streams = Annotated[
    list[str],
    typer.Argument(
        metavar="STREAM... | RECIPE",
        help="Published streams, folders or s3:// URLs; or a recipe (key=value overrides may follow): all its streams.",
        show_default=False,
    ),
]


def for_each(
    targets: Sequence[str], as_json: bool, do: Callable[[str], Any], only_made: bool = False
) -> None:
    """Calls `do`, which shows a stream or returns its JSON, for each stream; raises what failed when all have had their turn.

    JSON of one stream that is named is its own document; else they are listed as `streams`, with an `error` where one
    failed. `only_made`: of a recipe only the streams that it makes.
    """
    streams, is_one = _streams(targets, only_made)
    found, failed = list[Any](), list[MdsmixError]()
    for stream in streams:
        try:
            found.append(do(stream))
        except MdsmixError as error:
            failed.append(error)
            found.append({"stream": stream, "error": str(error)})
    if as_json and not is_one:
        echo_json({"streams": found})
    elif as_json and not failed:
        echo_json(found[0])
    if failed:
        raise all_of(failed)


def _streams(targets: Sequence[str], only_made: bool) -> tuple[list[str], bool]:
    """The streams, and whether it is one that was named itself."""
    from mdsmix.recipe.read import parted
    from mdsmix.shards.index import BASENAME

    named, overrides = parted(targets)
    recipes = [t for t in named if os.path.isfile(t) and os.path.basename(t) != BASENAME]
    if not recipes and not overrides:
        return named, len(named) == 1
    if len(recipes) != 1 or len(named) != 1:
        raise RecipeError(
            f"`{' '.join(targets)}` names neither one recipe (with key=value overrides) nor streams alone: name one recipe, "
            "or folders and s3:// URLs of streams."
        )
    return _of_recipe(recipes[0], overrides, only_made), False


def _of_recipe(path: str, overrides: Sequence[str], only_made: bool) -> list[str]:
    from mdsmix.kinds import open_recipe
    from mdsmix.mix.view import place_of

    recipe = open_recipe(path, overrides)
    specs = recipe.sourced if only_made else recipe.streams.values()
    if not specs:
        raise RecipeError(f"{path} makes no stream: none of its streams has a source.")
    return [place_of(recipe, spec) for spec in specs]
