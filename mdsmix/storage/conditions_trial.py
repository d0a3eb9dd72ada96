"""A trial of whether a store respects the conditions of writes: whether only one of several writers
succeeds that `create` or `replace` one object at the same moment.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mdsmix.storage.location import Location, Stat

Store = TypeVar("Store")
"What names a store in a table of results, such as its endpoint and bucket."
WRITERS = 3
"""Writers at the same moment in the test of each condition. With this number, a store where both of
two writers succeed in 9 of 20 rounds passes 1 test in 36.
"""
_trial_lock = threading.Lock()


def run_writers(trial: Location, stamp: str | None) -> list[Stat]:
    """Let 3 writers create an object, or replace one of its versions, at the same moment. Return
    the Stat of each write that succeeded.

    Args:
        trial: the object.
        stamp: `Stat.stamp` of the version to replace, such as its ETag; None: create the object.
    """
    barrier = threading.Barrier(WRITERS)

    def write(number: int) -> Stat | None:
        barrier.wait()  # until all writers are here
        content = f"{number}, where there was {stamp}".encode()
        if stamp is None:
            return trial.create(content)
        return trial.replace(stamp, content)

    with ThreadPoolExecutor(WRITERS) as pool:
        return [stat for stat in pool.map(write, range(WRITERS)) if stat]


def passes_trial(trial: Location) -> bool:
    """Return whether exactly one of 3 writers creates an object, and then exactly one of 3 writers
    replaces it.

    Args:
        trial: the object, which does not exist before. The caller deletes it.
    """
    created = run_writers(trial, None)
    return len(created) == 1 and len(run_writers(trial, created[0].stamp)) == 1


def try_once(
    results: dict[Store, bool],
    store: Store,
    file: Location,
    passes: Callable[[Location], bool] = passes_trial,
) -> bool:
    """Return whether a store respects conditions of writes. An unknown store is tested, and its
    result is kept, so that it is tested once in a process.

    Args:
        results: store -> whether it respects conditions. A forked worker inherits them from its
            parent.
        store: names the store in `results`.
        file: a file in the store. The test writes a new file with a similar name, and deletes it
            again.
        passes: the test, called with the new file.
    """
    with _trial_lock:
        if store not in results:
            trial = type(file)(f"{file.path}-trial-{secrets.token_hex(8)}")
            try:
                has_passed = passes(trial)
            finally:
                trial.delete()
            # A write of the test may have stored False: the store does not know the conditions.
            results[store] = has_passed and results.get(store, True)
    return results[store]
