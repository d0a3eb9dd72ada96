"""Where the commands of a page run, and how: the folder of somebody who follows it.

Its name, `/home/you/mdsmix`, is what pages show for it; what the test's own folder adds in front of
it is taken off. Commands of mdsmix run in this process, which costs some milliseconds; all else,
and what is piped, is bash's.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tests.converting import Answer, mdsmix
from tests.corpus import train_tokenizer, write_corpus

ROOT = Path(__file__).parents[2]
WRITTEN_WITH = "5f0a28acd8eeea0d"
"""xxh64 of corpus and tokenizer of `make demo` under the Python that the pages were written with
(3.11.7): another one has another library.
"""


@dataclass(frozen=True)
class Homes:
    """`place` is the folder of all tests; what is made for one page is kept beside its home for the
    next one.
    """

    place: Path

    @property
    def home(self) -> Path:
        return self.place / "home/you/mdsmix"

    def make(self, kind: str) -> None:
        """The home anew, and this process in it: `empty` holds nothing, `own` a tokenizer and the
        starters, `corpus` the demo's files and recipes, `demo` its streams and YAML too.
        """
        kept = self.place / kind
        os.chdir(self.place)
        shutil.rmtree(self.home, ignore_errors=True)
        if not kept.exists():
            getattr(self, kind)()
            shutil.copytree(self.home, kept)
        else:
            shutil.copytree(kept, self.home)
        os.chdir(self.home)

    def empty(self) -> None:
        """Nothing, as on the first day."""
        self.home.mkdir(parents=True)

    def corpus(self) -> None:
        """What `make demo` begins with."""
        _write_demo(self.home)

    def demo(self) -> None:
        """At the place where it stays: sources are known by their paths."""
        self.make("corpus")
        for command in ("convert", "render-yaml -o demo/train.yaml"):
            done = do(f"mdsmix {command} yamls/demo.yaml")
            assert not done.code, done.out

    def own(self) -> None:
        self.make("corpus")
        shutil.move(self.home / "demo/tokenizer", self.home)
        shutil.rmtree(self.home / "demo")

    @functools.cached_property
    def are_as_written(self) -> bool:
        """Whether figures and samples of the demo's corpus, which has been made, are those that the
        pages show.
        """
        kept = self.place / "corpus"
        if not kept.exists():
            _write_demo(kept)
        demo = kept / "demo"
        made = [*sorted((demo / "corpus").iterdir()), demo / "tokenizer/tokenizer.json"]
        return xxhash.xxh64_hexdigest(b"".join(p.read_bytes() for p in made)) == WRITTEN_WITH


def _write_demo(folder: Path) -> None:
    """Write the starters, and the corpus and tokenizer of `make demo`."""
    shutil.copytree(ROOT / "yamls", folder / "yamls")
    write_corpus(folder / "demo/corpus")
    train_tokenizer(folder / "demo/tokenizer")


def do(command: str) -> Answer:
    """What a terminal would show (`out`), where this process stands."""
    words = shlex.split(command, comments=True)
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command)
    if words[:1] == ["mdsmix"] and not re.search(r"[|<>;$`]|&&", unquoted):
        return mdsmix(*words[1:], together=True)
    found = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"CHECKOUT": str(ROOT)},
        timeout=300,
    )
    return Answer(found.returncode, found.stdout, "")
