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
"Seconds between two lines where there is no terminal, so that a log shows life and stays short."


@contextmanager
def watching(quiet: bool = False) -> Iterator[Watcher]:
    """A watcher: a bar if stderr is a terminal, else lines. `quiet`: warnings alone."""
    with ExitStack() as stack:
        watcher = PlainLines(quiet)
        if not quiet and sys.stderr.isatty():
            watcher = Bar(stack.enter_context(_progress()))
        stack.enter_context(redirect_notices(watcher.say))
        yield watcher


def _progress() -> Progress:
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
    """A watcher that prints a line every half minute; with `quiet`, warnings alone. It counts
    bytes, tokens and bad records of all expected streams.
    """

    _expected: Collection[str] = ()

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._said = quiet, time.monotonic()

    def expect(self, sizes: Mapping[str, int]) -> None:
        self._expected, self._size, self._began = sizes, sum(sizes.values()), time.monotonic()
        self._done = self._tokens = self._bad = 0

    def begin(self, stream: str, size: int) -> None:
        """Begins a stream. A stream that was not expected gets a progress of its own."""
        if stream not in self._expected:
            self.expect({stream: size})
        self._stream = stream

    def on_progress(self, size: int, tokens: int) -> None:
        self._done += size
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
        if not self._quiet and time.monotonic() - self._said >= PLAIN_SECONDS:
            self._said = time.monotonic()
            share = min(self._done / max(self._size, 1), 1)
            left = self._seconds * (1 - share) / max(share, 1e-3) / 60
            self.say(f"{self._counted}: {share:.0%}, {self._rate}, about {left:,.0f} min left")

    @property
    def _counted(self) -> str:
        """What the share and the rate are of: the stream, or all streams and the one that is being
        done.
        """
        if len(self._expected) == 1:
            return self._stream
        return f"{len(self._expected)} streams, now {self._stream}"

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-3)

    @property
    def _rate(self) -> str:
        done, tokens = (n / self._seconds / 1e6 for n in (self._done, self._tokens))
        return f"{done:.1f} MB/s, {tokens:.2f} M tokens/s" + f", {self._bad:,} quarantined" * bool(self._bad)  # fmt: skip


class Bar(PlainLines):
    """A watcher that shows one bar for all streams together."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("", visible=False, rate="")

    def _show(self) -> None:
        self._progress.update(
            self._task,
            description=make_printable(self._counted),
            total=max(self._size, 1),
            completed=self._done,
            rate=self._rate,
            visible=True,
        )

    def say(self, sentence: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(make_printable(sentence)))
