"""A page from its first block to its last, as its reader does it; what does not happen as the page says is told."""

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
from tests.docs.compare import difference, part_of
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
                if self.homes.are_as_written and (said := part_of(block.text, self.printed)):
                    yield f"no command before it printed this:\n{said}"
            case "console" | "only exit codes":
                for command, below in shown(block.text):
                    yield from self._run(command, below, is_compared=not block.mark)
            case "python":
                yield from self._python(block.text)
            case "yaml" | "json":
                yaml.safe_load(block.text)
            case other if other != "not run":
                yield f"what is this block of {other or 'no language'}? Say it in a mark: tests/docs/blocks.py"

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
