"""The progress of a conversion: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from mdsmix.convert.planning import Watcher
from mdsmix.storage.s3_client import said_by
from mdsmix.words import printable

PLAIN_SECONDS = 30.0
"Without a terminal a line is printed this often, so that a log shows life and stays short."


@contextmanager
def watching(quiet: bool = False) -> Iterator[Watcher]:
    """A watcher: bars if stderr is a terminal, else lines. `quiet`: warnings alone."""
    if quiet or not sys.stderr.isatty():
        watcher = Silent() if quiet else PlainLines()
        with said_by(watcher.say):
            yield watcher
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
        bars = Bars(progress)
        with said_by(bars.say):
            yield bars


class Counting:
    """A watcher. It counts the bytes, tokens and bad records of the present stream, and the bytes of all streams."""

    def __init__(self) -> None:
        self._sizes: Mapping[str, int] = {}
        "Bytes of each stream; empty where they were not told, or of one stream."
        self._every = self._behind = self._read = 0
        "Bytes of all streams, of those before the present one, and those that were read."
        self._stream, self._size = "", 0
        self._done = self._tokens = self._bad = 0
        self._started = self._began = time.monotonic()

    def expect(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes if len(sizes) > 1 else {}
        self._every = sum(self._sizes.values())

    def begin(self, stream: str, size: int) -> None:
        self._behind += self._sizes.get(self._stream, 0)
        self._stream, self._size = stream, size
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

    def say(self, sentence: str) -> None:
        with suppress(BrokenPipeError):  # nobody listens any more, which ends no work
            print(printable(sentence), file=sys.stderr, flush=True)

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-3) * 1e6
        rate = f"{self._done / seconds:.1f} MB/s, {self._tokens / seconds:.2f} M tokens/s"
        return f"{rate}, {self._bad:,} quarantined" if self._bad else rate

    def _of_all(self) -> int:
        return self._behind + min(self._done, self._sizes.get(self._stream, 0))


class Silent(Counting):
    """Shows no progress."""

    def on_step(self, sentence: str) -> None: ...


class PlainLines(Counting):
    """A line every half minute."""

    def __init__(self) -> None:
        super().__init__()
        self._said = self._started

    def on_progress(self, size: int, tokens: int) -> None:
        super().on_progress(size, tokens)
        now = time.monotonic()
        if now - self._said < PLAIN_SECONDS:
            return
        self._said = now
        line = f"{self._stream}: {min(self._done / max(self._size, 1), 1):.0%}, {self._rate()}"
        if self._every:
            left = (self._every - self._of_all()) * (now - self._started) / max(self._read, 1)
            line += f"; all streams: {self._of_all() / self._every:.0%}, about {max(1, round(left / 60))} min left"
        self.say(line)


class Bars(Counting):
    """A bar for all streams together, and one for each."""

    def __init__(self, progress: Any) -> None:
        super().__init__()
        self._progress = progress
        self._total: Any = None
        self._task: Any = None

    def expect(self, sizes: Mapping[str, int]) -> None:
        super().expect(sizes)
        if self._every:
            self._total = self._progress.add_task("all streams", total=self._every, rate="")

    def begin(self, stream: str, size: int) -> None:
        super().begin(stream, size)
        self._task = self._progress.add_task(printable(stream), total=max(size, 1), rate="")

    def on_progress(self, size: int, tokens: int) -> None:
        super().on_progress(size, tokens)
        self._progress.update(self._task, completed=self._done, rate=self._rate())
        if self._total is not None:
            self._progress.update(self._total, completed=self._of_all())

    def say(self, sentence: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(printable(sentence)))
