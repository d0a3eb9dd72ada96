"""The process that answers questions about a processor: one for a run, whichever of its workers asks.

It imports torch and transformers, 10 s and 730 MB, so it is started when the first image of an unknown size comes. The folder of a run
holds its socket; it ends when that folder, or whoever made it, is gone. `python -m mdsmix.encode.processor_server` is that process.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import xxhash

from mdsmix.errors import Unreachable

BYTES = 730 << 20
"What it holds: 730 MB with transformers 4.57 and torch 2.15, however many sizes it is asked for."
SHARED, RUN = "MDSMIX_COUNTING", "MDSMIX_COUNTING_FOR"
"Environment variables that workers inherit: the folder of their run, and the id of the process that made it."
TRIES = 3
LONGEST = 50
"Characters of a temporary folder that leave room for the rest of a socket's name, of which Linux takes 107."


@contextmanager
def shared() -> Iterator[None]:
    """Whoever is started within asks the same process."""
    if _home():
        yield
        return
    with TemporaryDirectory(prefix="mdsmix-", dir=_parent()) as home:
        os.environ |= {SHARED: home, RUN: str(os.getpid())}
        try:
            yield
        finally:
            del os.environ[SHARED], os.environ[RUN]


def _home() -> str | None:
    """The folder of the run that is at work here, or whose worker this is."""
    home = os.environ.get(SHARED)
    return home if home and os.path.isdir(home) else None


@cache
def _alone() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="mdsmix-", dir=_parent())


def _parent() -> str:
    found = gettempdir()
    return found if len(found) <= LONGEST else "/tmp"


def processes() -> list[int]:
    """Ids of those of this run."""
    home = _home()
    return [int(file.read_text() or 0) for file in Path(home).glob("*.pid")] if home else []


def ask(folder: Path, question: Mapping[str, Any]) -> Any:
    """The answer of the processor in a folder to a question (`LoadedProcessor.answer`); {"error": why} where it has none. Unreachable
    where its process cannot be started, or ends twice over this question."""
    name = f"{xxhash.xxh64_hexdigest(str(folder))}.socket"
    for left in range(TRIES)[::-1]:
        at = Path(_home() or _alone().name) / name
        with suppress(OSError, ValueError), _connected(at) as lines:
            lines.write(json.dumps(question) + "\n")
            lines.flush()
            return json.loads(lines.readline())
        with suppress(FileNotFoundError):  # the folder went with who had made it
            if left:
                _start(at, folder)
    raise Unreachable(
        "the process that counts the tokens of images has ended, most likely for want of memory: run again with fewer workers; "
        "the counts that it gave are kept."
    )


@contextmanager
def _connected(at: Path) -> Iterator[Any]:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(at))
        with asking.makefile("rw") as lines:
            yield lines


def _start(at: Path, folder: Path) -> None:
    """Starts it, unless another worker has done so meanwhile; returns when it listens."""
    with at.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when this process dies
        with suppress(OSError), _connected(at):
            return
        at.unlink(missing_ok=True)
        command = [sys.executable, "-m", "mdsmix.encode.processor_server"]
        pipe, silent = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=silent, text=True)
        at.with_suffix(".pid").write_text(str(process.pid))
        assert process.stdin
        assert process.stdout
        run = int(os.environ[RUN]) if _home() else os.getpid()
        with suppress(OSError), process.stdin, process.stdout:
            process.stdin.write(json.dumps([str(folder), str(at), run]) + "\n")
            process.stdin.flush()
            if why := process.stdout.readline().strip().removeprefix("ready"):
                raise Unreachable(
                    f"the process that counts the tokens of images could not be started: {why}"
                )


def serve(seeing: Any, at: str, run: int) -> None:
    """Answers one question after the other until the socket, or the process `run`, is gone."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(at)
        listening.listen(64)
        listening.settimeout(1)
        print("ready", flush=True)
        while os.path.exists(at) and _lives(run):
            with suppress(OSError, ValueError):  # nobody asked, or who did is dead
                _answer(seeing, listening.accept()[0])
    if not _lives(run):
        shutil.rmtree(Path(at).parent, ignore_errors=True)


def _answer(seeing: Any, asked: socket.socket) -> None:
    with asked, asked.makefile("rw") as lines:
        asked.settimeout(60)
        if not (line := lines.readline()):
            return  # somebody looked whether it listens
        try:
            answer: Any = seeing.answer(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        lines.write(json.dumps(answer) + "\n")


def _lives(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def main() -> None:
    """Reads a processor's name, a socket and the id of the run's process, and answers there."""
    try:
        with redirect_stdout(sys.stderr):
            from mdsmix.encode.loaded_processor import LoadedProcessor

            name, *beside = json.loads(sys.stdin.readline())
            seeing = LoadedProcessor(name)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    else:
        serve(seeing, *beside)


if __name__ == "__main__":
    main()
