"""What conversion asks of a processor of transformers: how many tokens an image becomes, and whether rows put together by a loader are those
that the processor makes of whole texts.

Conversion imports neither torch nor transformers, 10 s and 730 MB, so a process of its own answers: one for a run, whichever of its workers
asks, started when the first image of an unknown size comes. It ends when the folder of the run with its socket is gone, or the process
that started it; the next question starts another. `python -m mdsmix.encode.processor_server` is that process. Answers are kept on this machine.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Client, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import orjson
import xxhash

from mdsmix.encode.pretrained import cache_folder, keep_in_cache, snapshot_of
from mdsmix.errors import MdsmixError, Unreachable

BYTES = 730 << 20
"What it holds: 730 MB with transformers 4.57 and torch 2.15, however many sizes it is asked for."
SHARED = "MDSMIX_COUNTING"
"Environment variable that workers inherit: the folder of their run."
TRIES = 3
PARENT = "/tmp"
"Of a short name: Linux takes 107 characters of a socket's."


@contextmanager
def shared() -> Iterator[None]:
    """Whoever is started within asks the same process."""
    if _home():
        yield
        return
    with TemporaryDirectory(prefix="mdsmix-", dir=PARENT) as home:
        os.environ[SHARED] = home
        try:
            yield
        finally:
            del os.environ[SHARED]


def _home() -> str | None:
    """The folder of the run that is at work here, or whose worker this is."""
    home = os.environ.get(SHARED)
    return home if home and os.path.isdir(home) else None


@cache
def _alone() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="mdsmix-", dir=PARENT)


def processes() -> list[int]:
    """Ids of those of this run."""
    home = _home()
    return [int(file.read_text() or 0) for file in Path(home).glob("*.pid")] if home else []


def ask(folder: Path, question: Mapping[str, Any]) -> Any:
    """The answer of the processor in a folder to a question (`LoadedProcessor.answer`). MdsmixError where it fails; Unreachable where its
    process ends twice over this question."""
    at = Path(_home() or _alone().name) / f"{xxhash.xxh64_hexdigest(str(folder))}.socket"
    for left in range(TRIES)[::-1]:
        with suppress(OSError, EOFError), Client(str(at)) as line:
            line.send(question)
            answer, error = line.recv()
            if error:
                raise MdsmixError(
                    f"the processor fails ({error}): name another, or leave processor out."
                )
            return answer
        if left:
            _start(at, folder)
    raise Unreachable(
        "the process that counts the tokens of images has ended, most likely for want of memory: run again with fewer workers; "
        "the counts that it gave are kept."
    )


def _start(at: Path, folder: Path) -> None:
    """Starts it, unless another worker has done so meanwhile; returns when it listens."""
    with at.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when this process dies
        if _listens(at):
            return
        at.unlink(missing_ok=True)
        command = [sys.executable, "-m", "mdsmix.encode.processor_server", str(folder), str(at)]
        silent = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent)
        at.with_suffix(".pid").write_text(str(process.pid))
        while not _listens(at) and process.poll() is None:
            time.sleep(0.01)


def _listens(at: Path) -> bool:
    """A socket has its name a moment before it takes connections, so only a connection tells."""
    with suppress(OSError), Client(str(at)):
        return True
    return False


def serve(at: str, answer: Callable[[Any], Any]) -> None:
    """Answers one question after the other."""
    with Listener(at, backlog=64) as listening:
        while True:
            with suppress(OSError, EOFError), listening.accept() as line:  # who asked may be dead
                question = line.recv()
                try:
                    said = answer(question), ""
                except Exception as error:
                    said = None, f"{type(error).__name__}: {error}"
                line.send(said)


def _end_with(starter: int, at: str) -> None:
    while os.getppid() == starter and os.path.exists(os.path.dirname(at)):
        time.sleep(0.5)
    os._exit(0)


def main(folder: str, at: str) -> None:
    """Answers for the processor in a folder, which is opened at the first question."""
    Thread(target=_end_with, args=(os.getppid(), at)).start()

    @cache
    def opened() -> Any:
        from mdsmix.encode.loaded_processor import LoadedProcessor

        return LoadedProcessor(folder)

    serve(at, lambda question: opened().answer(question))


Size = tuple[int, int]
"Height and width, after the turn that EXIF asks for."


@dataclass(slots=True)
class SizeCounts:
    """How many tokens an image becomes, by its size: sizes that any run has seen are known on this machine."""

    digest: str
    "Of the processor."
    _known: dict[Size, int | str] = field(default_factory=dict)

    def of(self, sizes: Iterable[Size]) -> dict[Size, int | str]:
        """Tokens of each size, or why the processor refuses an image of it."""
        wanted = set(sizes)
        if not wanted <= self._known.keys():
            self._known |= self._kept()
        if missing := sorted(wanted - self._known.keys()):
            answers = ask(snapshot_of(self.digest), {"sizes": missing})
            self._known |= zip(missing, answers, strict=True)
            known = {size: n for size, n in self._known.items() if isinstance(n, int)}
            counts = orjson.dumps([[*of, n] for of, n in (self._kept() | known).items()])
            with suppress(Unreachable):  # all that is lost is a question
                keep_in_cache(self._path, counts)
        return {size: self._known[size] for size in wanted}

    @property
    def _path(self) -> Path:
        return cache_folder() / "processors" / f"{self.digest}.counts"

    def _kept(self) -> dict[Size, int]:
        with suppress(OSError, ValueError):
            return {(h, w): n for h, w, n in orjson.loads(self._path.read_bytes())}
        return {}


if __name__ == "__main__":
    main(*sys.argv[1:])
