"""Each stream made by this process, and every third one again: by two workers, a run that goes on
where a killed one ended, or one unit by a job of its own.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mdsmix.conversion.planning import ArrayPart, Options
from mdsmix.conversion.run import convert_part
from mdsmix.kinds import open_recipe
from mdsmix.shards import lease
from mdsmix.storage.local import LocalPath
from tests.converting import Told, run_recipe, windows
from tests.golden.files import write_sources
from tests.golden.made import NAMED, ROLE_ENDED, ROLES, tokenizer
from tests.golden.streams import RECIPES
from tests.in_process import use_own_process

WAYS = ("one", "two", "killed", "parts")
HELD = {"held", "pairs-held"}
"Their units are done after those of what is not held out."


def convert_all(folder: Path) -> None:
    """Streams at `folder`/<way>/<recipe>/<stream>."""
    lease.BEAT_SECONDS = 0.1  # killed runs are taken over soon
    write_sources(folder / "sources")
    tokenizer(folder / "sources" / "plain")
    tokenizer(folder / "sources" / "wide", is_wide=True)
    tokenizer(folder / "sources" / "roles", template=ROLE_ENDED, roles=ROLES)
    tokenizer(folder / "sources" / "named", template=NAMED)
    gc.freeze()  # a fork that collects its garbage need not copy what was imported
    with use_own_process(), pytest.MonkeyPatch.context() as patch:
        windows(patch, 4_000)  # three work units and more in each source
        patch.setattr(os, "fsync", lambda file: None)  # no power is cut here
        for name in RECIPES:
            _convert(folder, name)


def _convert(folder: Path, name: str) -> None:
    """All streams by this process, and of each nine three again, by one of the other ways each."""
    (settings, streams), writes = RECIPES[name], Counter[str]()
    usual = {"max_seq_len": 160, "max_bad": "100%", "tokenizer": "plain"}
    tree = usual | {"streams": streams} | settings
    tree["tokenizer"] = {"name": tree["tokenizer"], "template": tree.pop("template", {})}
    recipe = folder / "sources" / f"{name}.yaml"
    recipe.write_text(json.dumps(tree))
    one, *others = (f"local={folder / way / name}" for way in WAYS)
    with _counting(writes):
        outcomes = run_recipe(recipe, one)
    few = [o.stream for o in outcomes if o.units < 3]
    assert not few, f"{name}: less than three work units: {few}"
    for number, (again, local) in enumerate(zip(_AGAIN, others, strict=True)):
        if own := [*streams][number :: 3 * len(others)]:
            again(recipe, local, {stream: writes[stream] for stream in own})


Sizes = dict[str, int]
"Written files of streams."


def _by_two(recipe: Path, local: str, sizes: Sizes) -> None:
    run_recipe(recipe, local, workers=2, only=[*sizes])


def _killed(recipe: Path, local: str, sizes: Sizes) -> None:
    for stream, writes in sizes.items():
        _kill(recipe, local, stream, writes // 2)
    outcomes = run_recipe(recipe, local, only=[*sizes])
    half = {o.stream for o in outcomes if 0 < o.reused < o.units}
    whole = sizes.keys() - half - HELD
    assert not whole, f"{recipe}: not killed amid their work: {whole}"


def _in_parts(recipe: Path, local: str, sizes: Sizes) -> None:
    """The first unit by a job of its own, and the others by the run that joins them."""
    for stream in sizes:
        options = Options(only=[stream], workers=1, part=ArrayPart(1, 999))
        (part,) = convert_part(open_recipe(recipe, [local]), options, Told())
        assert part.units == 1, part
    outcomes = run_recipe(recipe, local, only=[*sizes], is_finish=True)
    assert {*sizes} <= {o.stream for o in outcomes if o.reused}, outcomes


_AGAIN = (_by_two, _killed, _in_parts)


def _kill(recipe: Path, local: str, stream: str, writes: int) -> None:
    """A process that converts the stream and dies as a killed one does, behind so many writes."""
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, f"{stream} was not killed"
        return
    try:
        with _counting(Counter(), dies_at=(stream, writes)):
            run_recipe(recipe, local, only=[stream])
    finally:
        os._exit(1)


@contextmanager
def _counting(counts: Counter[str], dies_at: tuple[str, int] = ("", 0)) -> Iterator[None]:
    """Counts the files that are written below each stream's folder. `dies_at`: a stream, and of its
    files the last one.
    """

    def watched(write: Any) -> Any:
        def writing(self: LocalPath, *given: Any) -> Any:
            answer = write(self, *given)
            if self.name != "lease":
                counts.update(Path(self.path).parts)
                if counts[dies_at[0]] == dies_at[1] > 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return writing

    names = ("write", "create", "replace")
    with mock.patch.multiple(LocalPath, **{n: watched(getattr(LocalPath, n)) for n in names}):
        yield
