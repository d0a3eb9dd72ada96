"""Locks that no other thread may hold while a process is forked: the child would have the lock, but
not the thread that releases it. So a fork takes them first, and then forks.

A fork must take them in the order in which threads do: otherwise it waits with one lock for a
thread that has another and waits for that one, and both wait for ever. Python calls the function
that was registered last first. So all locks are made here.
"""

from __future__ import annotations

# Both register locks that a thread with one of the locks below may need: to log, and to start
# threads of a pool. Imported first, so that a fork takes their locks last.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading

client_lock = threading.RLock()
"Taken while a client of a store is made, or its requests are counted."
lease_lock = threading.RLock()
"Taken while a lease is renewed, for which a client may be made."

for lock in (client_lock, lease_lock):
    # Methods, not functions of Python: a Ctrl-C in the middle of a function that releases the locks
    # would be lost, and the locks would stay taken.
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
