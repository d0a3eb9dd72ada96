"""A run that pauses in the middle of its writes, while another run takes its lease over and
publishes.

Every write of the main process is two steps, before it and after it, so that a test can pause the
run at each of them in turn.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mdsmix.errors import Unreachable
from mdsmix.shards import lease
from mdsmix.shards.index import read_index
from mdsmix.shards.published import find_current
from mdsmix.storage import Location
from tests.converting import manifest_of, mdsmix, run_recipe, write_jsonl
from tests.in_process import use_own_thread

COMMITS = {"replace": "train/index.json", "versioned": "train/mdsmix.manifest"}
"The write by which a stream is published, for each value of the recipe's `publish`."
WRITES = ("write", "create", "replace", "copy_to", "link_to", "delete")


@dataclass
class Pause:
    """Something to do at a step of this thread's run: before (even) or after (odd) a write."""

    step: int
    meanwhile: Callable[[], Any]
    thread: tuple[int, int] = field(default_factory=lambda: (os.getpid(), threading.get_ident()))
    writes: list[str] = field(default_factory=list)
    has_happened: bool = False

    def around(self, location: Location, what: str, write: Callable[[], Any]) -> Any:
        """Do a write, and pause before or after it if it is the step."""
        is_other_thread = self.thread != (os.getpid(), threading.get_ident())
        if is_other_thread or location.name == "lease":
            return write()
        step = 2 * len(self.writes)
        self._pause_at(step)
        self.writes.append(f"{what} {location.parent.name}/{location.name}")
        result = write()
        self._pause_at(step + 1)
        return result

    def _pause_at(self, step: int) -> None:
        if step == self.step:
            self.has_happened = True
            self.meanwhile()


def publish_version(recipe: Path, number: int, publish: str) -> None:
    texts = [{"text": f"Document {n} of version {number}."} for n in range(20)]
    write_jsonl(recipe.parent / "a.jsonl", texts)
    run_recipe(recipe, f"publish={publish}")


def read_published(folder: Location) -> dict[str, bytes]:
    """Return the published index and manifest, which must belong together, and the manifest in the
    split's folder, by URL.
    """
    version = find_current(folder)
    assert version is not None
    assert manifest_of(version).index_hash == read_index(version).hash
    files = (version / "index.json", version / "mdsmix.manifest", folder / "mdsmix.manifest")
    return {file.url: file.read() for file in files}


def assert_paused_run_publishes_nothing(recipe: Path, folder: Location, publish: str) -> None:
    """Pause a run at each of its steps in turn while another run publishes, and assert that the
    other's manifest and index stay. The paused run must report that it publishes nothing, unless it
    had published before.
    """
    publish_version(recipe, 0, publish)
    published_by_other = dict[str, bytes]()
    refusals = 0
    for step in itertools.count():
        with pytest.MonkeyPatch.context() as patch:

            def meanwhile(number: int = 2 * step + 2, patch: pytest.MonkeyPatch = patch) -> None:
                (folder / ".mdsmix" / "lease").delete()
                with ThreadPoolExecutor(1) as pool:  # another run, as far as a lease can tell
                    pool.submit(publish_version, recipe, number, publish).result()
                published_by_other.update(read_published(folder))
                clock = lease._read_clock
                patch.setattr(lease, "_read_clock", lambda: clock() + 3600)  # an hour later

            # A run that pauses does not renew its lease, however long the other run takes.
            patch.setattr(lease.Lease, "start", lambda held: None)
            pause = Pause(step, meanwhile)
            _patch_writes(patch, type(folder), pause)
            published_by_other.clear()
            with use_own_thread():  # the writes of a worker are no steps
                is_refused = _is_refused(recipe, 2 * step + 1, publish)
        if not pause.has_happened:
            break
        assert read_published(folder) == published_by_other, pause.writes
        assert mdsmix("verify", folder).code == 0, pause.writes
        before = pause.writes[: (step + 1) // 2]
        was_published = any(write.endswith(COMMITS[publish]) for write in before)
        assert is_refused is not was_published, (step, pause.writes)
        refusals += is_refused
    assert 2 < refusals < step


def _is_refused(recipe: Path, number: int, publish: str) -> bool:
    try:
        publish_version(recipe, number, publish)
    except Unreachable as error:
        message = str(error)
        names_other_run = "by another run" in message and "deletes nothing" in message
        assert names_other_run or "publishes nothing" in message
        return True
    return False


def _patch_writes(patch: pytest.MonkeyPatch, location_type: type[Location], pause: Pause) -> None:
    def wrap(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        return lambda location, *arguments: pause.around(
            location, name, lambda: write(location, *arguments)
        )

    for name in WRITES:
        patch.setattr(location_type, name, wrap(name, getattr(location_type, name)))
