"""The pages, cut into what a test does with them: fenced blocks, and marks in HTML comments that no
reader sees.

A mark stands on a line of its own. What stands right above a block is about it; `home` and `run`
are steps of their own.

    <!-- home: demo -->              from here on a fresh folder of that kind (homes.py); a page
    begins in `own`
    <!-- data: NAME -->              files that the page has its reader have (data.py)
    <!-- run: COMMAND -->            a command that the page does not show
    <!-- file: NAME -->              the block is that file
    <!-- file: NAME, over BASE -->   the recipe BASE with the keys of the block in place of its own
    <!-- printed -->                 the block is part of what a command before it printed
    <!-- only exit codes -->         commands run, and what they print is not compared: it is
    another one each time
    <!-- not run: WHY -->            for readers alone
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIECE = re.compile(
    r"^ *<!-- (?P<mark>home|data|run|file|printed|only exit codes|not run)(?:: (?P<said>.*?))? -->$"
    r"|^(?P<indent> *)```(?P<language>[\w-]*).*\n(?P<text>(?:.*\n)*?)(?P=indent)```$"
    r"|^ *(?P<stray>\S.*)$",
    re.MULTILINE,
)
COMMAND = re.compile(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*?)\n?", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Fenced text, or a step without one (`language` is then its mark)."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    said: str = ""


def blocks(page: Path) -> Iterator[Block]:
    """In the order of the page; a fence that is not closed, or a mark that is about nothing, is an
    AssertionError.
    """
    text, mark, said = page.read_text("utf-8"), "", ""
    for found in PIECE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["language"] is not None:
            inside = re.sub(f"(?m)^{found['indent']}", "", found["text"])
            yield Block(page, line, found["language"], inside, mark, said)
            mark, said = "", ""
            continue
        assert not mark, f"{page}, line {line}: the mark above it is about no block"
        if found["stray"]:
            assert not found["stray"].startswith("```"), f"{page}, line {line}: it is not closed"
        elif found["mark"] in ("home", "data", "run"):
            yield Block(page, line, found["mark"], "", said=found["said"])
        else:
            mark, said = found["mark"], found["said"] or ""
    assert not mark, f"{page}: its last mark is about no block"


def shown(console: str) -> Iterator[tuple[str, str]]:
    """Each command behind a `$ ` with what is shown below it; lines that end in a
    backslash go on.
    """
    assert console.startswith("$ "), f"no line of this begins with `$ `: {console[:60]!r}"
    _, *commands = re.split(r"(?m)^\$ ", console)
    for found in map(COMMAND.fullmatch, commands):
        assert found
        yield re.sub(r" *\\\n *", " ", found[1]), found[2]
