"""Each stream is converted by this process, and every third one again: by two workers, by a run
that continues a killed one, or with one unit by a job of an array.
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
from tests.converting import RecordingWatcher, run_recipe, set_window_size
from tests.golden.files import write_sources
from tests.golden.made import NAMED, ROLE_ENDED, ROLES, tokenizer
from tests.golden.streams import RECIPES
from tests.in_process import use_own_process

WAYS = ("one", "two", "killed", "parts")
WITH_HOLDOUT = {"held", "pairs-held"}
"Streams whose held-out units are converted after all others, so a killed run may have none."


def convert_all(folder: Path) -> None:
    """Convert all streams, to `folder`/<way>/<recipe>/<stream>."""
    lease.BEAT_SECONDS = 0.1  # killed runs are taken over soon
    write_sources(folder / "sources")
    tokenizer(folder / "sources" / "plain")
    tokenizer(folder / "sources" / "wide", is_wide=True)
    tokenizer(folder / "sources" / "roles", template=ROLE_ENDED, roles=ROLES)
    tokenizer(folder / "sources" / "named", template=NAMED)
    gc.freeze()  # a fork that collects its garbage need not copy what was imported
    with use_own_process(), pytest.MonkeyPatch.context() as patch:
        set_window_size(patch, 4_000)  # three work units and more in each source
        patch.setattr(os, "fsync", lambda file: None)  # no test here cuts the power
        for name in RECIPES:
            _convert(folder, name)


def _convert(folder: Path, name: str) -> None:
    """Convert all streams of a recipe by this process, and three of each nine again, each in one of
    the other ways.
    """
    settings, streams = RECIPES[name]
    writes = Counter[str]()
    defaults = {"max_seq_len": 160, "max_bad": "100%", "tokenizer": "plain"}
    tree = defaults | {"streams": streams} | settings
    tree["tokenizer"] = {"name": tree["tokenizer"], "template": tree.pop("template", {})}
    recipe = folder / "sources" / f"{name}.yaml"
    recipe.write_text(json.dumps(tree))
    first, *repeats = (f"local={folder / way / name}" for way in WAYS)
    with _counting(writes):
        outcomes = run_recipe(recipe, first)
    few = [outcome.stream for outcome in outcomes if outcome.units < 3]
    assert not few, f"{name}: less than three work units: {few}"
    for number, (convert_again, local) in enumerate(zip(_REPEATS, repeats, strict=True)):
        repeated = [*streams][number :: 3 * len(repeats)]
        if repeated:
            convert_again(recipe, local, {stream: writes[stream] for stream in repeated})


WriteCounts = dict[str, int]
"Stream -> files that a conversion writes."


def _by_two(recipe: Path, local: str, writes: WriteCounts) -> None:
    run_recipe(recipe, local, workers=2, only=[*writes])


def _killed(recipe: Path, local: str, writes: WriteCounts) -> None:
    for stream, count in writes.items():
        _kill(recipe, local, stream, count // 2)
    outcomes = run_recipe(recipe, local, only=[*writes])
    half = {outcome.stream for outcome in outcomes if 0 < outcome.reused < outcome.units}
    whole = writes.keys() - half - WITH_HOLDOUT
    assert not whole, f"{recipe}: not killed amid their work: {whole}"


def _in_parts(recipe: Path, local: str, writes: WriteCounts) -> None:
    """Convert the first unit by a job of an array, and the others by the run that joins them."""
    for stream in writes:
        options = Options(only=[stream], workers=1, part=ArrayPart(1, 999))
        (part,) = convert_part(open_recipe(recipe, [local]), options, RecordingWatcher())
        assert part.units == 1, part
    outcomes = run_recipe(recipe, local, only=[*writes], is_finish=True)
    assert {*writes} <= {outcome.stream for outcome in outcomes if outcome.reused}, outcomes


_REPEATS = (_by_two, _killed, _in_parts)


def _kill(recipe: Path, local: str, stream: str, writes: int) -> None:
    """Start a process that converts the stream and is killed after so many writes."""
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, f"{stream} was not killed"
        return
    try:
        with _counting(Counter(), dies_at=(stream, writes)):
            run_recipe(recipe, local, only=[stream])
    finally:
        os._exit(1)


@contextmanager
def _counting(counts: Counter[str], dies_at: tuple[str, int] = ("", 0)) -> Iterator[None]:
    """Count the files that are written below each stream's folder. `dies_at`: a stream, and the
    number of the file after which the process kills itself.
    """

    def watched(write: Any) -> Any:
        def writing(self: LocalPath, *arguments: Any) -> Any:
            result = write(self, *arguments)
            if self.name != "lease":
                counts.update(Path(self.path).parts)
                if counts[dies_at[0]] == dies_at[1] > 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        return writing

    names = ("write", "create", "replace")
    with mock.patch.multiple(LocalPath, **{n: watched(getattr(LocalPath, n)) for n in names}):
        yield
