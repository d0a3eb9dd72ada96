"""The progress of a long command: a bar with rate and time left on a terminal, plain lines
elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from mdsmix.conversion.planning import Watcher
from mdsmix.messages import make_printable
from mdsmix.storage.notices import redirect_notices

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_SECONDS = 30.0
"Seconds between two lines if there is no terminal, so that a log stays short."


@contextmanager
def watching(quiet: bool = False) -> Iterator[Watcher]:
    """Give a watcher: a bar if stderr is a terminal, otherwise lines. `quiet`: only warnings."""
    with ExitStack() as stack:
        watcher = PlainLines(quiet)
        if not quiet and sys.stderr.isatty():
            watcher = Bar(stack.enter_context(_progress()))
        stack.enter_context(redirect_notices(watcher.say))
        yield watcher


def _progress() -> Progress:
    """Make the bar, which is drawn on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


class PlainLines:
    """A watcher that prints a line every half minute; with `quiet`, only warnings. It counts the
    bytes, tokens and bad records of all expected streams.
    """

    _expected: Collection[str] = ()

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._last_line = time.monotonic()

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Begin to count streams of these sizes in bytes."""
        self._expected = sizes
        self._size = sum(sizes.values())
        self._start = time.monotonic()
        self._bytes = 0
        self._tokens = 0
        self._bad = 0

    def begin(self, stream: str, size: int) -> None:
        """Begin a stream. A stream that was not expected gets its own progress."""
        if stream not in self._expected:
            self.expect({stream: size})
        self._stream = stream

    def on_progress(self, size: int, tokens: int) -> None:
        self._bytes += size
        self._tokens += tokens
        self._show()

    def on_bad(self, records: int) -> None:
        self._bad += records

    def on_step(self, sentence: str) -> None:
        if not self._quiet:
            self.say(sentence)

    def say(self, sentence: str) -> None:
        with suppress(BrokenPipeError):  # a closed stderr must not end the work
            print(make_printable(sentence), file=sys.stderr, flush=True)

    def _show(self) -> None:
        if not self._quiet and time.monotonic() - self._last_line >= PLAIN_SECONDS:
            self._last_line = time.monotonic()
            share = min(self._bytes / max(self._size, 1), 1)
            minutes = self._seconds * (1 - share) / max(share, 1e-3) / 60
            self.say(f"{self._subject}: {share:.0%}, {self._rate}, about {minutes:,.0f} min left")

    @property
    def _subject(self) -> str:
        """The streams whose progress is shown: `web`, or `3 streams, now web`."""
        if len(self._expected) == 1:
            return self._stream
        return f"{len(self._expected)} streams, now {self._stream}"

    @property
    def _seconds(self) -> float:
        """Seconds since counting began; never 0, since rates divide by it."""
        return max(time.monotonic() - self._start, 1e-3)

    @property
    def _rate(self) -> str:
        megabytes = self._bytes / self._seconds / 1e6
        tokens = self._tokens / self._seconds / 1e6
        rate = f"{megabytes:.1f} MB/s, {tokens:.2f} M tokens/s"
        if self._bad:
            rate += f", {self._bad:,} quarantined"
        return rate


class Bar(PlainLines):
    """A watcher that shows one bar for all streams."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("", visible=False, rate="")

    def _show(self) -> None:
        self._progress.update(
            self._task,
            description=make_printable(self._subject),
            total=max(self._size, 1),
            completed=self._bytes,
            rate=self._rate,
            visible=True,
        )

    def say(self, sentence: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(make_printable(sentence)))
