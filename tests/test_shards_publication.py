"""Writers of one stream that work at the same time: a run that was overtaken publishes nothing, and
when all writers have ended, manifest and index belong together, in whatever order they wrote.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from mdsmix.shards import lease, published
from mdsmix.shards.index import Index, read_index
from mdsmix.shards.lease import Overtaken, Revision, publish_in_place, replace_unchanged
from mdsmix.storage import Stat, locate
from mdsmix.storage.local import LocalPath
from tests.alarm import WAIT_SECONDS
from tests.converting import Project, set_window_size
from tests.paused_run import COMMITS, assert_paused_run_publishes_nothing
from tests.published import CONCAT, TOKEN_ROW, publish

SEEDS = (*range(60), 3369)
"""With the last one, a manifest is restored between the manifest and the index of another writer,
which takes three writers and luck.
"""


class Version(NamedTuple):
    """A stream to publish."""

    index: Index
    manifest: bytes


def make_version(folder: Path, token: int) -> Version:
    """Make an index with a manifest of its own."""
    publish(folder, CONCAT, [{"tokens": [token, *TOKEN_ROW["tokens"][1:]]}], card={})
    manifest = (folder / "train" / "mdsmix.manifest").read_bytes()
    return Version(read_index(locate(folder / "train")), manifest)


ALWAYS_CONFIRMED: Any = SimpleNamespace(confirm=lambda: None)
"""A lease that confirms every writer, as it does for a holder that is stopped right after it has
asked.
"""


class Turns:
    """Lets one of several threads do one thing at a time; the seed decides which thread."""

    def __init__(self, seed: int, running: int) -> None:
        self.random = random.Random(seed)
        self.running = running
        self.waiting = list[int]()
        self.changed = threading.Condition()

    def wait_for_turn(self) -> None:
        me = threading.get_ident()
        with self.changed:
            self.waiting.append(me)
            self.end()
            assert self.changed.wait_for(lambda: me not in self.waiting, WAIT_SECONDS)

    def end(self) -> None:
        with self.changed:
            self.running -= 1
            if not self.running and self.waiting:
                self.running = 1
                self.waiting.remove(self.random.choice(sorted(self.waiting)))
                self.changed.notify_all()


class StoredFile(NamedTuple):
    stat: Stat
    content: bytes


@dataclass(frozen=True)
class Memory:
    """A file in a folder in memory, with the methods of a Location that publishing uses.

    A stamp depends on the content alone, as an ETag does: if a file was changed and changed back,
    it looks as if nobody had written. (On a disk, further down, each write gives a new stamp.)
    """

    files: dict[str, StoredFile]
    turns: Turns
    name: str = ""
    parent: str = "memory"

    def __truediv__(self, name: str) -> Memory:
        return dataclasses.replace(self, name=name)

    def put(self, content: bytes) -> Stat:
        stat = Stat(len(content), str(hash(content)))
        self.files[self.name] = StoredFile(stat, content)
        return stat

    def fetch(self) -> StoredFile | None:
        self.turns.wait_for_turn()
        return self.files.get(self.name)

    def create(self, content: bytes) -> Stat | None:
        return None if self.fetch() else self.put(content)

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        file = self.fetch()
        return self.put(content) if file and file.stat.stamp == stamp else None

    def write(self, content: bytes) -> None:
        self.turns.wait_for_turn()
        self.put(content)

    def delete(self) -> None:
        self.turns.wait_for_turn()
        self.files.pop(self.name, None)


def read_one_by_one(request: Any, files: list[Any], *, last_first: bool) -> list[Any]:
    """Return the results of `map_files`, in the order of the files."""
    step = -1 if last_first else 1
    return [request(file) for file in files[::step]][::step]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_reader_never_sees_a_new_index_with_the_manifest_before(
    tmp_path: Path, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a store both are read at the same time. A stream without a manifest would be taken for
    one of another program.
    """
    old, new = (make_version(tmp_path / str(n), 10 + n) for n in range(2))
    folder = tmp_path / "train"
    folder.mkdir()

    def publish_version(version: Version) -> None:
        publish_in_place(locate(folder), version.index, version.manifest, ALWAYS_CONFIRMED)

    if not is_first:
        publish_version(old)

    def publish_between(request: Any, files: list[Any]) -> list[Any]:
        index_file, manifest_file = files
        manifest = request(manifest_file)
        publish_version(new)
        return [request(index_file), manifest]

    monkeypatch.setattr(published, "map_files", publish_between)
    stream = published.open_published(locate(folder))
    assert stream is not None
    assert stream.index.content == new.index.content
    assert stream.trusted_manifest is not None


