"""Locks that no other thread may hold while a process is forked: the child would have the lock, but
not the thread that releases it.

A fork takes these locks first. All of them are taken by one function, in one order: with a handler
of its own for each (`os.register_at_fork`), the order would be that of imports, and a fork could
wait for the lease's lock with a store's lock, while the lease's thread waits for the store's.
"""

from __future__ import annotations

import os
from typing import Protocol


class Lock(Protocol):
    """A lock of `threading`."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


_locks = list[Lock]()
"The locks, in the order that a fork takes them in."
_held = list[Lock]()
"The locks that the fork of this moment has taken; more may be declared meanwhile."


def hold_while_forking(lock: Lock, before_others: bool = False) -> None:
    """Let each fork of this process take a lock first, and release it in both processes.

    Args:
        lock: the lock.
        before_others: whether threads take other locks of this module while they hold this one.
    """
    _locks.insert(0 if before_others else len(_locks), lock)


def _acquire() -> None:
    """Take all locks."""
    for lock in tuple(_locks):
        lock.acquire()
        _held.append(lock)


def _release() -> None:
    """Release the locks that were taken, the first one last: a fork of another thread waits for
    it, and then uses `_held`.
    """
    held = [*_held]
    _held.clear()
    for lock in reversed(held):
        lock.release()


os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_release)
