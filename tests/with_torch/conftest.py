"""Here torch is wanted, and Streaming keeps what its datasets share apart by numbers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.tokenizer.opening import WITHOUT_FRAMEWORKS
from tests.preloaded import PreloadedPython

ROOT = Path(__file__).parents[2]
for name in WITHOUT_FRAMEWORKS:
    os.environ.pop(name, None)
# torch reads it when it is imported. The tensors are tiny, and a second thread mostly waits in a
# loop for its share: tests of images took 23 s of processor time, and take 9.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _own_numbers(own_temporary: None) -> Iterator[None]:
    """No other process takes a number of this one's datasets."""
    from streaming.base.shared import prefix

    from tests.shared_prefix import count_apart

    count_apart()
    memory = prefix.SharedMemory

    def opened(name: str, create: bool, size: int = 0) -> Any:
        return memory(name, create, size, auto_cleanup=create)

    # Streaming would leave open what it has only looked at, until the process ends: 150 datasets
    # had 11,800 files.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "SharedMemory", opened)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_golden)


def _is_golden(item: pytest.Item) -> bool:
    return item.path.name == "test_golden_rows.py"


@pytest.fixture(scope="session", autouse=True)
def golden_streams(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Path]]:
    """Makes the golden streams beside all other tests, for the last one, by a process without
    torch: it forks workers in a twentieth of the time. Waits for their folder.
    """
    folder, process = tmp_path_factory.mktemp("golden"), None
    with (folder / "said").open("wb") as out:
        if _is_golden(request.session.items[-1]):
            command = [sys.executable, "-m", "tests.golden", "--convert", folder]
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)

    def made() -> Path:
        assert process.wait() == 0, (folder / "said").read_text()
        return folder

    yield made
    if process:
        process.kill()


@pytest.fixture
def _release_loaders() -> Iterator[None]:
    """A worker forked later must not inherit the loaders of an earlier test, and a loader's folders
    are its own until it is gone.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def processors(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family -> folders of tokenizer and processor."""
    from tests.processors import FAMILIES, write_processor

    home = tmp_path_factory.mktemp("processors")
    return {family: write_processor(family, tokenizer_folder, home) for family in FAMILIES}


@pytest.fixture(scope="module")
def _looks_here() -> Iterator[None]:
    from tests.processors import ask_in_process

    with pytest.MonkeyPatch.context() as patch:
        ask_in_process(patch)
        yield


@pytest.fixture(scope="session")
def programs() -> Iterator[PreloadedPython]:
    """Python programs that use the loader, in processes of their own."""
    loader = "import torch.distributed, mdsmix.load.loader"
    python_with_imports = PreloadedPython(
        f"{loader}, tests.shared_prefix; tests.shared_prefix.count_apart()"
    )
    yield python_with_imports
    python_with_imports.close()
