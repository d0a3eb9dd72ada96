"""A page from its first block to its last, as its reader does it; what does not happen as the page
says is told.

Whether it shows what a command prints: times and versions aside, and with `...` for what the page
leaves out. Lines may be folded elsewhere and columns be wider, since paths and times are of other
lengths: words are compared, in their order.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.converting import Answer
from tests.docs import data
from tests.docs.blocks import Block, blocks, shown
from tests.docs.homes import ROOT, Homes, do

FAILED = re.compile(r"^(error|problem|fault)\b", re.MULTILINE)
"What a page shows of a command that ends with another exit code than 0."
READ = re.compile(r"(?:cat|head -\d+) ([\w./-]+)(?: +#.*)?")
OTHERS = {"docker", "llmfoundry", "pip", "ray", "sbatch"}
"Programs that are not here."


@dataclass
class Page:
    """What is wrong with it is in `wrong`, a sentence each."""

    path: Path
    homes: Homes
    wrong: list[str] = field(default_factory=list)
    printed: str = ""
    names: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        for number, block in enumerate(blocks(self.path)):
            if not number and block.language != "home":
                self._home("own")
            for sentence in self._do(block):
                self.wrong.append(f"{self.path.name}, line {block.line}: {sentence}")

    def _do(self, block: Block) -> Iterator[str]:
        match block.mark or block.language:
            case "home":
                self._home(block.said)
            case "data":
                self.names |= getattr(data, block.said)() or {}
            case "run":
                yield from self._run(block.said, "", is_compared=False)
            case "file":
                _write(block)
            case "printed":
                if self.homes.are_as_written and (
                    said := difference(f"... {block.text} ...", self.printed)
                ):
                    yield f"no command before it printed this:\n{said}"
            case "console" | "only exit codes":
                for command, below in shown(block.text):
                    yield from self._run(command, below, is_compared=not block.mark)
            case "python":
                yield from self._python(block.text)
            case "yaml" | "json":
                yaml.safe_load(block.text)
            case other if other != "not run":
                language = other or "no language"
                yield f"a block of {language} needs a mark: see tests/docs/blocks.py"

    def _run(self, command: str, below: str, is_compared: bool) -> Iterator[str]:
        if (read := READ.fullmatch(command)) and not Path(read[1]).exists():
            _create(Path(read[1]), below)
            return
        if command.split()[0] in OTHERS:
            return
        if command.startswith("make "):
            command = f"make -C {ROOT} --dry-run {command[5:]}"
        done = do(command)
        printed = done.out.replace(str(self.homes.place), "")
        self.printed += printed
        yield from _ends(command, below, done, is_compared)
        is_told = is_compared and self.homes.are_as_written and below
        if is_told and (said := difference(below, printed)):
            yield f"$ {command}\n{said}\nall of it:\n{printed}"

    def _python(self, code: str) -> Iterator[str]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                exec(compile(code, str(self.path), "exec"), self.names)
            self.printed += said.getvalue()
        except Exception as error:
            yield f"{type(error).__name__}: {error}, of\n{code}"

    def _home(self, kind: str) -> None:
        self.homes.make(kind)
        self.printed = ""


def _ends(command: str, below: str, done: Answer, is_compared: bool) -> Iterator[str]:
    """A command that fails must show it, and one that shows it must fail."""
    fails = bool(FAILED.search(below))
    if (is_compared and bool(done.code) != fails) or (done.code and not below):
        yield f"$ {command}\nended with {done.code}, and printed\n{done.out}"


def _create(path: Path, text: str) -> None:
    """A file that is shown before anything made it is one of the reader's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", "utf-8")


def _write(block: Block) -> None:
    name, _, base = block.said.partition(", over ")
    text = block.text
    if base:
        tree = yaml.safe_load(Path(base).read_text("utf-8")) | yaml.safe_load(text)
        text = yaml.safe_dump(tree, sort_keys=False)
    _create(Path(name), text.rstrip("\n"))


OTHER_EACH_TIME = re.compile(
    r"[\d,.]+(?= (?:s|ms|MB/s|tokens/s|samples/s|min)\b)"
    r"|(?<=\w )\d+\.\d+\.\d+\b"  # versions
    r"|(?<=\.mdsmix-doctor-)[0-9a-f]+"
    r"|(?<=localhost:)\d+"
    r"|[\d,.]+ [GM]iB(?= for \d+ workers| free|$)"
    r"|(?<=load )[\d.]+"
    r"|[\d.]+ [MGT]B(?= are free)|[\d.]+(?= kB$)"
)
PASSED_OVER = ("reading the ", "importing streaming and torch ", "peak memory: ")
"Lines: what is said while something is waited for, and what processes took."
OF_TIMES = {"seconds", "tokens/s", "samples/s", "first batch, s", "wait a step, ms", "longest, ms"}
"Columns of tables."


def difference(page: str, printed: str) -> str:
    """Empty where the page shows what was printed; else from where on it does not."""
    rest = _line(printed)
    *parts, last = _line(page).split("\n...\n")
    for number, part in enumerate(parts):
        at = rest.find(part)
        if at < 0 or (at and not number):
            return _told(part, rest)
        rest = rest[at + len(part) :]
    end = rest[max(0, len(rest) - len(last)) :] if parts else rest
    return "" if end == last else _told(last, end)


def _line(text: str) -> str:
    """Each word between two line breaks, so that none is found within another."""
    return "".join(f"\n{word}\n" for word in _words(text))


def _words(text: str) -> Iterator[str]:
    columns = list[int]()
    for line in text.splitlines():
        if line.startswith(PASSED_OVER):
            continue
        cells = re.split(r"\s{2,}", line.strip())
        if OF_TIMES & set(cells):
            columns = [i - len(cells) for i, cell in enumerate(cells) if cell in OF_TIMES]
        elif line.strip(" ─") and not line.startswith("  "):
            columns = []
        for column in columns:
            if len(cells) >= -column and re.fullmatch(r"[\d.,]+", cells[column]):
                cells[column] = "#"
        line = re.sub(r"─+", "─", "  ".join(cells))
        yield from OTHER_EACH_TIME.sub("#", line).split()


def _told(part: str, text: str) -> str:
    """The page's words and those that were printed, from shortly before the first that is
    another.
    """
    both = [part.split(), text.split()]
    pairs = enumerate(zip(*both, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(map(len, both)))
    page, printed = (" ".join(words[max(0, same - 8) : same + 25]) for words in both)
    return f"the page: {page}\nprinted:  {printed}"
