"""Here torch is wanted, and Streaming keeps what its datasets share apart by numbers."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from mdsmix.encode.snapshot import WITHOUT
from tests.conftest import in_folder
from tests.forked import Standing

for name in WITHOUT:
    os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _own_numbers() -> Iterator[None]:
    """Streaming takes the first number that is free, and of two processes that look at once one fails: each of the tests'
    processes counts from another one on."""
    from streaming.base.shared import prefix

    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = 100_000 * (1 + int(worker))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "_each_prefix_int", lambda: count(first))
        patch.setattr(prefix, "_check_and_find", _closing(prefix, prefix._check_and_find))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Streaming leaves two lock files of each dataset in the system's folder."""
    with in_folder(tmp_path_factory.mktemp("temporary")):
        yield


@pytest.fixture(scope="session")
def programs() -> Iterator[Standing]:
    """Python programs that use the loader, in processes of their own."""
    standing = Standing("import streaming, torch.distributed, mdsmix.load.loader")
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
