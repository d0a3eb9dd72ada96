"""Here torch is wanted, and Streaming keeps what its datasets share apart by numbers."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mdsmix.encode.transformers_process import WITHOUT
from tests.conftest import in_folder
from tests.forked import Standing

for name in WITHOUT:
    os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _own_numbers() -> Iterator[None]:
    """No other process takes a number of this one's datasets."""
    from streaming.base.shared import prefix

    from tests.numbers import count_apart

    count_apart()
    with pytest.MonkeyPatch.context() as patch:
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
    standing = Standing(
        "import torch.distributed, mdsmix.load.loader, tests.numbers; tests.numbers.count_apart()"
    )
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