@pytest.mark.parametrize("is_first", [True, False])
def test_writers_in_any_order_overwrite_only_what_they_read_and_the_manifest_fits_the_index(
    tmp_path: Path, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lease keeps the writers apart here: three of them read and write in the seeds' orders. In
    a store manifest and index are read at the same time, so the index first in half of the seeds.
    """
    numbers_of_winners = set[int]()
    first, *versions = [make_version(tmp_path / str(n), 10 + n) for n in range(4)]
    right_manifests = {version.index.content: version.manifest for version in (first, *versions)}
    for seed in SEEDS:
        turns = Turns(seed, running=3)
        monkeypatch.setattr(
            lease, "map_files", partial(read_one_by_one, last_first=seed % 4 in (1, 2))
        )
        folder: Any = Memory({}, turns)
        if not is_first:
            (folder / "index.json").put(first.index.content)
            (folder / "mdsmix.manifest").put(first.manifest)

        def run(version: Version, folder: Any = folder, turns: Turns = turns) -> bool:
            try:
                publish_in_place(folder, version.index, version.manifest, ALWAYS_CONFIRMED)
            except Overtaken:
                return False
            finally:
                turns.end()
            return True

        with ThreadPoolExecutor(3) as pool:
            outcomes = list(pool.map(run, versions))
        winners = [v.index for v, succeeded in zip(versions, outcomes, strict=True) if succeeded]
        index = folder.files["index.json"].content
        manifest = folder.files["mdsmix.manifest"].content
        assert manifest == right_manifests[index], f"seed {seed}: the manifest of another index"
        assert index in [winner.content for winner in winners], f"seed {seed}"
        replaced = {f".mdsmix/{w.hash}.index" for w in winners if w.content != index}
        assert replaced <= folder.files.keys(), f"seed {seed}: a success was overwritten unread"
        numbers_of_winners.add(len(winners))
    assert numbers_of_winners >= {1, 2}, "some wrote one after the other, some at the same time"


def test_a_write_whose_answer_was_lost_is_recognised_and_that_of_another_run_is_not(
    tmp_path: Path,
) -> None:
    file = locate(tmp_path / "a")
    for revision in (Revision.read(file), Revision(file, "a stamp", b"what was there")):
        file.write(b"mine")
        assert replace_unchanged(revision, b"mine").stamp == getattr(file.stat(), "stamp", None)
        file.write(b"another's")
        with pytest.raises(Overtaken, match="was published by another run") as refusal:
            replace_unchanged(revision, b"mine")
        assert refusal.value.exit_code == 4
        assert file.read() == b"another's"


def test_a_conflict_without_a_change_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may answer 409 while another write is under way, and that write may fail."""
    file = locate(tmp_path / "a")
    file.write(b"before")
    revision = Revision.read(file)
    real_replace = LocalPath.replace
    conflicts = iter([True, True, False])

    def replace(self: LocalPath, stamp: str, content: bytes) -> Stat | None:
        return None if next(conflicts) else real_replace(self, stamp, content)

    monkeypatch.setattr(LocalPath, "replace", replace)
    replace_unchanged(revision, b"mine")
    assert file.read() == b"mine"


@pytest.mark.parametrize("way", COMMITS)
def test_a_run_that_is_paused_at_any_step_publishes_nothing_over_a_newer_publication(
    project: Project, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_window_size(monkeypatch, 1500)
    assert_paused_run_publishes_nothing(project.recipe, locate(project.train), way)
