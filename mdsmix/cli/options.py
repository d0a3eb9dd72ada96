"""Arguments and options of several commands, each written once. `echo` and `echo_json` print."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from mdsmix.words import printable

RECIPE = typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)
RecipePath = Annotated[Path, RECIPE]
Stream = Annotated[
    str,
    typer.Argument(
        metavar="STREAM", help="A published stream: a folder or s3:// URL.", show_default=False
    ),
]
Mixes = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE | TRAIN.yaml | STREAM...",
        help="A recipe (key=value overrides may follow), a training YAML, or folders and s3:// URLs of published streams.",
        show_default=False,
    ),
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Recipe keys to set, e.g. max_seq_len=4096.",
        show_default=False,
    ),
]
Workers = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        min=1,
        metavar="N",
        help="Processes; they shape no byte.",
        show_default="one per processor",
        rich_help_panel="How",
    ),
]
Memory = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="SIZE",
        help="What all processes together may take, e.g. 2GiB.",
        show_default="half of the machine or its control group",
        rich_help_panel="How",
    ),
]
QuarantineCrashes = Annotated[
    bool,
    typer.Option(
        "--quarantine-crashes",
        help="Set a record aside if worker processes die of it.",
        rich_help_panel="How",
    ),
]
Estimated = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Work out shares from first samples where tokens were not counted.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress and no summary: warnings and errors alone."),
]
Nodes = Annotated[int, typer.Option(min=1, metavar="N", help="Nodes of the run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]


def gpus_option(default: bool | str = True) -> Any:
    """`--gpus`. `default`: the help text for the default; True shows the number itself."""
    return typer.Option(min=1, metavar="N", help="Devices of a node.", show_default=default)


def decoder_option(whose: str) -> Any:
    """`--tokenizer` of commands that show text. `whose`: what is decoded."""
    return typer.Option(
        metavar="NAME",
        help="Decode with this tokenizer.",
        show_default=f"the one that made {whose}, if known here",
    )


def batch_option(default: str = "global_train_batch_size of the YAML") -> Any:
    """`--batch`."""
    return typer.Option(
        min=1,
        metavar="N",
        help="Rows of a step, of all devices together.",
        show_default=default,
    )


def stream_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the names of streams that have a source, from the recipe on the command line; none without a recipe."""
    from mdsmix.errors import MdsmixError
    from mdsmix.recipe import load_recipe

    words = [
        str(ctx.params.get("recipe")),
        *ctx.args,
    ]  # a line that is not finished is not taken apart
    with suppress(MdsmixError, StopIteration):
        recipe = load_recipe(next(filter(os.path.isfile, words)))
        return [stream.name for stream in recipe.sourced if stream.name.startswith(incomplete)]
    return []


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines. Escape codes and line breaks in them are shown by name, since names and records may come from anyone."""
    typer.echo("\n".join(map(printable, lines)), err=err)


def echo_each(lines: Iterable[str]) -> None:
    """Prints lines on stderr, beside the result."""
    for line in lines:
        echo(line, err=True)


def echo_json(tree: Any) -> None:
    """Prints one JSON document on stdout. All other output of the command goes to stderr.

    Characters that JSON allows and a terminal obeys (U+009B, changes of direction) are escaped. They occur in strings alone.
    """
    import orjson

    text = orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode()
    typer.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))
