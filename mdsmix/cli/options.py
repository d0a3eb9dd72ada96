"""Arguments and options of the commands, and their shared functions: streams one after the other,
lines and JSON on stdout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import typer

from mdsmix.errors import MdsmixError, RecipeError, all_of
from mdsmix.words import printable

# typer 0.15 cannot read `int | None` under Python 3.10, hence Optional.
Number = Optional[int]  # noqa: UP045
Text = Optional[str]  # noqa: UP045
Texts = Optional[list[str]]  # noqa: UP045
File = Optional[Path]  # noqa: UP045


def option(
    default: Any,
    help: str,
    metavar: str | None = None,
    *names: str,
    least: float | None = None,
    shown: bool | str = True,
) -> Any:
    """An option with a value. `shown`: words for the default in the help; `names`: the option's
    names, if not the parameter's.
    """
    return typer.Option(
        default,
        *names,
        help=help,
        metavar=metavar,
        min=least,
        show_default=shown,
    )


def flag(name: str, help: str) -> Any:
    """An option without a value."""
    return typer.Option(False, name, help=help)


def argument(metavar: str, help: str, *default: None) -> Any:
    """A positional argument. It is required unless a default, None, is given."""
    return typer.Argument(*default, metavar=metavar, help=help, show_default=False)


RECIPE = argument("RECIPE", "The recipe, a YAML file.")
OVERRIDES = argument("[KEY=VALUE]...", "Recipe keys to set, e.g. max_seq_len=4096.", None)
MIX = "A recipe (key=value overrides may follow), a training YAML, or folders and s3:// URLs of published streams."
MIXES = argument("RECIPE | TRAIN.yaml | STREAM...", MIX)
STREAMS = argument(
    "STREAM... | RECIPE",
    "Published streams, folders or s3:// URLs; or a recipe (key=value overrides may follow): all its streams.",
)
WORKERS = option(
    None, "Processes; their number changes no byte.", "N", least=1, shown="one per processor"
)
MEMORY = option(
    None,
    "Memory that all processes together may take, e.g. 2GiB.",
    "SIZE",
    shown="half of the machine or its control group",
)
QUARANTINE_CRASHES = flag(
    "--quarantine-crashes", "Set a record aside if worker processes die of it."
)
ESTIMATE = flag("--estimate", "Work out shares from first samples where tokens were not counted.")
QUIET = typer.Option(
    False, "--quiet", "-q", help="No progress and no summary: warnings and errors alone."
)
NODES = option(1, "Nodes of the run.", "N", least=1)
AS_JSON = flag("--json", "Print the result as JSON, for programs.")
GPUS = option(8, "Devices of a node.", "N", least=1)
ROWS = "Rows of a step, of all devices together."
BATCH = "global_train_batch_size of the YAML"


KEEP_EVALS = flag(
    "--keep-evals",
    "Judge evaluations that are not the recipe's by their keys alone if their streams are not here.",
)


def own_evals_of(keep: bool, drop: bool) -> Literal["look", "keep", "drop"]:
    """Return what --keep-evals and --drop-evals say; raises RecipeError if both are given."""
    if keep and drop:
        raise RecipeError("--keep-evals and --drop-evals contradict each other: give one of them.")
    if drop:
        return "drop"
    return "keep" if keep else "look"


def decoder_option(whose: str) -> Any:
    """The option `--tokenizer` of commands that show text. `whose`: the streams whose ids are
    decoded, for the help.
    """
    said = f"the one that made {whose}, if known here"
    return option(None, "Decode with this tokenizer.", "NAME", shown=said)


def for_each(
    targets: Sequence[str], as_json: bool, do: Callable[[str], Any], only_made: bool = False
) -> None:
    """Calls `do`, which shows a stream or returns its JSON, for each stream. Errors are raised
    after the last stream.

    The JSON of a single named stream is a document of its own. Otherwise the streams are listed as
    `streams`, with an `error` where one failed. `only_made`: of a recipe, only the streams that it
    makes.
    """
    from mdsmix.report.named_streams import named_streams

    every = named_streams(targets)
    streams = [s.url for s in every if s.is_made or not only_made or s.url == s.name]
    if not streams:
        raise RecipeError(f"{targets[0]} makes no stream: none of its streams has a source.")
    results, failed = list[Any](), list[MdsmixError]()
    for stream in streams:
        try:
            results.append(do(stream))
        except MdsmixError as error:
            failed.append(error)
            results.append({"stream": stream, "error": str(error)})
    if as_json and streams != list(targets)[:1]:
        echo_json({"streams": results})
    elif as_json and not failed:
        echo_json(results[0])
    if failed:
        raise all_of(failed)


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines; with `err`, on stderr. Escape codes and line breaks in a line are shown by
    name, since names and records may come from anyone.
    """
    for line in lines:
        typer.echo(printable(line), err=err)


def echo_json(tree: Any) -> None:
    """Prints one JSON document on stdout: an Estimate as its number, NaN as null. All other output
    of the command goes to stderr.

    Characters that JSON allows and a terminal obeys (U+009B, changes of direction) are escaped.
    They occur in strings alone.
    """
    import orjson

    text = orjson.dumps(tree, default=float, option=orjson.OPT_INDENT_2).decode()
    typer.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))
