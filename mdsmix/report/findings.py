"""What a check found, for people: a line each in a pipe, so that `grep` finds it; on a terminal its parts stand out, and what is
alike stands under one heading."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import typer
from rich.console import Console
from rich.text import Text

from mdsmix.training.findings import Finding
from mdsmix.words import printable

COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def alike(found: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one check, side by side as they come."""
    return [list(some) for _, some in groupby(found, key=lambda finding: finding.id)]


def print_findings(found: Sequence[Finding], to_stderr: bool = False) -> None:
    """All of them."""
    if not (sys.stderr if to_stderr else sys.stdout).isatty():
        for finding in found:
            typer.echo(printable(str(finding)), err=to_stderr)
        return
    console = Console(stderr=to_stderr, highlight=False)
    for some in alike(found):
        for indent, line in _lines(some):
            for part in line.wrap(console, max(20, console.width - indent)):
                console.print(Text(" " * indent).append_text(part))


def print_briefly(found: Sequence[Finding], checked: Sequence[str]) -> None:
    """Errors, and how many of what else `mdsmix check` of the same says in full. To stderr, for a command that checks by the way."""
    print_findings([finding for finding in found if finding.severity == "error"], to_stderr=True)
    for (severity, id), many in Counter((f.severity, f.id) for f in found).items():
        if severity != "error":
            times = f" ({many} times)" if many > 1 else ""
            command = shlex.join(["mdsmix", "check", *checked])
            typer.echo(printable(f"{severity} {id}{times}: `{command}` says more"), err=True)


def _lines(some: Sequence[Finding]) -> Iterator[tuple[int, Text]]:
    """(columns that it is moved in, line) of findings that are alike. What all of them have in common is said once."""
    first, fixes = some[0], {finding.fix for finding in some}
    whose = f" [{', '.join(first.streams)}]" if first.streams else ""
    many = f" ({len(some)} times)" if len(some) > 1 else whose
    yield 0, Text(printable(f"{first.severity} {first.id}{many}"), COLOURS[first.severity])
    if len(some) == 1:
        yield 2, Text(printable(f"{first.message} {first.why}"))
    else:
        yield 2, Text(printable(first.why))
        for finding in some:
            yield 2, Text(printable(f"- {finding.message}"))
            if len(fixes) > 1:
                yield 4, _fix(finding)
    if len(fixes) == 1:
        yield 2, _fix(first)


def _fix(finding: Finding) -> Text:
    return Text.assemble(("Fix: ", "bold"), printable(finding.fix))
