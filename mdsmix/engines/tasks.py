"""Which tasks wait, and with what history: the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdsmix.engines.attempts import Attempt, End, Place, after_death
from mdsmix.engines.base import Task


class TaskQueue:
    """Tasks that are to be done, the first one first; one whose worker died comes back before all others."""

    def __init__(self, tasks: Sequence[Task[Any]], set_aside: bool) -> None:
        self._tasks, self._set_aside = tasks, set_aside
        self._waiting = [(number, Attempt()) for number in range(len(tasks))][::-1]

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def take(self) -> tuple[int, Attempt, Task[Any]]:
        """The next task: its position, how it is to be tried, and the task itself."""
        number, attempt = self._waiting.pop()
        return number, attempt, self._tasks[number]

    def name(self, number: int) -> str:
        return self._tasks[number].name

    def give_back(self, number: int, attempt: Attempt) -> None:
        """The worker of this task was lost through no fault of it: the next try is the same."""
        self._waiting.append((number, attempt))

    def put_back(self, number: int, attempt: Attempt, place: Place | None, end: End) -> None:
        """The worker of this task died over the records at `place`; MdsmixError where another try is no use."""
        again = after_death(attempt, place, end, self._set_aside, self.name(number))
        self._waiting.append((number, again))
