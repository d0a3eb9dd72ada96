"""A trial of whether a store respects the conditions of writes: whether only one of several writers
succeeds that `create` or `replace` one object at the same moment.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from mdsmix.storage.location import Location, Stat

WRITERS = 3
"""Writers at the same moment in the test of each condition. With this number, a store where both of
two writers succeed in 9 of 20 rounds passes 1 test in 36.
"""


def run_writers(trial: Location, stamp: str | None) -> list[Stat]:
    """Let 3 writers create an object, or replace one of its versions, at the same moment. Return
    the Stat of each write that succeeded.

    Args:
        trial: the object.
        stamp: the stamp of the version to replace; None: create the object.
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
