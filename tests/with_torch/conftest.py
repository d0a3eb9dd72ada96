"""Here torch is wanted, and Streaming keeps what its datasets share apart by numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count

import pytest

from mdsmix.encode.snapshot import WITHOUT

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
        yield
