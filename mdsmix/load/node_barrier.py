"""The barrier at which the processes of a node wait for each other when a pass begins.

Streaming's own barrier waits for ever if a process has failed, or does not read the loader. This
one logs a warning after a minute, once for all processes that wait, and raises an error after half
an hour, which is also the limit of torch.distributed.
"""

from __future__ import annotations

import logging
import time

from filelock import FileLock
from streaming.base.constant import TICK
from streaming.base.shared import SharedBarrier

from mdsmix.errors import Unreachable

log = logging.getLogger(__name__)
SECONDS_TO_WARNING = 60.0
"How long a process waits for the others before it logs a warning."
MOST_SECONDS = 1800.0
"How long a process waits for the others before it raises an error."
ENTERED = 0
"Index of the number that counts the processes that wait."
ROUND = 1
"Index of the number that counts how many times all processes have entered."
MAY_WARN = 2
"""Index of the number that is 1 until a process of this round has logged a warning, and then 0.
Streaming sets it to 1 when it makes the barrier.
"""


class NodeBarrier:
    """A barrier that all ranks of a node pass together, or all their workers.

    A process that is alone takes no lock: at the three barriers of a pass this saves 1 ms of CPU.
    """

    lock: FileLock
    "Made by Streaming when a pass begins."

    def __init__(self, barrier: SharedBarrier) -> None:
        """Take over the shared memory of Streaming's barrier, and the path of its lock."""
        self.filelock_path = barrier.filelock_path
        self.numbers = barrier._arr
        "int32 [3], in shared memory: the numbers at ENTERED, ROUND and MAY_WARN."

    def reset(self) -> None:
        """Forget processes that were killed while they waited, as by Ctrl-C in a notebook: the next
        pass would count them, and hang. Called while no process waits.
        """
        self.numbers[ENTERED] = 0
        self.numbers[MAY_WARN] = 1

    def __call__(self, processes: int) -> None:
        """Wait until this many processes have entered. Raises Unreachable after MOST_SECONDS."""
        if processes == 1:
            return
        with self.lock:
            this_round = self.numbers[ROUND]
            self.numbers[ENTERED] += 1
            if self.numbers[ENTERED] == processes:
                self.numbers[ENTERED] = 0
                self.numbers[MAY_WARN] = 1
                self.numbers[ROUND] += 1
        began = time.monotonic()
        has_warned = False
        while self.numbers[ROUND] == this_round:
            time.sleep(TICK)
            seconds = time.monotonic() - began
            if seconds > SECONDS_TO_WARNING and not has_warned:
                self._warn(processes, seconds)
                has_warned = True
            if seconds > MOST_SECONDS:
                self._leave(this_round, processes, seconds)

    def _warn(self, processes: int, seconds: float) -> None:
        """Log a warning of the wait, unless another process of this round has logged one."""
        with self.lock:
            is_first = bool(self.numbers[MAY_WARN])
            self.numbers[MAY_WARN] = 0
        if is_first:
            log.warning("%s", self._describe_wait(processes, seconds))

    def _leave(self, this_round: int, processes: int, seconds: float) -> None:
        """Stop waiting. Raises Unreachable, unless the last process has entered just now."""
        with self.lock:
            if self.numbers[ROUND] != this_round:
                return
            message = self._describe_wait(processes, seconds)
            self.numbers[ENTERED] -= 1
        raise Unreachable(message)

    def _describe_wait(self, processes: int, seconds: float) -> str:
        """Return a sentence about the processes that have not entered."""
        missing = processes - int(self.numbers[ENTERED])
        return (
            f"The loader has waited {seconds:,.0f} s at the beginning of a pass for {missing} of "
            f"the {processes} processes that read it on this node (ranks, or their workers), so "
            "no batch can be read: a rank has failed, has not begun this pass, or still shuffles "
            "an epoch of very many samples. Look for the first error of the other ranks, and let "
            "all ranks read the loader equally often."
        )
