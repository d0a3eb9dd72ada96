"""A result for a person: tables, named values, titles, samples, findings and sentences, in their
order.

Commands hand their result to `show`. The page of `mdsmix report` draws the same tables, and
programs get them by `mdsmix.table.as_json`. On a terminal a table that is too wide is folded, and
no digit is lost; a sentence is folded between words. Files and pipes get whole lines. Escape codes
in results are not obeyed, and markup and emoji names stay text.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.cells import cell_len

from mdsmix.foundry_yaml.findings import Finding
from mdsmix.messages import make_printable
from mdsmix.table import Table, align_columns

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"text": "", "mark": "bold", "control": "cyan"}
"Form of a run of a sample -> its style on a terminal."
SEVERITIES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
Run = tuple[str, str]
"Text without escape codes, and a key of STYLES."


@dataclass(frozen=True)
class NamedValues:
    """(name, value) lines as two columns. A long word, such as a path or a hash, goes over the edge
    and can be copied whole.
    """

    lines: Iterable[tuple[str, str]]


@dataclass(frozen=True)
class Title:
    """A line across the terminal that begins with a title."""

    title: str


@dataclass(frozen=True)
class SampleText:
    """Text of a sample. It is never folded: no line break is added to it."""

    runs: Iterable[Run]


@dataclass(frozen=True)
class Heading:
    """A line that stands out: the headings of a table, the head of a finding."""

    text: str
    style: str = "bold"


Item = str | Table | NamedValues | Title | SampleText | Heading


def show(*items: Item, err: bool = False, console: Console | None = None) -> None:
    """Prints the items. The notes of a table follow it."""
    from rich.console import Console
    from rich.text import Text

    to = console or Console(stderr=err, highlight=False)
    for item in items:
        if isinstance(item, Title):
            to.rule(Text(make_printable(item.title)), align="left")
        elif isinstance(item, SampleText):
            runs = ((text, STYLES[form]) for text, form in item.runs)
            to.print(Text.assemble(*runs), soft_wrap=True)
        else:
            for line in _lines(item, to):
                text, style = (line.text, line.style) if isinstance(line, Heading) else (line, None)
                to.out(text, style=style, highlight=False)


def folded(line: str, indent: str, width: int | None) -> list[str]:
    """The line, indented and folded between words at this width; None: not folded."""
    if width is None:
        return [indent + line]
    wide = textwrap.TextWrapper(
        width=max(width, len(indent) + 20),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
    )
    return wide.wrap(line) or [indent]


def _lines(item: str | Table | NamedValues | Heading, to: Console) -> Iterator[str | Heading]:
    width = to.width if to.is_terminal else None
    if isinstance(item, Table):
        yield from _table(item, width, "-" if to.options.ascii_only else "─")
        for note in item.notes:
            yield from _lines(note, to)
    elif isinstance(item, NamedValues):
        yield from _pairs(list(item.lines), width)
    elif isinstance(item, Heading):
        yield Heading(make_printable(item.text), item.style)
    else:
        words = item.lstrip(" ")
        yield from folded(make_printable(words), " " * (len(item) - len(words)), width)


def _pairs(pairs: Sequence[tuple[str, str]], width: int | None) -> Iterator[str]:
    left = max(len(what) for what, _ in pairs) + 4
    for what, value in pairs:
        first, *others = folded(make_printable(value), " " * left, width)
        yield f"  {what}".ljust(left) + first[left:]
        yield from others


def _table(table: Table, width: int | None, rule: str) -> Iterator[str | Heading]:
    """The lines of a table. Columns that do not fit follow below, behind the first column. A single
    column may go over the edge.
    """
    for group in _folds(list(align_columns(table)), width or 10_000):
        head, *rows = (f"  {'   '.join(line)}  " for line in zip(*group, strict=True))
        blank = " " * cell_len(head)
        if table.rows and table.total:
            rows.insert(-1, blank)
        lines: list[str | Heading] = [blank, Heading(head)]
        yield from (*lines, f" {rule * (cell_len(head) - 2)} ", *rows, blank)


def _folds(columns: Sequence[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Groups of columns that fit the width. Each group begins with the first column, which names
    the rows.
    """
    group = [columns[0]]
    for column in columns[1:]:
        taken = sum(cell_len(each[0]) + 3 for each in (*group, column))
        if len(group) > 1 and taken + 1 > width:
            yield group
            group = [columns[0]]
        group.append(column)
    yield group


def print_findings(findings: Sequence[Finding], to_stderr: bool = False) -> None:
    """Prints the findings: in a pipe one line each, for `grep`; on a terminal with findings of one
    check under one heading.
    """
    if (sys.stderr if to_stderr else sys.stdout).isatty():
        show(*alike_shown(findings), err=to_stderr)
    else:
        show(*map(str, findings), err=to_stderr)


def print_briefly(findings: Sequence[Finding], checked: Sequence[str]) -> None:
    """Prints errors in full and counts the other findings, to stderr, for commands that check
    before their work. `checked`: the words that `mdsmix check` takes to show all.
    """
    print_findings([finding for finding in findings if finding.severity == "error"], to_stderr=True)
    command = shlex.join(["mdsmix", "check", *checked])
    for (severity, id), many in Counter((f.severity, f.id) for f in findings).items():
        if severity != "error":
            times = f" ({many} times)" if many > 1 else ""
            show(f"{severity} {id}{times}: `{command}` says more", err=True)


def alike_shown(findings: Iterable[Finding]) -> Iterator[Item]:
    """Findings, with neighbours of one check under one heading. The heading, the reason and each
    fix come once.
    """
    for _, group in groupby(findings, key=lambda finding: finding.id):
        some = list(group)
        first, streams = some[0], dict.fromkeys(name for each in some for name in each.streams)
        whose = f" [{', '.join(streams)}]" if streams else ""
        yield Heading(f"{first.severity} {first.id}{whose}", SEVERITIES[first.severity])
        yield from (f"  - {each.message}" for each in some)
        yield f"  {first.why}"
        yield from (f"  Fix: {fix}" for fix in dict.fromkeys(each.fix for each in some))
