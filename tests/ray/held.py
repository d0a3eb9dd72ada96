"""Tasks that tell in a folder when they begin, and some that stop at their first records until they are let go."""

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_engine import RayEngine
from mdsmix.engines.tasks import Attempt, InWork, OnProgress, Reporter, Say
from mdsmix.storage.local import LocalPath
from tests.alarm import SECONDS


def until(condition: Callable[[], Any]) -> Any:
    """What it returns once that is true."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.02)
    return found


@dataclass(frozen=True)
class Began:
    """A try that has records in work."""

    unit: int
    deaths: int
    raylet: int
    supervisor: int
    pid: int


def ancestors(pid: int) -> Iterator[int]:
    """A process, its parent, and so on up to a raylet."""
    while True:
        yield pid
        if b"raylet" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            return
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True)
class Folder:
    """Where tries tell what they do."""

    path: Path

    def began(self) -> list[Began]:
        found = [path.name.split("_") for path in self.path.glob("began_*")]
        return [Began(*map(int, numbers)) for _, *numbers in found]

    def ended(self, pid: int) -> bool:
        return (self.path / f"ended_{pid}").exists()

    def let_go(self) -> None:
        (self.path / "go").touch()

    def writes(self) -> list[list[str]]:
        """Of each write its process, its name and the hash of its bytes, in the order of time."""
        log = self.path / "writes"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


@dataclass(frozen=True)
class Held:
    """A task whose first try, where it is one of the `holding`, waits with its first records in work."""

    task: Any
    unit: int
    folder: Folder
    holding: bool

    @property
    def name(self) -> str:
        return str(self.task.name)

    def do(self, attempt: Attempt, reporter: Reporter) -> Any:
        path, me = self.folder.path, os.getpid()
        with tells_writes(path / "writes"):
            family = "_".join(map(str, reversed([*ancestors(me)])))
            (path / f"began_{self.unit}_{attempt.deaths}_{family}").touch()
            if self.holding and is_first(path / f"held_{self.unit}"):
                attempt = replace(attempt, halvings=3)  # other pieces than whoever does it again
                reporter = Waiting(reporter, path / "go")
            result = self.task.do(attempt, reporter)
        (path / f"ended_{me}").touch()
        return result


class Waiting:
    """A reporter that waits for a file after it has passed on which records are in work."""

    def __init__(self, reporter: Any, go: Path) -> None:
        self._reporter, self._go = reporter, go

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)

    def on_records(self, place: InWork | None) -> None:
        self._reporter.on_records(place)
        until(self._go.exists)


def is_first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextmanager
def tells_writes(log: Path) -> Iterator[None]:
    """Inside of the block each file that is written is told in a log."""
    write = LocalPath.write

    def telling(at: LocalPath, *parts: Any) -> None:
        digest = xxhash.xxh128_hexdigest(b"".join(map(bytes, parts)))
        with log.open("a") as file:
            file.write(f"{os.getpid()} {at.name} {digest}\n")
        write(at, *parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPath, "write", telling)
        yield


def end_after_the_first_answer(number: int) -> None:
    """This process, a driver, gives itself a signal once it has taken the answer of its first unit."""
    take = RayEngine._take

    def taking(run: RayEngine, node: Any, what: str, *said: Any) -> Any:
        yield from take(run, node, what, *said)
        if what == "done":
            os.kill(os.getpid(), number)

    RayEngine._take = taking  # type: ignore[method-assign]


class HoldingEngine(RayEngine):
    """A Ray engine whose tasks tell, and of which the first so many wait."""

    def __init__(self, path: Path, held: int) -> None:
        super().__init__("", PoolSettings(workers=0, memory=0))
        path.mkdir(exist_ok=True)
        self.folder, self._held = Folder(path), held

    def run(
        self, tasks: Sequence[Any], on_progress: OnProgress, say: Say
    ) -> Generator[Any, None, None]:
        told = [Held(task, n, self.folder, n < self._held) for n, task in enumerate(tasks)]
        return super().run(told, on_progress, say)
