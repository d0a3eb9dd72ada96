"""Each stream made three times: by this process, by two workers, and by a run that goes on where a killed one ended."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mdsmix import sources
from mdsmix.storage.local import LocalPath
from tests.converting import run_recipe
from tests.golden.files import write_sources
from tests.golden.made import tokenizer
from tests.golden.streams import RECIPES
from tests.here import as_engine

WAYS = ("one", "two", "killed")
WINDOW = 4_000
"Bytes of a work unit: three of them and more in each source."


def convert_all(folder: Path) -> None:
    """Streams at `folder`/<way>/<recipe>/<stream>."""
    write_sources(folder / "sources")
    tokenizer(folder / "sources" / "plain")
    tokenizer(folder / "sources" / "wide", is_wide=True)
    gc.freeze()  # a fork that collects its garbage need not copy what was imported
    with as_engine(), _small_units(), mock.patch.object(os, "fsync"):  # no power is cut here
        for name in RECIPES:
            _convert(_recipe(folder / "sources", name), folder, name)


def _recipe(folder: Path, name: str) -> Path:
    settings, streams = RECIPES[name]
    tree = {"tokenizer": "plain", "max_seq_len": 160, "max_bad": "100%", "streams": streams} | dict(
        settings
    )
    tree["tokenizer"] = {"name": tree["tokenizer"], "template": tree.pop("template", {})}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(tree))
    return path


def _convert(recipe: Path, folder: Path, name: str) -> None:
    one, two, killed = (f"local={folder / way / name}" for way in WAYS)
    with _told_of_writes(writes := Counter[str](), lambda: None):
        outcomes = run_recipe(recipe, one)
    few = [o.stream for o in outcomes if o.units < 3]
    assert not few, f"{name}: less than three work units: {few}"
    run_recipe(recipe, two, workers=2)
    for stream in RECIPES[name][1]:
        _kill(recipe, killed, stream, writes[stream] // 2)
    outcomes = run_recipe(recipe, killed)
    held = {stream for stream, tree in RECIPES[name][1].items() if "holdout" in tree}
    half = {o.stream for o in outcomes if 0 < o.reused < o.units}
    whole = RECIPES[name][1].keys() - half - held
    assert not whole, f"{name}: not killed amid their work: {whole}"


def _kill(recipe: Path, local: str, stream: str, writes: int) -> None:
    """A process that converts the stream and dies as a killed one does, behind so many writes."""
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, f"{stream} was not killed"
        return
    try:
        done = Counter[str]()

        def look() -> None:
            if done[stream] == writes:
                os.kill(os.getpid(), signal.SIGKILL)

        with _told_of_writes(done, look):
            run_recipe(recipe, local, only=[stream])
    finally:
        os._exit(1)


@contextmanager
def _small_units() -> Iterator[None]:
    plan = sources.plan

    def small(files: Any, **settings: Any) -> Any:
        return plan(files, **settings | {"window_bytes": WINDOW})

    with mock.patch.object(sources, "plan", small):
        yield


@contextmanager
def _told_of_writes(counts: Counter[str], told: Callable[[], None]) -> Iterator[None]:
    """Counts the files that are written below each stream's folder."""

    def watched(write: Any) -> Any:
        def writing(self: LocalPath, *given: Any) -> Any:
            answer = write(self, *given)
            if self.name != "lease":
                counts.update(Path(self.path).parts)
                told()
            return answer

        return writing

    names = ("write", "create", "replace")
    with mock.patch.multiple(LocalPath, **{n: watched(getattr(LocalPath, n)) for n in names}):
        yield
