"""How far a conversion is: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mdsmix.convert.outcome import Watcher

PLAIN_SECONDS = 10.0
"Without a terminal a line is printed this often, so that a log shows life and stays short."


@contextmanager
def watching() -> Iterator[Watcher]:
    """The watcher that fits where stderr goes."""
    if not sys.stderr.isatty():
        yield PlainLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bars(progress)


class PlainLines:
    """A line every ten seconds."""

    def __init__(self) -> None:
        self._stream, self._size, self._done, self._tokens = "", 1, 0, 0
        self._began = self._said = time.monotonic()

    def begin(self, stream: str, size: int) -> None:
        self._stream, self._size, self._done, self._tokens = stream, max(size, 1), 0, 0
        self._began = self._said = time.monotonic()

    def on_progress(self, size: int, tokens: int) -> None:
        self._done += size
        self._tokens += tokens
        now = time.monotonic()
        if now - self._said >= PLAIN_SECONDS:
            self._said = now
            share, rate = (
                self._done / self._size,
                _rate(self._done, self._tokens, now - self._began),
            )
            self.say(f"{self._stream}: {min(share, 1):.0%}, {rate}")

    def say(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)


class Bars:
    """One bar per stream."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task, self._done, self._tokens, self._began = None, 0, 0, 0.0

    def begin(self, stream: str, size: int) -> None:
        self._task = self._progress.add_task(stream, total=max(size, 1), rate="")
        self._done = self._tokens = 0
        self._began = time.monotonic()

    def on_progress(self, size: int, tokens: int) -> None:
        self._done += size
        self._tokens += tokens
        rate = _rate(self._done, self._tokens, time.monotonic() - self._began)
        self._progress.update(self._task, completed=self._done, rate=rate)

    def say(self, sentence: str) -> None:
        self._progress.console.print(sentence, markup=False)


def _rate(size: int, tokens: int, seconds: float) -> str:
    seconds = max(seconds, 1e-3)
    return f"{size / seconds / 1e6:.1f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s"
