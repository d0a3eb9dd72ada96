"""The one JSON document that a command with `--json` prints on stdout.

A command gives its document as soon as it has it, and it is printed when the command ends. So an
error that comes later becomes part of it, and stdout is always one valid document:

    {"streams": [...], "error": {"class": "Unreachable", "message": "...", "exit_code": 4}}

A command that fails without a document prints `{"error": {...}}`. If several streams failed,
`error` has the key `errors` with an object for each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mdsmix.errors import MdsmixError, SeveralFailed

USAGE_ERROR = "UsageError"
"The class of an error on the words of the command line, which Typer finds."
INTERRUPTED = "Interrupted"
"The class of an error if Ctrl-C or SIGTERM ended the command."


@dataclass
class _Output:
    """The JSON output of this process's command."""

    is_asked: bool = False
    documents: list[Any] = field(default_factory=list)
    "The document that the command gave; empty before that."


_output = _Output()


def begin(words: list[str]) -> None:
    """Forget an earlier command's document, and look whether `--json` is among the words of the
    command line. The words are needed since an unknown option is an error before options are read.
    """
    options = words[: words.index("--")] if "--" in words else words
    _output.is_asked = "--json" in options
    _output.documents.clear()


def echo_json(tree: Any) -> None:
    """Keep the JSON document of a command; `print_document` prints it when the command ends. A
    document that was kept before is replaced. With --json all other output goes to stderr.

    An Estimate is printed as its number, NaN as null.
    """
    _output.documents[:] = [tree]


def describe_error(name: str, message: str, code: int) -> dict[str, Any]:
    """Return an error as the document has it.

    Args:
        name: the class of the error, such as `RecipeError`.
    """
    return {"class": name, "message": message, "exit_code": code}


def describe_failure(failed: MdsmixError) -> dict[str, Any]:
    """Return an error of mdsmix as the document has it; of several errors also each one."""
    tree = describe_error(type(failed).__name__, str(failed), failed.exit_code)
    if isinstance(failed, SeveralFailed):
        tree["errors"] = [describe_failure(error) for error in failed.errors]
    return tree


def print_document(error: dict[str, Any] | None = None) -> None:
    """Print the command's document, with the error if there is one and --json is asked for."""
    if error is None or not _output.is_asked:
        for document in _output.documents:
            _print(document)
        return
    document = _output.documents[0] if _output.documents else {}  # there is at most one
    if not isinstance(document, dict):
        document = {"result": document}
    _print(document | {"error": error})


def _print(tree: Any) -> None:
    """Print a tree as JSON. Characters that would control the terminal (U+009B, changes of
    direction) are escaped, although JSON allows them.
    """
    import orjson
    import typer

    text = orjson.dumps(tree, default=float, option=orjson.OPT_INDENT_2).decode()
    # Such characters only occur in strings, so JSON's own escape may replace each: "\u009b".
    escapes = {c: json.dumps(c).strip('"') for c in set(text) if not c.isprintable() and c != "\n"}
    typer.echo("".join(escapes.get(c, c) for c in text))
