"""The commands as one Typer application: their groups, examples and order in `mdsmix --help`.

Only this module and the files of the commands import typer. `main.py` imports this one when a
command line is parsed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from mdsmix import __version__

EXAMPLES = {
    "example": "example ./example",
    "init": "init 'data/*.jsonl' --tokenizer ./tokenizer -o recipe.yaml",
    "schema": "schema -o mdsmix.schema.json",
    "doctor": "doctor recipe.yaml",
    "convert": "convert recipe.yaml --memory 8GiB remote=s3://bucket/mix",
    "check": "check recipe.yaml --deep",
    "leaks": "leaks recipe.yaml --eval s3://bucket/quiz",
    "plan": "plan recipe.yaml --nodes 8 --batch 1024 --tokens 100B",
    "render-yaml": "render-yaml recipe.yaml --into foundry.yaml",
    "fetch": "fetch s3://bucket/mix/tokenizer-0f3a9c21 ./tokenizer-0f3a9c21",
    "export": "export recipe.yaml --to parquet -o exported",
    "preview": "preview train.yaml --nodes 2 --batch 64",
    "report": "report recipe.yaml -o report.html",
    "bench": "bench train.yaml",
    "mix": "mix recipe.yaml --out ./mixed",
    "inspect": "inspect recipe.yaml --random -n 5",
    "quarantine": "quarantine recipe.yaml --reason not_json",
    "verify": "verify s3://bucket/mix/web/train",
    "repair": "repair s3://bucket/mix/web/train --recipe recipe.yaml",
    "gc": "gc recipe.yaml --older-than 7d --delete",
}
"An example for each command, shown at the end of its help."
GROUPS = {
    "Prepare: from files to streams": ("example", "init", "schema", "doctor", "convert", "mix"),
    "Look: what is in the streams": ("inspect", "quarantine", "leaks", "report"),
    "Train: from streams to batches": (
        *("check", "plan", "preview", "render-yaml", "fetch", "export", "bench"),
    ),
    "Keep: published streams over time": ("verify", "repair", "gc"),
}
"The groups of `mdsmix --help` -> their commands. What a user needs first comes first."
HELP_OPTIONS = ["-h", "--help"]
"The options that show help, also as the only words of a command line."


def make_app(only: str | None = None, with_options: bool = True) -> typer.Typer:
    """Return the command line. A command is the function of its name in the module of its name.

    Args:
        only: the only command to make; None makes all. Importing the others and reading their
            options takes 35 ms.
        with_options: whether the commands have their options. The list of all commands does not
            show them, and reading them takes 25 ms.
    """
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": HELP_OPTIONS},
        help="From raw pretraining and finetuning data to a checked mix of MDS streams and its "
        "LLM-Foundry YAML.",
        epilog="Exit codes: 0 done, or the streams may be mixed; 1 mdsmix itself failed; 2 wrong "
        "usage or recipe; 3 the streams may not be mixed, or one is damaged; 4 could not read or "
        "write, or another run is at work; 5 too many bad records.",
    )
    app.callback(invoke_without_command=True)(_print_version)
    for group, names in GROUPS.items():
        for name in names:
            if only in (None, name):
                word = name.replace("-", "_")
                command = getattr(import_module(f"mdsmix.cli.{word}"), word)
                app.command(
                    name,
                    no_args_is_help=name != "schema",
                    help=_unfold(command.__doc__),
                    epilog=f"Example: mdsmix {EXAMPLES[name]}",
                    rich_help_panel=group,
                )(command if with_options else _take_no_options)
    return app


def _take_no_options() -> None:
    """Do nothing. In the list of all commands it takes the place of each command."""


def _unfold(text: str | None) -> str:
    """Return a docstring with each paragraph on one line, since Typer keeps line breaks."""
    paragraphs = (text or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _print_version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Print the version with --version; without a command there is nothing else to do."""
    if version:
        typer.echo(f"mdsmix {__version__}")
        raise typer.Exit


def make_app_for(words: Sequence[str]) -> typer.Typer:
    """Return as much of the command line as its words need."""
    if words and words[0] in EXAMPLES:
        return make_app(only=words[0])
    # Completion passes no words: it has its own in the environment.
    is_completion = "_MDSMIX_COMPLETE" in os.environ
    lists_commands = not is_completion and (not words or words[0] in HELP_OPTIONS)
    return make_app(with_options=not lists_commands)
