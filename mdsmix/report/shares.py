"""The table of shares at the end of `mdsmix check`: what was asked, what whole samples come to, what is never seen."""

from __future__ import annotations

from mdsmix.mix.apportion import Apportioned
from mdsmix.mix.shares_table import shares_table, title
from mdsmix.report.table import print_table
from mdsmix.words import printable


def print_shares(found: Apportioned) -> None:
    from rich.console import Console
    from rich.text import Text

    console, table = Console(soft_wrap=True, highlight=False), shares_table(found)
    console.print(Text(printable(title(found))))
    print_table(table, console)
    for note in table.notes:
        console.print(Text(printable(note)))
