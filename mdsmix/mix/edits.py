"""Characters of a text that become others, and what in it is a comment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

DASH = re.compile(r" *- +")


class Edit(NamedTuple):
    """Characters `start` to `stop` become `text`."""

    start: int
    stop: int
    text: str


def applied(text: str, edits: Sequence[Edit]) -> str:
    """The text with all of them made; of those at one place the first comes first."""
    parts, at = list[str](), 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        parts += [text[at : edit.start], edit.text]
        at = edit.stop
    return "".join([*parts, text[at:]])


def comments(lines: str) -> str:
    """Those on lines of their own, as they stand."""
    return "".join(line for line in lines.splitlines(True) if line.lstrip().startswith("#"))


def without_tail(text: str, start: int, stop: int) -> int:
    """Where the section ends: comments and blank lines behind it belong to what follows."""
    lines = text[start:stop].splitlines(keepends=True)
    while len(lines) > 1 and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        stop -= len(lines.pop())
    return stop
