"""What conversion asks of a processor of transformers: how many tokens an image becomes, and whether rows put together by a loader are those
that the processor makes of whole texts.

Conversion imports neither torch nor transformers, 10 s and 730 MB, so a process of its own answers: one for a run, whichever of its workers
asks, started when the first image of an unknown size comes. The folder of a run holds its socket; it ends when that folder, or whoever
made it, is gone. `python -m mdsmix.encode.processor_server` is that process. Answers are kept on this machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import orjson
import xxhash

from mdsmix.encode.pretrained import cache_folder, keep_in_cache, snapshot_of, version
from mdsmix.errors import MdsmixError, Unreachable

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


Size = tuple[int, int]
"Height and width, after the turn that EXIF asks for."
MANY = ("two images", "several rows")
"What the names of rows begin with that have more than one image."


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
            answers = _answers(snapshot_of(self.digest), {"sizes": missing})
            self._known |= zip(missing, answers, strict=True)
            self._keep()
        return {size: self._known[size] for size in wanted}

    @property
    def _path(self) -> Path:
        return cache_folder() / "processors" / f"{self.digest}.counts"

    def _kept(self) -> dict[Size, int]:
        with suppress(OSError, ValueError):
            return {(h, w): n for h, w, n in orjson.loads(self._path.read_bytes())}
        return {}

    def _keep(self) -> None:
        known = self._kept() | {size: n for size, n in self._known.items() if isinstance(n, int)}
        with suppress(Unreachable):  # all that is lost is a question
            keep_in_cache(self._path, orjson.dumps([[*size, n] for size, n in known.items()]))


class StoredRow(NamedTuple):
    """A row of a stream of images, by which a processor is tried."""

    name: str
    "What it is, for the sentence of a refusal."
    ids: Sequence[int]
    "One token for each image."
    images: Sequence[bytes]


class Inequality(NamedTuple):
    """Where a batch is another than what transformers makes of the whole text."""

    family: str
    "Class of the processor."
    row: str
    what: str
    "The key of the batch, and how the values differ."

    def __str__(self) -> str:
        return (
            f"of {self.row} {self.family} makes {self.what} where it is given the whole text, and the loader would make other of the "
            "stored row"
        )

    @property
    def way_out(self) -> str:
        if self.row.startswith(MANY):
            return "set images.max_images: 1, since rows with one image are equal, or name the processor of another model"
        return "name the processor of another model (docs/images.md lists those that are equal)"


def first_inequality(folder: Path, rows: Sequence[StoredRow]) -> Inequality | None:
    """The first in batches of these rows; None where they are equal, which this machine then remembers of each row. `folder`: of the
    processor's snapshot with its own tokenizer, which its hash does not tell."""
    marks = {_mark_of_equal(folder, row): row for row in rows}
    left = [row for mark, row in marks.items() if not mark.exists()]
    shown = [(name, ids, [b64encode(i).decode() for i in images]) for name, ids, images in left]
    for difference in _answers(folder, {"rows": shown}) if left else ():
        return Inequality(*difference)
    with suppress(Unreachable):  # all that is lost is a question
        for mark in marks:
            keep_in_cache(mark, b"")
    return None


def _mark_of_equal(folder: Path, row: StoredRow) -> Path:
    key = xxhash.xxh128(orjson.dumps([str(folder), version("transformers"), list(row.ids)]))
    for image in row.images:
        key.update(f"{len(image)} ")
        key.update(image)
    return cache_folder() / "processors" / "equal" / key.hexdigest()


def _answers(folder: Path, question: dict[str, Any]) -> list[Any]:
    answer = ask(folder, question)
    if not isinstance(answer, list):
        raise MdsmixError(
            f"the processor fails ({answer['error']}): name another, or leave processor out."
        )
    return answer


if __name__ == "__main__":
    main()
