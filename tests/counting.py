"""Counts the requests that a piece of work sends to a store, by operation. Requests cost money, and
a slow link waits for each.
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
    """The requests of one piece of work, when it is done."""

    requests: Sequence[Request] = ()
    seconds: float = 0
    processor: float = 0
    "Seconds of this process and of workers that have ended."

    @property
    def total(self) -> int:
        return len(self.requests)

    @property
    def missed(self) -> int:
        """How many asked for something that is missing."""
        return sum(request.status == 404 for request in self.requests)

    @property
    def by_operation(self) -> Counter[str]:
        """HEAD, GET, GET list, PUT, PUT copy, DELETE, ..."""
        return self.for_key("")

    def for_key(self, key: str) -> Counter[str]:
        """Return the requests by operation for objects whose key ends so."""
        requests = [request for request in self.requests if request.key.endswith(key)]
        return Counter(map(_operation, requests))

    def __str__(self) -> str:
        """Return the counts for the message of a failing test."""
        items = sorted(self.by_operation.items())
        counts = ", ".join(f"{count} {operation}" for operation, count in items)
        return f"{self.total} requests ({counts}; {self.missed} found nothing)"


@contextmanager
def count_requests(proxy: Proxy) -> Iterator[RequestCount]:
    """Count the requests that pass the proxy inside the block, from any process."""
    count = RequestCount()
    earlier = len(proxy.requests)
    start = time.monotonic()
    processor_start = sum(os.times()[:4])
    yield count
    count.processor = sum(os.times()[:4]) - processor_start
    count.requests = proxy.requests[earlier:]
    count.seconds = time.monotonic() - start


def _operation(request: Request) -> str:
    is_copy = bool({"x-amz-copy-source", "x-ms-copy-source"} & request.headers.keys())
    is_copy = is_copy or "/rewriteTo/" in request.path
    return f"{request.operation} copy" if is_copy else request.operation
