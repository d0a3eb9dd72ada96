"""The process that answers conversion's questions to a processor of transformers: how many tokens an image becomes, and whether a loader's
rows equal the processor's own (`LoadedProcessor.answer`).

Importing torch and transformers takes 10 s and 730 MB, so conversion imports neither. One process a run, `python -m
mdsmix.encode.processor_server`, answers all of its workers. The process starts with the run, imports both at the first question, and ends
with the run or with the process that started it. Outside a run the first question starts it. Counts are kept in the cache.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Client, Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from mdsmix.encode.pretrained import cache_folder, keep_in_cache, snapshot_of
from mdsmix.errors import MdsmixError, Unreachable

BYTES = 730 << 20
"Memory of that process: 730 MB with transformers 4.57 and torch 2.15, however many sizes it is asked for."
SHARED = "MDSMIX_COUNTING"
"Environment variable that workers inherit: the path of their run's socket."
PARENT = "/tmp"
"The folder of sockets. Its name is short, since Linux takes at most 107 characters of a socket's path."
_started = list[int]()


@contextmanager
def shared() -> Iterator[None]:
    """Starts the process, unless it runs, and ends it with the block. Workers that are started inside the block ask the same one."""
    if _is_shared():
        yield
        return
    with TemporaryDirectory(prefix="mdsmix-", dir=PARENT) as home:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{home}/socket")
            listening.listen()  # questions wait from here on
            command = [sys.executable, "-m", "mdsmix.encode.processor_server"]
            silent = subprocess.DEVNULL
            process = subprocess.Popen(
                command, stdin=listening.fileno(), stdout=silent, stderr=silent
            )
        os.environ[SHARED] = f"{home}/socket"
        _started.append(process.pid)
        try:
            yield
        finally:
            del os.environ[SHARED]
            _started.remove(process.pid)
            process.kill()
            process.wait()


def _is_shared() -> bool:
    """Whether the socket of a run is there: inside of `shared`, or in a worker of it."""
    return os.path.exists(os.environ.get(SHARED, ""))


def processes() -> list[int]:
    """Process ids of the servers that this process has started and that still run."""
    return [*_started]


def ask(folder: Path, question: Mapping[str, Any]) -> Any:
    """The answer of the processor in a folder to a question (`LoadedProcessor.answer`). MdsmixError where the processor fails; Unreachable
    where the server has ended."""
    if not _is_shared():
        alone = ExitStack()
        alone.enter_context(shared())
        atexit.register(alone.close)
    try:
        with Client(os.environ[SHARED]) as line:
            line.send({"folder": str(folder), **question})
            answer, error = line.recv()
    except (OSError, EOFError):
        raise Unreachable(
            "the process that counts the tokens of images has ended, most likely for want of memory: run again with fewer workers; "
            "the counts that it gave are kept."
        ) from None
    if error:
        raise MdsmixError(f"the processor fails ({error}): name another, or leave processor out.")
    return answer


def serve(listening: socket.socket, answer: Callable[[Any], Any]) -> None:
    """Answers one question after the other, until the parent process has ended."""
    starter = os.getppid()
    listening.settimeout(1)
    while os.getppid() == starter:
        with suppress(OSError, EOFError):  # nobody asks, or the process that asked is dead
            connected, _ = listening.accept()
            with Connection(connected.detach()) as line:
                question = line.recv()
                try:
                    said = answer(question), ""
                except Exception as error:
                    said = None, f"{type(error).__name__}: {error}"
                line.send(said)


def main() -> None:
    """Answers on the socket that is this process's standard input. A question names the folder of its processor."""

    @cache
    def opened(folder: str) -> Any:
        from mdsmix.encode.loaded_processor import LoadedProcessor

        return LoadedProcessor(folder)

    serve(socket.socket(fileno=0), lambda asked: opened(asked["folder"]).answer(asked))


Size = tuple[int, int]
"Height and width, after the turn that EXIF asks for."


@dataclass(slots=True)
class SizeCounts:
    """How many tokens an image becomes, by its size. Counts of earlier runs on this machine are read from the cache."""

    digest: str
    "The hash of the processor."
    _known: dict[Size, int | str] = field(default_factory=dict)

    def of(self, sizes: Iterable[Size]) -> dict[Size, int | str]:
        """Tokens of each size, or why the processor refuses an image of it."""
        wanted = set(sizes)
        if not wanted <= self._known.keys():
            self._known |= self._kept()
        if missing := sorted(wanted - self._known.keys()):
            answers = ask(snapshot_of(self.digest), {"sizes": missing})
            self._known |= zip(missing, answers, strict=True)
            counts = [[*size, n] for size, n in self._known.items() if isinstance(n, int)]
            with suppress(Unreachable):  # without the file the next run only asks again
                keep_in_cache(self._path, orjson.dumps(counts))
        return {size: self._known[size] for size in wanted}

    @property
    def _path(self) -> Path:
        return cache_folder() / "processors" / f"{self.digest}.counts"

    def _kept(self) -> dict[Size, int]:
        with suppress(OSError, ValueError):
            return {(h, w): n for h, w, n in orjson.loads(self._path.read_bytes())}
        return {}


if __name__ == "__main__":
    main()
