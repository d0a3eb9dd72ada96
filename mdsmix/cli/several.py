"""Commands that look at several streams, one after the other: the named ones, or all of a recipe. A failure ends no other stream."""

from __future__ import annotations

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
    from mdsmix.report.targets import targets_of

    every = targets_of(targets)
    streams = [t.url for t in every if t.is_made or not only_made or t.url in targets]
    if not streams:
        raise RecipeError(f"{targets[0]} makes no stream: none of its streams has a source.")
    is_one = streams == list(targets)[:1]
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
