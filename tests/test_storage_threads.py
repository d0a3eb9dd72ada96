"""Requests in threads, and Ctrl-C while a store does not answer."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mdsmix.storage import threads
from mdsmix.storage.threads import map_threads


def test_the_first_items_error_is_raised_when_all_requests_have_ended() -> None:
    begun = list[int]()

    def request(item: int) -> int:
        begun.append(item)
        if item in (1, 2):
            raise ValueError(item)
        time.sleep(0.05)
        return -item

    assert map_threads(request, [3, 4, 5]) == [-3, -4, -5]
    before = threading.active_count()
    with pytest.raises(ValueError, match="1"):
        map_threads(request, [0, *range(1, 1000)], threads=2)
    assert threading.active_count() == before
    assert len(begun) < 100


def check_interrupted_soon(
    request: Callable[[int], None], count: int, answers: threading.Event, most_seconds: float
) -> None:
    """Check that requests in two threads end by KeyboardInterrupt before they are answered. Let
    `answers` answer them then.
    """
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            map_threads(request, range(count), threads=2)
        assert time.monotonic() - start < most_seconds
    finally:
        answers.set()


def test_an_interrupt_does_not_wait_for_a_silent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "INTERRUPTED_SECONDS", 0.1)
    answers = threading.Event()
    begun = list[int]()

    def request(item: int) -> None:
        begun.append(item)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        answers.wait(60)

    check_interrupted_soon(request, 1000, answers, most_seconds=30)
    assert begun == [0, 1]


def test_a_second_interrupt_waits_no_longer() -> None:
    answers = threading.Event()

    def request(item: int) -> None:
        if item == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # the main thread waits for both requests now
            os.kill(os.getpid(), signal.SIGINT)
        answers.wait(20)

    check_interrupted_soon(request, 2, answers, most_seconds=10)


def test_requests_that_are_answered_end_before_an_interrupt_is_raised() -> None:
    """So nothing is deleted or written any more when the lease is released."""
    ended = list[int]()
    have_begun = threading.Barrier(4)

    def request(item: int) -> None:
        have_begun.wait(60)
        if item == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        map_threads(request, range(4), threads=4)
    assert sorted(ended) == [0, 1, 2, 3]


def test_the_systems_threads_have_ended_too() -> None:
    """A process that is forked now inherits no lock that a thread takes at its very end. Here each
    thread sleeps then: the C function that ends what the thread holds is `usleep`.
    """
    libc = ctypes.CDLL(None)
    key = ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0

    def request(_: int) -> int:
        microseconds = 100_000
        libc.pthread_setspecific(key, ctypes.c_void_p(microseconds))
        return threading.get_native_id()

    ids = {*map_threads(request, range(4))}
    assert not [each for each in ids if Path(f"/proc/self/task/{each}").exists()]
