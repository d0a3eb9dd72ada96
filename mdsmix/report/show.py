"""Print a command's result: tables, named values, titles, samples, findings and sentences.

The page of `mdsmix report` draws the same tables, and `mdsmix.table.table_to_json` makes JSON of
them. On a terminal a table that is too wide is folded without losing a digit, and a sentence is
folded between words. Files and pipes get whole lines. Escape codes, markup and emoji names in
results are printed as text.
"""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from mdsmix.foundry_yaml.findings import Finding
from mdsmix.frozen import frozen
from mdsmix.messages import make_printable
from mdsmix.report.log_file import is_logging, write_log
from mdsmix.table import Table, align_columns, measure_width

if TYPE_CHECKING:
    from rich.console import Console

TERMINAL_VARIABLES = ("FORCE_COLOR", "TTY_COMPATIBLE")
"Environment variables that make rich take a file or a pipe for a terminal."
STYLES = {"text": "", "mark": "bold", "control": "cyan"}
"The form of a run of text -> its style on a terminal."
SEVERITIES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
Run = tuple[str, str]
"Text without escape codes, and its form, a key of STYLES."


@frozen
class NamedValues:
    """(name, value) lines as two columns. A long word, such as a path or a hash, is not broken, so
    that it can be copied.
    """

    lines: Iterable[tuple[str, str]]


@frozen
class Title:
    """A title followed by a rule across the terminal."""

    title: str


@frozen
class SampleText:
    """Text of a sample. It is never folded, so every line break in it is the sample's own."""

    runs: Iterable[Run]


@frozen
class Heading:
    """A highlighted line: a table's column headings, or the first line of a finding."""

    text: str
    style: str = "bold"


Item = str | Table | NamedValues | Title | SampleText | Heading


def show(*items: Item, err: bool = False, console: Console | None = None) -> None:
    """Print the items, each table followed by its notes. They go into the log too, if there is one
    and no console is given.
    """
    if console is None:
        items = log_items(*items)
        stream = sys.stderr if err else sys.stdout
        if not _may_be_terminal(stream):
            _print_plain(items, stream)
            return
    from rich.console import Console
    from rich.text import Text

    console = console or Console(stderr=err, highlight=False)
    width = console.width if console.is_terminal else None
    rule = _choose_rule(console.encoding)
    for item in items:
        if isinstance(item, Title):
            console.rule(Text(make_printable(item.title)), align="left")
        elif isinstance(item, SampleText):
            runs = ((text, STYLES[form]) for text, form in item.runs)
            console.print(Text.assemble(*runs), soft_wrap=True)
        else:
            for line in _format_item(item, width, rule):
                if isinstance(line, Heading):
                    console.out(line.text, style=line.style, highlight=False)
                else:
                    console.out(line, highlight=False)


def _may_be_terminal(stream: TextIO) -> bool:
    """Return whether rich may take a stream for a terminal: it is one, or a variable may say so."""
    return stream.isatty() or any(name in os.environ for name in TERMINAL_VARIABLES)


def _print_plain(items: Iterable[Item], stream: TextIO) -> None:
    """Print the items into a file, a pipe or the log, where lines have no style and are not folded,
    whatever TERMINAL_VARIABLES say. For most items rich is not needed then, which takes 14 ms to
    import.
    """
    rule = _choose_rule(stream.encoding or "utf-8")
    for item in items:
        if isinstance(item, (Title, SampleText)):
            from rich.console import Console

            show(item, console=Console(file=stream, highlight=False, force_terminal=False))
            continue
        for line in _format_item(item, None, rule):
            print(line.text if isinstance(line, Heading) else line, file=stream, flush=True)


def _choose_rule(encoding: str) -> str:
    """Return the character of a table's rule: `-` if the encoding lacks `─`."""
    return "─" if encoding.lower().startswith("utf") else "-"


def log_items(*items: Item) -> tuple[Item, ...]:
    """Write items into the log of the command, if there is one. Return them, since an item may have
    a generator, which can be read only once.
    """
    if not is_logging():
        return items
    read_items = list[Item]()
    lines = StringIO()
    for item in items:
        if isinstance(item, SampleText):
            read_items.append(SampleText(list(item.runs)))
        elif isinstance(item, NamedValues):
            read_items.append(NamedValues(list(item.lines)))
        else:
            read_items.append(item)
        # In the log a title is a plain line, since the rule around it would cut a long title.
        _print_plain([item.title if isinstance(item, Title) else read_items[-1]], lines)
    write_log(*(line for line in lines.getvalue().splitlines() if line.strip()))
    return tuple(read_items)


