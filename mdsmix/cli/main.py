"""The root of the command line: it runs a command, and turns an error into one sentence and an exit
code. It imports nothing heavy, and Typer only when it has begun to open a conversion's tokenizer.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from mdsmix.cli import json_document
from mdsmix.cli.json_document import describe_error, describe_failure
from mdsmix.cli.standard_streams import open_standard_streams
from mdsmix.cli.stop_signals import INTERRUPTED, TERMINATED, raise_stop_signals
from mdsmix.cli.usage_errors import describe_usage_error, is_usage_error
from mdsmix.errors import MdsmixError, RecipeError, SeveralFailed, Unreachable
from mdsmix.messages import make_printable
from mdsmix.report.log_file import close_log, write_log

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
    # Imports make many objects and no garbage.
    gc.set_threshold(100_000)
    open_standard_streams()
    json_document.begin(sys.argv[1:])
    code = 1
    try:
        ending = _print_document(_run_command())
        code = ending.code
        write_log(*ending.sentences)
        if ending.sentences:
            print(*map(make_printable, ending.sentences), sep="\n", file=sys.stderr)
        raise SystemExit(code)
    except BrokenPipeError:
        os._exit(PIPE_CLOSED)
    finally:
        close_log(code)


def _run_command() -> Ending:
    """Run the command that sys.argv names."""
    if sys.platform == "win32":
        code = Unreachable.exit_code
        return Ending(code, [f"error: {WINDOWS}"], describe_error("Unreachable", WINDOWS, code))
    try:
        with raise_stop_signals(), _open_tokenizer_early(sys.argv[1:]):
            code = _call_command(sys.argv[1:])
        sys.stdout.flush()
        return _end_by_code(code)
    except MdsmixError as failed:
        errors = failed.errors if isinstance(failed, SeveralFailed) else [failed]
        sentences = [f"error: {error}" for error in errors]
        return Ending(failed.exit_code, sentences, describe_failure(failed))
    except SystemExit as end:  # SIGTERM, a closed pipe, or the end of shell completion
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich turn it into exit code 1
            return Ending(PIPE_CLOSED)
        return _end_by_code(end.code)
    except KeyboardInterrupt:  # before a command begins: Typer turns it into an exit code
        tree = describe_error(json_document.INTERRUPTED, KEPT, INTERRUPTED)
        return Ending(INTERRUPTED, [KEPT], tree)
    except BrokenPipeError:
        raise
    except Exception as error:
        if is_usage_error(error):
            return _end_by_usage_error(error)
        if os.environ.get("MDSMIX_DEBUG"):
            raise
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        sentence = (
            f"mdsmix itself failed ({detail}): please report it, with what the same command prints "
            "under MDSMIX_DEBUG=1."
        )
        tree = describe_error(type(error).__name__, sentence, 1)
        return Ending(1, [f"error: {sentence}"], tree)


def _call_command(words: Sequence[str]) -> object:
    """Call the command of these words. Return its exit code; None is 0."""
    if words[:1] == ["convert"]:
        from mdsmix.cli.conversion_command import parse_without_typer, run_conversion

        parsed = parse_without_typer(words[1:])
        if parsed:
            run_conversion(*parsed)
            return None
    from mdsmix.cli.commands import make_app_for  # 40 ms, mostly Typer

    # Click would take the name from how Python was started, also in `_MDSMIX_COMPLETE`.
    app = make_app_for(words)
    return app(prog_name="mdsmix", standalone_mode=False)


def _print_document(ending: Ending) -> Ending:
    """Print the document of --json. Return the ending; if the document cannot be written, an ending
    with that error too.
    """
    try:
        json_document.print_document(ending.error)
    except Unreachable as failed:
        return Ending(failed.exit_code, [*ending.sentences, f"error: {failed}"])
    return ending


def _open_tokenizer_early(words: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context manager for the `with` block that runs the command of these words. If it is
    a conversion, its tokenizer may be opened meanwhile.
    """
    if words[:1] != ["convert"]:
        return nullcontext()
    from mdsmix.conversion.early_opening import open_tokenizer_for_command

    return open_tokenizer_for_command(words[1:])


def _end_by_code(code: object) -> Ending:
    """Return the ending of a command that has ended itself, by Ctrl-C or by SIGTERM.

    Args:
        code: the exit code as `sys.exit` takes it: None is 0, and a message is 1.
    """
    if code is None:
        return Ending(0)
    if not isinstance(code, int):
        return Ending(1)
    if code in (INTERRUPTED, TERMINATED):
        return Ending(code, [KEPT], describe_error(json_document.INTERRUPTED, KEPT, code))
    return Ending(code)


def _end_by_usage_error(error: Exception) -> Ending:
    """Return the ending of a command whose words are wrong."""
    sentence = describe_usage_error(error)
    code = RecipeError.exit_code
    tree = describe_error(json_document.USAGE_ERROR, sentence, code)
    return Ending(code, [f"error: {sentence}"] if sentence else [], tree)
