"""How far a conversion is: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from mdsmix.convert.outcome import Watcher
from mdsmix.storage.waiting import said_by
from mdsmix.words import printable

PLAIN_SECONDS = 30.0
"Without a terminal a line is printed this often, so that a log shows life and stays short."
LEAST_SHARE = 0.01
"Of all streams, before the time that is left is told: most of the first seconds are those in which workers start."


@contextmanager
def watching(quiet: bool = False) -> Iterator[Watcher]:
    """The watcher that fits where stderr goes; `quiet`: one that only passes on what the user should know now."""
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


@dataclass(slots=True)
class _Whole:
    """How much of all streams is done: those that were begun before the present one are."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    "Bytes of each stream, in the order in which they are done; empty where they were not told."

    @property
    def total(self) -> int:
        return max(1, sum(self.sizes.values()))

    def done(self, stream: str, of_it: int) -> int:
        before = list(self.sizes).index(stream)
        return sum(list(self.sizes.values())[:before]) + min(of_it, self.sizes[stream])

    def share(self, stream: str, of_it: int) -> float | None:
        """Of all streams; None where this is the only one."""
        return self.done(stream, of_it) / self.total if len(self.sizes) > 1 else None


class Silent:
    """No progress; whatever else is to be said is a line."""

    def expect(self, sizes: Mapping[str, int]) -> None: ...

    def begin(self, stream: str, size: int) -> None: ...

    def on_progress(self, size: int, tokens: int) -> None: ...

    def on_bad(self, records: int) -> None: ...

    def on_step(self, sentence: str) -> None: ...

    def say(self, sentence: str) -> None:
        with suppress(BrokenPipeError):  # nobody listens any more, which ends no work
            print(printable(sentence), file=sys.stderr, flush=True)


class PlainLines(Silent):
    """A line every half minute."""

    def __init__(self) -> None:
        self._stream, self._size, self._done, self._tokens, self._bad = "", 1, 0, 0, 0
        self._whole, self._all = _Whole(), 0
        self._start = self._began = self._said = time.monotonic()

    def expect(self, sizes: Mapping[str, int]) -> None:
        self._whole = _Whole(sizes)

    def begin(self, stream: str, size: int) -> None:
        self._stream, self._size, self._done, self._tokens = stream, max(size, 1), 0, 0
        self._bad = 0
        self._began = time.monotonic()

    def on_progress(self, size: int, tokens: int) -> None:
        self._done += size
        self._all += size
        self._tokens += tokens
        now = time.monotonic()
        if now - self._said >= PLAIN_SECONDS:
            self._said = now
            self.say(self._line(now))

    def on_bad(self, records: int) -> None:
        self._bad += records

    def on_step(self, sentence: str) -> None:
        self.say(sentence)

    def _line(self, now: float) -> str:
        rate = _rate(self._done, self._tokens, now - self._began, self._bad)
        line = f"{self._stream}: {min(self._done / self._size, 1):.0%}, {rate}"
        share = self._whole.share(self._stream, self._done)
        if share is None:
            return line
        line = f"{line}; all streams: {share:.0%}"
        if share < LEAST_SHARE:
            return line
        left = self._whole.total - self._whole.done(self._stream, self._done)
        seconds = left * (now - self._start) / max(self._all, 1)
        return f"{line}, about {_duration(seconds)} left"


class Bars:
    """A bar for all streams together, and one for each."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._whole = _Whole()
        self._total: Any = None
        self._task, self._stream, self._done, self._tokens, self._began = None, "", 0, 0, 0.0
        self._bad = 0

    def expect(self, sizes: Mapping[str, int]) -> None:
        self._whole = _Whole(sizes)
        if len(sizes) > 1:
            self._total = self._progress.add_task("all streams", total=self._whole.total, rate="")

    def begin(self, stream: str, size: int) -> None:
        self._task = self._progress.add_task(printable(stream), total=max(size, 1), rate="")
        self._stream, self._done, self._tokens, self._bad = stream, 0, 0, 0
        self._began = time.monotonic()

    def on_progress(self, size: int, tokens: int) -> None:
        self._done += size
        self._tokens += tokens
        self._show()
        if self._total is not None:
            done = self._whole.done(self._stream, self._done)
            self._progress.update(self._total, completed=done)

    def on_bad(self, records: int) -> None:
        self._bad += records
        self._show()

    def on_step(self, sentence: str) -> None:
        self.say(sentence)

    def _show(self) -> None:
        rate = _rate(self._done, self._tokens, time.monotonic() - self._began, self._bad)
        self._progress.update(self._task, completed=self._done, rate=rate)

    def say(self, sentence: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(printable(sentence)))


def _duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _rate(size: int, tokens: int, seconds: float, bad: int) -> str:
    seconds = max(seconds, 1e-3)
    rate = f"{size / seconds / 1e6:.1f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s"
    return f"{rate}, {bad:,} quarantined" if bad else rate