def fold_line(line: str, indent: str, width: int | None) -> list[str]:
    """Indent a line and fold it between words. It is not folded if the width is None."""
    if width is None:
        return [indent + line]
    wrapper = textwrap.TextWrapper(
        width=max(width, len(indent) + 20),  # at least 20 columns for words
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
    )
    return wrapper.wrap(line) or [indent]


def _format_item(
    item: str | Table | NamedValues | Heading, width: int | None, rule: str
) -> Iterator[str | Heading]:
    """Yield the lines of one item, folded to the width of a terminal.

    Args:
        item: the item.
        width: the columns of the terminal; None: not a terminal.
        rule: the character of a table's rule.
    """
    if isinstance(item, Table):
        yield from _format_table(item, width, rule)
        for note in item.notes:
            yield from _format_item(note, width, rule)
    elif isinstance(item, NamedValues):
        yield from _format_named_values(list(item.lines), width)
    elif isinstance(item, Heading):
        yield Heading(make_printable(item.text), item.style)
    else:
        sentence = item.lstrip(" ")
        indent = " " * (len(item) - len(sentence))
        yield from fold_line(make_printable(sentence), indent, width)


def _format_named_values(pairs: Sequence[tuple[str, str]], width: int | None) -> Iterator[str]:
    """Yield lines of (name, value) pairs, with all values in one column."""
    indent = max(len(name) for name, _ in pairs) + 4
    for name, value in pairs:
        first, *following = fold_line(make_printable(value), " " * indent, width)
        yield f"  {name}".ljust(indent) + first[indent:]
        yield from following


def _format_table(table: Table, width: int | None, rule: str) -> Iterator[str | Heading]:
    """Yield the lines of a table. Columns that do not fit follow below, with the first column
    repeated. A single column may be wider than the terminal.
    """
    most_columns = width if width else 10_000
    for group in _fold_columns(list(align_columns(table)), most_columns):
        # A column is a list of cells; line n of the table has cell n of each column.
        head, *rows = (f"  {'   '.join(cells)}  " for cells in zip(*group, strict=True))
        blank = " " * measure_width(head)
        if table.rows and table.total:
            rows.insert(-1, blank)  # above the total, which is the last row
        yield blank
        yield Heading(head)
        yield f" {rule * (measure_width(head) - 2)} "
        yield from rows
        yield blank


def _fold_columns(columns: Sequence[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Yield groups of columns that fit the width. Each group begins with the first column, which
    names the rows.

    Args:
        columns: the cells of each column, all of one length, from the heading down.
    """
    group = [columns[0]]
    for column in columns[1:]:
        # Three spaces between columns, and two at each end of a line.
        needed = sum(measure_width(cells[0]) + 3 for cells in (*group, column)) + 1
        if len(group) > 1 and needed > width:
            yield group
            group = [columns[0]]
        group.append(column)
    yield group


def print_findings(findings: Sequence[Finding], to_stderr: bool = False) -> None:
    """Print findings. In a pipe each is one line, for `grep`; on a terminal the findings of one
    check share a heading.
    """
    if (sys.stderr if to_stderr else sys.stdout).isatty():
        show(*group_findings(findings), err=to_stderr)
    else:
        show(*map(str, findings), err=to_stderr)


def print_briefly(findings: Sequence[Finding], checked: Sequence[str]) -> None:
    """Print errors in full to stderr and count the other findings, for commands that check before
    they work.

    Args:
        checked: the arguments with which `mdsmix check` shows all findings.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    print_findings(errors, to_stderr=True)
    command = shlex.join(["mdsmix", "check", *checked])
    counts = Counter((finding.severity, finding.id) for finding in findings)
    for (severity, id), count in counts.items():
        if severity != "error":
            times = f" ({count} times)" if count > 1 else ""
            show(f"{severity} {id}{times}: see `{command}`", err=True)


def group_findings(findings: Iterable[Finding]) -> Iterator[Item]:
    """Yield findings for a terminal. Findings of one check that follow each other share a heading,
    and the reason and each fix are shown once for all of them.
    """
    for _, run in groupby(findings, key=lambda finding: finding.id):
        group = list(run)
        first = group[0]
        heading = f"{first.severity} {first.id}"
        streams = dict.fromkeys(name for finding in group for name in finding.streams)
        if streams:
            heading += f" [{', '.join(streams)}]"
        yield Heading(heading, SEVERITIES[first.severity])
        yield from (f"  - {finding.message}" for finding in group)
        yield f"  {first.why}"
        fixes = dict.fromkeys(finding.fix for finding in group)
        yield from (f"  Fix: {fix}" for fix in fixes)
