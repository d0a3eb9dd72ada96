"""The root of the command line: it assembles the commands, and turns an error into one sentence and
an exit code. It imports nothing heavy.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from gc import freeze
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from mdsmix import __version__
from mdsmix.cli import json_document
from mdsmix.cli.json_document import describe_error, describe_failure
from mdsmix.errors import MdsmixError, SeveralFailed, Unreachable
from mdsmix.messages import make_printable
from mdsmix.report.log_file import close_log, write_log

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
INTERRUPTED = 130
"The exit code for Ctrl-C, the same as typer's."
TERMINATED = 143
"The exit code for SIGTERM, which a scheduler sends. Workers stop, and the lease is released."
PIPE_CLOSED = 141
"The exit code for a closed pipe, as after `| head`."
WINDOWS = (
    "mdsmix runs on Linux and macOS, not on Windows itself: run it in WSL, where the same "
    "commands work."
)
KEPT = (
    "interrupted: nothing was half published or half written; the next conversion continues from "
    "the finished work units."
)


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


class Ending(NamedTuple):
    """How a command ended."""

    code: int
    "The exit code."
    sentences: Sequence[str] = ()
    "Lines for stderr."
    error: dict[str, Any] | None = None
    "The error as the document of --json has it; None if there was none."


def run() -> None:
    """Run the console script. With MDSMIX_DEBUG=1 the traceback of a defect is shown."""
    # numpy's BLAS starts a thread for each processor when it is imported: 40 ms of CPU on two
    # cores. No command multiplies matrices. A function of the user may, but it runs in as many
    # processes as there are workers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _open_standard_streams()
    json_document.begin(sys.argv[1:])
    code = 1
    try:
        ending = _run_command()
        code = ending.code
        json_document.print_document(ending.error)
        write_log(*ending.sentences)
        if ending.sentences:
            print(*map(make_printable, ending.sentences), sep="\n", file=sys.stderr)
        raise SystemExit(code)
    except BrokenPipeError:
        os._exit(PIPE_CLOSED)
    finally:
        close_log(code)
        # When Python exits it searches all objects for garbage once more, which takes 0.2 s;
        # `freeze` prevents that. Torch's libraries need the search: without it they report leaks.
        if "torch" not in sys.modules:
            freeze()


def _run_command() -> Ending:
    """Run the command that sys.argv names."""
    if sys.platform == "win32":
        code = Unreachable.exit_code
        return Ending(code, [f"error: {WINDOWS}"], describe_error("Unreachable", WINDOWS, code))
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        # Click would take the name from how Python was started, also in `_MDSMIX_COMPLETE`.
        _make_app_for(sys.argv[1:])(prog_name="mdsmix")
    except MdsmixError as failed:
        errors = failed.errors if isinstance(failed, SeveralFailed) else [failed]
        sentences = [f"error: {error}" for error in errors]
        return Ending(failed.exit_code, sentences, describe_failure(failed))
    except SystemExit as end:
        return _end_by_exit(end)
    except KeyboardInterrupt:  # before a command begins: a command turns Ctrl-C into an exit code
        tree = describe_error(json_document.INTERRUPTED, KEPT, INTERRUPTED)
        return Ending(INTERRUPTED, [KEPT], tree)
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("MDSMIX_DEBUG"):
            raise
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        sentence = (
            f"mdsmix itself failed ({detail}): please report it, with what the same command prints "
            "under MDSMIX_DEBUG=1."
        )
        tree = describe_error(type(error).__name__, sentence, 1)
        return Ending(1, [f"error: {sentence}"], tree)
    return Ending(0)


def _make_app_for(words: Sequence[str]) -> typer.Typer:
    """Return as much of the command line as its words need."""
    if words and words[0] in EXAMPLES:
        return make_app(only=words[0])
    # Completion passes no words: it has its own in the environment.
    is_completion = "_MDSMIX_COMPLETE" in os.environ
    lists_commands = not is_completion and (not words or words[0] in HELP_OPTIONS)
    return make_app(with_options=not lists_commands)


def _end_by_exit(end: SystemExit) -> Ending:
    """Return the ending of a command that Typer ended: by its own exit code, by Ctrl-C, or after
    it has printed an error on the words of the command line.
    """
    cause = end.__context__
    if isinstance(cause, BrokenPipeError):  # typer and rich turn it into exit code 1
        return Ending(PIPE_CLOSED)
    # As Python itself reads the argument of sys.exit: None is 0, and a message is 1.
    code = 1
    if isinstance(end.code, int):
        code = end.code
    elif end.code is None:
        code = 0
    if code in (INTERRUPTED, TERMINATED):
        return Ending(code, [KEPT], describe_error(json_document.INTERRUPTED, KEPT, code))
    format_message = getattr(cause, "format_message", None)
    if format_message:  # Typer has printed the error already
        tree = describe_error(json_document.USAGE_ERROR, format_message(), code)
        return Ending(code, error=tree)
    return Ending(code)


def _open_standard_streams() -> None:
    """Open /dev/null for a standard stream that the shell closed (`>&-`), which Python sets to
    None.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
