"""What is to be done of one stream, and who does it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mdsmix.convert.job import Dropped, Job
from mdsmix.convert.outcome import Watcher
from mdsmix.convert.source_hashes import SourceHashCache
from mdsmix.convert.stored import StoredUnits
from mdsmix.engines.tasks import Engine, Task
from mdsmix.sources import Unit

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A stream's units, and who does them."""

    job: Job
    units: Sequence[Unit]
    cache: SourceHashCache
    stored: StoredUnits
    "What lies at the target."
    engine: Engine
    watcher: Watcher
    dropped: Sequence[Dropped] = ()
    "What is dropped from each unit; empty where nothing is from any."

    def say(self, sentence: str) -> None:
        self.watcher.say(f"{self.job.name}: {sentence}")

    def run(self, tasks: Sequence[Task[R]]) -> Generator[tuple[int, R], None, None]:
        """The results of these tasks as they end; closing the iterator stops the rest."""
        return self.engine.run(tasks, self.watcher.on_progress, self.say)

    def dropped_from(self, number: int) -> Dropped:
        return self.dropped[number] if self.dropped else {}
