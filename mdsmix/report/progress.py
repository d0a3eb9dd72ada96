"""The progress of a conversion: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from mdsmix.convert.outcome import Watcher
from mdsmix.storage.waiting import said_by
from mdsmix.words import printable

PLAIN_SECONDS = 30.0
"Without a terminal a line is printed this often, so that a log shows life and stays short."
LEAST_SHARE = 0.01
"The time left is told above this share of all streams: in the first seconds workers start."


@contextmanager
def watching(quiet: bool = False) -> Iterator[Watcher]:
    """A watcher: bars if stderr is a terminal, else lines. `quiet`: warnings alone."""
    with _watcher(quiet) as watcher, said_by(watcher.say):
        yield watcher


@contextmanager
def _watcher(quiet: bool) -> Iterator[Watcher]:
    if quiet:
        yield Silent()
        return
    if not sys.stderr.isatty():
        yield PlainLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bars(progress)


class Silent:
    """Shows no progress. `say` prints a line."""

    def expect(self, sizes: Mapping[str, int]) -> None: ...

    def begin(self, stream: str, size: int) -> None: ...

    def on_progress(self, size: int, tokens: int) -> None: ...

    def on_bad(self, records: int) -> None: ...

    def on_step(self, sentence: str) -> None: ...

    def say(self, sentence: str) -> None:
        with suppress(BrokenPipeError):  # nobody listens any more, which ends no work
            print(printable(sentence), file=sys.stderr, flush=True)


class Counting(Silent):
    """Counts the bytes, tokens and bad records of the present stream, and the bytes of all streams."""

    def __init__(self) -> None:
        self._sizes: Mapping[str, int] = {}
        "Bytes of each stream, in the order in which they are done; empty where they were not told."
        self._stream, self._size, self._done, self._tokens, self._bad, self._read = (
            "",
            1,
            0,
            0,
            0,
            0,
        )
        self._start = self._began = time.monotonic()

    def expect(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    def begin(self, stream: str, size: int) -> None:
        self._stream, self._size = stream, max(size, 1)
        self._done = self._tokens = self._bad = 0
        self._began = time.monotonic()

    def on_progress(self, size: int, tokens: int) -> None:
        self._done += size
        self._read += size
        self._tokens += tokens

    def on_bad(self, records: int) -> None:
        self._bad += records

    def on_step(self, sentence: str) -> None:
        self.say(sentence)

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-3)
        rate = (
            f"{self._done / seconds / 1e6:.1f} MB/s, {self._tokens / seconds / 1e6:.2f} M tokens/s"
        )
        return f"{rate}, {self._bad:,} quarantined" if self._bad else rate

    def _of_all(self) -> tuple[int, int]:
        """(bytes that are done, bytes) of all streams. A stream that began before the present one is done."""
        before = islice(self._sizes.values(), list(self._sizes).index(self._stream))
        done = sum(before) + min(self._done, self._sizes[self._stream])
        return done, max(1, sum(self._sizes.values()))


class PlainLines(Counting):
    """A line every half minute."""

    def __init__(self) -> None:
        super().__init__()
        self._said = self._start

    def on_progress(self, size: int, tokens: int) -> None:
        super().on_progress(size, tokens)
        now = time.monotonic()
        if now - self._said >= PLAIN_SECONDS:
            self._said = now
            line = f"{self._stream}: {min(self._done / self._size, 1):.0%}, {self._rate()}"
            self.say(line + (self._left(now) if len(self._sizes) > 1 else ""))

    def _left(self, now: float) -> str:
        done, every = self._of_all()
        said = f"; all streams: {done / every:.0%}"
        if done / every < LEAST_SHARE:
            return said
        seconds = (every - done) * (now - self._start) / max(self._read, 1)
        return f"{said}, about {_duration(seconds)} left"


class Bars(Counting):
    """A bar for all streams together, and one for each."""

    def __init__(self, progress: Any) -> None:
        super().__init__()
        self._progress = progress
        self._total: Any = None
        self._task: Any = None

    def expect(self, sizes: Mapping[str, int]) -> None:
        super().expect(sizes)
        if len(sizes) > 1:
            every = max(1, sum(sizes.values()))
            self._total = self._progress.add_task("all streams", total=every, rate="")

    def begin(self, stream: str, size: int) -> None:
        super().begin(stream, size)
        self._task = self._progress.add_task(printable(stream), total=self._size, rate="")

    def on_progress(self, size: int, tokens: int) -> None:
        super().on_progress(size, tokens)
        self._progress.update(self._task, completed=self._done, rate=self._rate())
        if self._total is not None:
            self._progress.update(self._total, completed=self._of_all()[0])

    def say(self, sentence: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(printable(sentence)))


def _duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
