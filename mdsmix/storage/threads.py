"""Requests that wait for a disk or a store, sixteen at a time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from mdsmix.storage.location import Location

T = TypeVar("T")
R = TypeVar("R")

THREADS = 16
"""Requests at a time. Each waits about 20 ms for the store, and uses hardly any processor time.
"""
INTERRUPTED_SECONDS = 2.0
"How long requests are waited for after Ctrl-C or SIGTERM. A silent store answers after minutes."


def map_threads(request: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Return the results of `request(item)` for all items, in the items' order.

    If requests fail, the error of the first of these items is raised, and requests that have not
    begun are dropped. So they are after Ctrl-C or SIGTERM.

    Args:
        request: sends one request.
        items: the arguments of the requests.
        threads: how many requests run at a time.
    """
    all_items = list(items)
    if len(all_items) < 2 or threads == 1:
        return [request(item) for item in all_items]
    # 3.5 ms, and one stream needs no threads.
    from concurrent.futures import ThreadPoolExecutor, wait

    thread_ids: list[int] = []
    pool = ThreadPoolExecutor(
        threads, initializer=lambda: thread_ids.append(threading.get_native_id())
    )
    requests: list[Future[R]] = []
    is_interrupted = False
    try:
        for item in all_items:
            requests.append(pool.submit(request, item))
        return [future.result() for future in requests]
    except (KeyboardInterrupt, SystemExit):
        is_interrupted = True  # set first: a second Ctrl-C ends the wait below
        pool.shutdown(wait=False, cancel_futures=True)
        wait([future for future in requests if not future.cancelled()], INTERRUPTED_SECONDS)
        raise
    finally:
        pool.shutdown(wait=not is_interrupted, cancel_futures=True)
        if not is_interrupted:
            await_system_threads(thread_ids)


def map_files(request: Callable[[Location], R], files: Sequence[Location]) -> list[R]:
    """Return the results of `request(file)` for a few small files, in the files' order. Files in a
    store are read at the same time. Those on a disk are read one after the other, since threads
    would take longer than the disk.

    Args:
        request: reads one file.
        files: the files, all in one folder.
    """
    return map_threads(request, files, THREADS if files[0].is_store else 1)


def map_in_batches(request: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the results of `request(item)` for all items, in the items' order.

    Sixteen requests run at a time. The next sixteen begin after the results of the first sixteen
    were yielded, so no more than sixteen results are in memory.
    """
    remaining = iter(items)
    while batch := list(islice(remaining, THREADS)):  # the next sixteen items
        yield from map_threads(request, batch)


def await_system_threads(thread_ids: Iterable[int]) -> None:
    """Wait until the system, too, has ended threads that Python has joined. It does so soon.

    Before version 3.13 Python joins a thread when its Python code has ended. Then OpenSSL frees
    what it holds for the thread, under a lock. A process that is forked meanwhile inherits the
    lock, and its next thread that uses OpenSSL waits for ever: one of 1,600 forks on a busy
    machine.

    Args:
        thread_ids: the system's ids of the threads (`threading.get_native_id`).
    """
    if sys.version_info >= (3, 13) or sys.platform != "linux":
        return
    for thread_id in thread_ids:
        while os.path.exists(f"/proc/self/task/{thread_id}"):
            time.sleep(0.0001)
