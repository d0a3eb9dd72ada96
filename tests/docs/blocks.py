"""The pages, cut into what a test does with them: fenced blocks, and marks in HTML comments that no reader sees.

A mark stands on a line of its own. What stands right above a block is about it; `home` and `run` are steps of their own.

    <!-- home: demo -->              from here on a fresh folder of that kind (homes.py); a page begins in `own`
    <!-- data: NAME -->              files that the page has its reader have (data.py)
    <!-- run: COMMAND -->            a command that the page does not show
    <!-- file: NAME -->              the block is that file
    <!-- file: NAME, over BASE -->   the recipe BASE with the keys of the block in place of its own
    <!-- printed -->                 the block is part of what a command before it printed
    <!-- only exit codes -->         commands run, and what they print is not compared: it is another one each time
    <!-- not run: WHY -->            for readers alone
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"<!-- (home|data|run|file|printed|only exit codes|not run)(?:: (.*?))? -->")
FENCE = re.compile(r"( *)```([\w-]*).*")
STEPS = ("home", "data", "run")


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
    """In the order of the page; a fence that is not closed, or a mark that is about nothing, is an AssertionError."""
    lines = enumerate(page.read_text("utf-8").splitlines(), 1)
    mark, said = "", ""
    for number, line in lines:
        where = f"{page}, line {number}"
        if found := MARK.fullmatch(line.strip()):
            assert not mark, f"{where}: the mark above it is about no block"
            if found[1] in STEPS:
                yield Block(page, number, found[1], "", said=found[2])
            else:
                mark, said = found[1], found[2] or ""
        elif fence := FENCE.fullmatch(line):
            yield Block(page, number, fence[2], _inside(lines, fence[1], where), mark, said)
            mark, said = "", ""
        else:
            assert not (mark and line.strip()), f"{where}: the mark above it is about no block"
    assert not mark, f"{page}: its last mark is about no block"


def _inside(lines: Iterator[tuple[int, str]], indent: str, where: str) -> str:
    inside = list[str]()
    for _, line in lines:
        if line == f"{indent}```":
            return "".join(f"{each}\n" for each in inside)
        inside.append(line.removeprefix(indent))
    raise AssertionError(f"{where}: the fence that begins there is not closed")


def shown(console: str) -> Iterator[tuple[str, str]]:
    """Each command behind a `$ ` with what is shown below it; lines that end in a backslash go on."""
    command, below = "", list[str]()
    for line in console.splitlines():
        if command.endswith("\\"):
            command = f"{command[:-1].rstrip()} {line.strip()}"
        elif line.startswith("$ "):
            if command:
                yield command, "\n".join(below)
            command, below = line[2:], []
        else:
            below.append(line)
    assert command, f"no line of this begins with `$ `, so it is no console: {console[:60]!r}"
    yield command, "\n".join(below)
