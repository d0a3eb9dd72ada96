"""Whoever was overtaken publishes nothing, and when all writers have ended, card and index fit:
whatever the order was.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix.shards.index import Index, read_index
from mdsmix.shards.lease import Overtaken, Revision, publish_in_place, replace_unchanged
from mdsmix.storage import Stat, locate
from mdsmix.storage.local import LocalPath
from tests.alarm import SECONDS
from tests.converting import Web, windows
from tests.paused_run import COMMITS, stalled_everywhere
from tests.published import CONCAT, TOKEN_ROW, publish

SEEDS = (*range(60), 3369)
"""In the last one a card is put back between another's card and index, which takes three writers
and luck.
"""


def stream(folder: Path, token: int) -> tuple[Index, bytes]:
    """An index, and a card that is its own."""
    publish(folder, CONCAT, [{"tokens": [token, *TOKEN_ROW["tokens"][1:]]}], card={})
    return read_index(locate(folder / "train")), (folder / "train" / "mdsmix.manifest").read_bytes()


HELD: Any = SimpleNamespace(confirm=lambda: None)
"""A lease that says yes to everybody, as one does to a holder that is stopped right after he has
asked.
"""


class Turns:
    """Lets one of several threads do one thing at a time; which one, the seed says."""

    def __init__(self, seed: int, running: int) -> None:
        self.random, self.running = random.Random(seed), running
        self.waiting, self.changed = list[int](), threading.Condition()

    def take(self) -> None:
        me = threading.get_ident()
        with self.changed:
            self.waiting.append(me)
            self.end()
            assert self.changed.wait_for(lambda: me not in self.waiting, SECONDS)

    def end(self) -> None:
        with self.changed:
            self.running -= 1
            if not self.running and self.waiting:
                self.running = 1
                self.waiting.remove(self.random.choice(sorted(self.waiting)))
                self.changed.notify_all()


@dataclass(frozen=True)
class Memory:
    """A place in a folder of memory, with what publications ask of a Location. Stamps are of the
    content, as ETags are: what was written and put back looks as if nobody had written. (On a disk
    below, they are new with every write.)
    """

    held: dict[str, tuple[Stat, bytes]]
    turns: Turns
    name: str = ""
    parent: str = "memory"

    def __truediv__(self, name: str) -> Memory:
        return dataclasses.replace(self, name=name)

    def put(self, content: bytes) -> Stat:
        self.held[self.name] = Stat(len(content), str(hash(content))), content
        return self.held[self.name][0]

    def fetch(self) -> tuple[Stat, bytes] | None:
        self.turns.take()
        return self.held.get(self.name)

    def create(self, content: bytes) -> Stat | None:
        return None if self.fetch() else self.put(content)

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        found = self.fetch()
        return self.put(content) if found and found[0].stamp == stamp else None

    def write(self, content: bytes) -> None:
        self.turns.take()
        self.put(content)

    def delete(self) -> None:
        self.turns.take()
        self.held.pop(self.name, None)


@pytest.mark.parametrize("is_first", [True, False])
def test_of_writers_in_any_order_each_success_follows_on_the_one_before_and_the_card_fits(
    tmp_path: Path, is_first: bool
) -> None:
    """No lease keeps them apart here: three look, and write in every order that the seeds give."""
    met, versions = set(), [stream(tmp_path / str(n), 10 + n) for n in range(4)]
    right = {index.content: card for index, card in versions}
    for seed in SEEDS:
        turns = Turns(seed, running=3)
        folder: Any = Memory({}, turns)
        if not is_first:
            (folder / "index.json").put(versions[0][0].content)
            (folder / "mdsmix.manifest").put(versions[0][1])

        def run(version: tuple[Index, bytes], folder: Any = folder, turns: Turns = turns) -> bool:
            try:
                publish_in_place(folder, *version, HELD)
            except Overtaken:
                return False
            finally:
                turns.end()
            return True

        with ThreadPoolExecutor(3) as pool:
            succeeded = pool.map(run, versions[1:])
            winners = [v for v, is_in in zip(versions[1:], succeeded, strict=True) if is_in]
        standing, card = folder.held["index.json"][1], folder.held["mdsmix.manifest"][1]
        assert right[standing] == card, f"seed {seed}: the card is another's"
        assert standing in [index.content for index, _ in winners], f"seed {seed}"
        replaced = {f".mdsmix/{i.hash}.index" for i, _ in winners if i.content != standing}
        assert replaced <= folder.held.keys(), f"seed {seed}: a success was overwritten unseen"
        met.add(len(winners))
    assert met >= {1, 2}, "some came one after the other, some crossed"


def test_a_write_whose_answer_was_lost_is_ones_own_and_another_is_not(tmp_path: Path) -> None:
    at = locate(tmp_path / "a")
    for seen in (Revision.of(at), Revision(at, "a stamp", b"what was there")):
        at.write(b"mine")
        assert replace_unchanged(seen, b"mine").stamp == getattr(at.stat(), "stamp", None)
        at.write(b"another's")
        with pytest.raises(Overtaken, match="was published by another run") as refusal:
            replace_unchanged(seen, b"mine")
        assert refusal.value.exit_code == 4
        assert at.read() == b"another's"


def test_a_mere_conflict_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may answer 409 while another write is under way, and that one may fail."""
    at = locate(tmp_path / "a")
    at.write(b"before")
    seen, real, refused = Revision.of(at), LocalPath.replace, iter([True, True, False])

    def replace(self: LocalPath, stamp: str, content: bytes) -> Stat | None:
        return None if next(refused) else real(self, stamp, content)

    monkeypatch.setattr(LocalPath, "replace", replace)
    replace_unchanged(seen, b"mine")
    assert at.read() == b"mine"


@pytest.mark.parametrize("way", COMMITS)
def test_a_run_that_stands_still_at_any_step_publishes_nothing_over_a_newer_one(
    web: Web, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 1500)
    stalled_everywhere(web.recipe, locate(web.train), way)
