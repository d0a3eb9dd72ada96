"""How many requests a piece of work makes at a store, by operation: what is paid for, and what a
slow link waits for.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.faults import Proxy, Request


@dataclass
class RequestCount:
    """The requests of one piece of work, once it is done."""

    requests: Sequence[Request] = ()
    seconds: float = 0
    processor: float = 0
    "Seconds of this process and of workers that have ended."

    @property
    def total(self) -> int:
        return len(self.requests)

    @property
    def missed(self) -> int:
        """Those that asked for what is not there."""
        return sum(request.status == 404 for request in self.requests)

    @property
    def by_operation(self) -> Counter[str]:
        """HEAD, GET, GET list, PUT, PUT copy, DELETE, ..."""
        return self.at("")

    def at(self, key: str) -> Counter[str]:
        """Of the objects whose key ends so."""
        return Counter(_operation(r) for r in self.requests if r.key.endswith(key))

    def __str__(self) -> str:
        """What a failing test shows."""
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.by_operation.items()))
        return f"{self.total} requests ({counts}; {self.missed} of them for what is not there)"


@contextmanager
def count_requests(proxy: Proxy) -> Iterator[RequestCount]:
    """Counts what goes through the proxy inside of the block, by whatever process."""
    found, before, began, used = (
        RequestCount(),
        len(proxy.requests),
        time.monotonic(),
        os.times()[:4],
    )
    yield found
    found.processor = sum(os.times()[:4]) - sum(used)
    found.requests, found.seconds = proxy.requests[before:], time.monotonic() - began


def _operation(request: Request) -> str:
    is_copy = request.method == "PUT" and "x-amz-copy-source" in request.headers
    return f"{request.operation} copy" if is_copy else request.operation
