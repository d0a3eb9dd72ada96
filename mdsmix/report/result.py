"""The base of the results of the Python API: one result as text, as JSON and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from io import StringIO
from typing import Any

from mdsmix.report.drawings import Ribbon
from mdsmix.report.show import Item, show
from mdsmix.table import Tree


class Result(ABC):
    """A result of `mdsmix.api`. `print` shows what the command shows, a notebook shows HTML."""

    @abstractmethod
    def items(self) -> Iterable[Item]:
        """Return the result as the command shows it: tables, sentences, findings."""

    @abstractmethod
    def to_dict(self) -> Tree:
        """Return the result as the command prints it with `--json`."""

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        show(*self.items(), console=Console(file=text, highlight=False, width=100))
        return text.getvalue().rstrip("\n")

    def items_with_drawings(self) -> Iterable[Item | Ribbon]:
        """Return the result as a notebook shows it: the items and drawings."""
        return self.items()

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """Print the result as text in IPython, where there is no HTML."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Return HTML for a notebook. Text of streams and records is escaped."""
        from mdsmix.report.notebook import make_html

        return make_html(self.items_with_drawings())
