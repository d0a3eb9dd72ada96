"""Where the commands of a page run: the folder of somebody who follows it.

Its name, `/home/you/mdsmix`, is what pages show for it; what the test's own folder adds in front of it is taken off.
"""

import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tests.corpus import train_tokenizer, write_corpus
from tests.docs.shell import ROOT, do

PLACE = "home/you/mdsmix"
WRITTEN_WITH = "5f0a28acd8eeea0d"
"xxh64 of corpus and tokenizer of `make demo` under the Python that the pages were written with (3.11.7): another one has another library."


@dataclass(frozen=True)
class Homes:
    """`place` is the folder of all tests; what is made for one page is kept beside its home for the next one."""

    place: Path

    @property
    def home(self) -> Path:
        return self.place / PLACE

    def make(self, kind: str) -> None:
        """The home anew, and this process in it: `own` holds a tokenizer and the starters, `corpus` the demo's files and recipes, `demo` its streams and YAML too."""
        assert kind in MAKERS, f"no home is called {kind}; there are {', '.join(MAKERS)}"
        kept = self.place / kind
        os.chdir(self.place)
        shutil.rmtree(self.home, ignore_errors=True)
        if not kept.exists():
            MAKERS[kind](self)
            shutil.copytree(self.home, kept)
        else:
            shutil.copytree(kept, self.home)
        os.chdir(self.home)

    def corpus(self) -> None:
        """What `make demo` begins with."""
        shutil.copytree(ROOT / "yamls", self.home / "yamls")
        write_corpus(self.home / "demo/corpus")
        train_tokenizer(self.home / "demo/tokenizer")

    def demo(self) -> None:
        """At the place where it stays: sources are known by their paths."""
        self.make("corpus")
        os.chdir(self.home)
        for command in (
            "convert yamls/demo.yaml",
            "render-yaml yamls/demo.yaml -o demo/train.yaml",
        ):
            done = do(f"mdsmix {command}")
            assert not done.code, done.text

    def own(self) -> None:
        self.make("corpus")
        tokenizer = self.place / "corpus/demo/tokenizer"
        shutil.rmtree(self.home)
        shutil.copytree(tokenizer, self.home / "tokenizer")
        shutil.copytree(ROOT / "yamls", self.home / "yamls")

    @functools.cached_property
    def are_as_written(self) -> bool:
        """Whether figures and samples of the demo's corpus, which has been made, are those that the pages show."""
        return digest(self.place / "corpus/demo") == WRITTEN_WITH


MAKERS = {"own": Homes.own, "corpus": Homes.corpus, "demo": Homes.demo}


def digest(demo: Path) -> str:
    hashed = xxhash.xxh64()
    for path in (*sorted((demo / "corpus").iterdir()), demo / "tokenizer/tokenizer.json"):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()
