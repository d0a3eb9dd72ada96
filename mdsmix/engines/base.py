"""What an engine is, what a task is, and how a task reports.

`mdsmix.convert` makes tasks and takes their results; it knows nothing of processes, pipes or clusters. An engine knows nothing of
streams. README.md says what each may rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

from mdsmix.engines.attempts import Attempt, Place

R = TypeVar("R")
Result = TypeVar("Result", covariant=True)

OnProgress = Callable[[int, int], None]
"Takes source bytes that were read and tokens that were made, each since the last call."
Say = Callable[[str], None]
"Takes a sentence that the user should read now."


class Reporter(Protocol):
    """How a task tells its engine what it is doing, and learns how much room it has."""

    @property
    def memory(self) -> int:
        """Bytes that the run may hold on the machine of this task."""

    def on_progress(self, size: int, tokens: int) -> None:
        """So many more source bytes were read, and tokens made of them."""

    def on_records(self, place: Place | None) -> None:
        """These records are in work from now on, or none any more. A worker that dies is taken to have died of them."""

    def wait_for_room(self) -> None:
        """Returns when there is memory for the next records; is called before each piece of a batch."""

    def is_tight(self) -> bool:
        """Whether this worker holds more than its share, so that the task should take fewer records at once."""


class Task(Protocol[Result]):
    """One piece of work as plain data: a frozen dataclass that can be pickled and done on any machine, any number of times."""

    @property
    def name(self) -> str:
        """Which piece of work it is, for people: it completes the sentence "over the work unit ..."."""

    def do(self, attempt: Attempt, reporter: Reporter) -> Result:
        """Does the work and returns a result that can be pickled, or raises what ends the run."""


class Engine(Protocol):
    """Whoever does tasks."""

    @property
    def peak(self) -> int:
        """Bytes that the run and its workers held at most so far; 0 where that is not known."""

    def run(
        self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say
    ) -> Generator[tuple[int, R], None, None]:
        """Yields (position in `tasks`, result) as tasks end, in any order, each position once.

        The first exception of a task is raised here and stops the others; so does closing the generator. When it returns or
        raises, no worker of this machine is at work any more.
        """

    def warnings(self) -> Sequence[str]:
        """What the user should know of the run so far, printed with the summary of each stream."""

    def close(self) -> None:
        """Ends all workers. Whoever made the engine calls it."""
