"""Here torch is wanted, and Streaming keeps what its datasets share apart by numbers."""

import atexit
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.encode.transformers_process import WITHOUT
from tests.forked import Standing

ROOT = Path(__file__).parents[2]
for name in WITHOUT:
    os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _own_numbers(own_temporary: None) -> Iterator[None]:
    """No other process takes a number of this one's datasets."""
    from streaming.base.shared import prefix

    from tests.numbers import count_apart

    count_apart()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "_check_and_find", _closing(prefix, prefix._check_and_find))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_golden)


def _is_golden(item: pytest.Item) -> bool:
    return "golden_streams" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session", autouse=True)
def golden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any]]:
    """Makes the golden streams beside all other tests, for the last one, by a process without torch: it forks workers in a twentieth
    of the time. Gives their folder and the process."""
    folder, process = tmp_path_factory.mktemp("golden"), None
    if any(map(_is_golden, request.session.items)):
        command = [sys.executable, "-m", "tests.golden", "--convert", folder]
        with (folder / "said").open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    yield folder, process
    if process:
        process.kill()


@pytest.fixture
def golden_streams(golden: tuple[Path, Any]) -> Path:
    """The folder of the golden streams."""
    folder, process = golden
    assert process.wait() == 0, (folder / "said").read_text()
    return folder


@pytest.fixture
def _release_loaders() -> Iterator[None]:
    """A worker forked later must not inherit the loaders of an earlier test, and a loader's folders are its own until it is gone."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def processors(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family -> folders of tokenizer and processor."""
    from tests.processors import FAMILIES, made

    home = tmp_path_factory.mktemp("processors")
    return {family: made(family, tokenizer_folder, home) for family in FAMILIES}


@pytest.fixture(scope="module")
def _looks_here() -> Iterator[None]:
    from tests.processors import look_here

    with pytest.MonkeyPatch.context() as patch:
        look_here(patch)
        yield


@pytest.fixture(scope="session")
def programs() -> Iterator[Standing]:
    """Python programs that use the loader, in processes of their own."""
    loader = "import torch.distributed, mdsmix.load.loader"
    standing = Standing(f"{loader}, tests.numbers; tests.numbers.count_apart()")
    yield standing
    standing.close()


def _closing(prefix: Any, find: Callable[..., int]) -> Callable[..., int]:
    """Streaming's search for a free number, without the files that it leaves open: one for each dataset before, so that 150
    datasets in a process had 11,800."""
    attach = prefix.SharedMemory

    def find_and_close(*arguments: Any) -> int:
        opened = list[Any]()

        def noted(*named: Any) -> Any:
            opened.append(attach(*named))
            return opened[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefix, "SharedMemory", noted)
            try:
                return find(*arguments)
            finally:
                for memory in opened:
                    atexit.unregister(memory.cleanup)
                    memory.cleanup()

    return find_and_close
