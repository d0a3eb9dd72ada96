"""A run that stands still in the middle of its writes, while another takes its lease over and
publishes.

Every write of the main process is a step, before it and after it, so that a test can go through all
of them.
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
from tests.in_process import aside

COMMITS = {"replace": "train/index.json", "versioned": "train/mdsmix.manifest"}
"The write by which a stream is published, for each way to publish it."
WRITES = ("write", "create", "replace", "copy_to", "link_to", "delete")


@dataclass
class Stall:
    """The run of this thread does something else at a step of its own: before (even) or after (odd)
    a write.
    """

    step: int
    meanwhile: Callable[[], Any]
    who: tuple[int, int] = field(default_factory=lambda: (os.getpid(), threading.get_ident()))
    done: list[str] = field(default_factory=list)
    was_met: bool = False

    def around(self, place: Location, what: str, work: Callable[[], Any]) -> Any:
        if self.who != (os.getpid(), threading.get_ident()) or place.name == "lease":
            return work()
        step = 2 * len(self.done)
        self._at(step)
        self.done.append(f"{what} {place.parent.name}/{place.name}")
        answer = work()
        self._at(step + 1)
        return answer

    def _at(self, step: int) -> None:
        if step == self.step:
            self.was_met = True
            self.meanwhile()


def publish_version(recipe: Path, number: int, way: str) -> None:
    texts = [{"text": f"Document {n} of version {number}."} for n in range(20)]
    write_jsonl(recipe.parent / "a.jsonl", texts)
    run_recipe(recipe, f"publish={way}")


def standing(folder: Location) -> dict[str, bytes]:
    """Index and card of what is published, which fit, and the card in the split's folder."""
    place = find_current(folder)
    assert place is not None
    assert manifest_of(place).index_hash == read_index(place).hash
    found = (place / "index.json", place / "mdsmix.manifest", folder / "mdsmix.manifest")
    return {at.url: at.read() for at in found}


def stalled_everywhere(recipe: Path, folder: Location, way: str) -> None:
    """At whatever step a run stands still while another publishes: what that one published stands,
    card and index, and the first says that it published nothing, unless it had before.
    """
    publish_version(recipe, 0, way)
    theirs, refused = dict[str, bytes](), 0
    for step in itertools.count():
        with pytest.MonkeyPatch.context() as patch:

            def meanwhile(number: int = 2 * step + 2, patch: pytest.MonkeyPatch = patch) -> None:
                (folder / ".mdsmix" / "lease").delete()
                with ThreadPoolExecutor(1) as pool:  # another run, as far as a lease can tell
                    pool.submit(publish_version, recipe, number, way).result()
                theirs.update(standing(folder))
                real = lease._now
                patch.setattr(lease, "_now", lambda: real() + 3600)  # an hour has passed then

            stall = Stall(step, meanwhile)
            _watch(patch, type(folder), stall)
            theirs.clear()
            with aside():  # what a worker writes is no step
                is_refused = _is_refused(recipe, 2 * step + 1, way)
        if not stall.was_met:
            break
        assert standing(folder) == theirs, stall.done
        assert mdsmix("verify", folder).code == 0, stall.done
        before = stall.done[: (step + 1) // 2]
        was_published = any(write.endswith(COMMITS[way]) for write in before)
        assert is_refused is not was_published, (step, stall.done)
        refused += is_refused
    assert 2 < refused < step


def _is_refused(recipe: Path, number: int, way: str) -> bool:
    try:
        publish_version(recipe, number, way)
    except Unreachable as error:
        said = str(error)
        is_meant = "by another run" in said and "deletes nothing" in said
        assert is_meant or "publishes nothing" in said
        return True
    return False


def _watch(patch: pytest.MonkeyPatch, kind: type[Location], stall: Stall) -> None:
    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda place, *given: stall.around(place, name, lambda: real(place, *given))

    for name in WRITES:
        patch.setattr(kind, name, watched(name, getattr(kind, name)))
