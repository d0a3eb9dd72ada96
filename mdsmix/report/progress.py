"""The progress of a long command: a bar with rate and time left on a terminal and in a notebook,
plain lines elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mdsmix.conversion.planning import Watcher
from mdsmix.frozen import frozen
from mdsmix.messages import make_printable
from mdsmix.report.log_file import make_stamp, write_log
from mdsmix.storage.notices import redirect_notices
from mdsmix.table import format_size

if TYPE_CHECKING:
    import rich.progress

DRAW_SECONDS = 0.25
"Seconds between two drawings of the bar in a notebook, each a message to the browser."
PLAIN_SECONDS = 30.0
"Seconds between two lines where output is not a terminal, so that a log stays short."


@frozen(kw_only=True)
class Progress:
    """The state of a long command. A function that was given as `progress` receives one of these at
    each step; its figures are sums over all streams.
    """

    stream: str
    "The stream that is at work; empty before the first one."
    bytes_done: int
    "Bytes of the sources that were read."
    bytes_expected: int
    tokens: int
    quarantined: int
    "Bad records."
    seconds: float
    message: str = ""
    "A sentence for the user, such as a warning; empty if only the figures changed."


ShowProgress = bool | Callable[[Progress], object]
"""How progress is shown. True: a bar on a terminal and in a notebook, lines elsewhere; False: only
warnings; a function: nothing is printed, and the function gets a `Progress` at each step.
"""


@contextmanager
def watching(show: ShowProgress = True) -> Iterator[Watcher]:
    """Yield a watcher that shows the progress of a conversion or a reading, in the way that `show`
    says.
    """
    with ExitStack() as stack:
        if callable(show):
            watcher: PlainLines = Callback(show)
        elif show and _is_notebook():
            watcher = stack.enter_context(NotebookBar())
        elif show and sys.stderr.isatty():
            watcher = Bar(stack.enter_context(_make_bar()))
        else:
            watcher = PlainLines(quiet=not show)
        stack.enter_context(redirect_notices(watcher.say))
        yield watcher


def _is_notebook() -> bool:
    """Check whether the program runs in a notebook, and not in IPython on a terminal."""
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


def _make_bar() -> rich.progress.Progress:
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
    """A watcher that prints a line every half minute, with the time and the time since it began;
    with `quiet`, only warnings. It counts the bytes, tokens and bad records of all expected
    streams. The file of `--log-file` gets the same lines, with and without a bar.
    """

    _expected: Collection[str] = ()
    _stream = ""
    _size = 0
    _bytes = 0
    _tokens = 0
    _bad = 0

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._last_line = time.monotonic()
        self._began = time.monotonic()
        self._start = self._began

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Begin to count the progress of several streams together.

        Args:
            sizes: name of a stream -> its bytes.
        """
        self._expected = sizes
        self._size = sum(sizes.values())
        self._start = time.monotonic()
        self._bytes = 0
        self._tokens = 0
        self._bad = 0

    def begin(self, stream: str, size: int) -> None:
        """Note that work on a stream begins. If `expect` did not name the stream, its progress is
        counted by itself.
        """
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
        if self._quiet:
            write_log(sentence)
        else:
            self.say(sentence)

    def say(self, sentence: str) -> None:
        write_log(sentence)
        self._print(sentence)

    def _print(self, sentence: str) -> None:
        with suppress(BrokenPipeError):  # a closed stderr must not end the work
            print(make_printable(sentence), file=sys.stderr, flush=True)

    def _show(self) -> None:
        line = self._make_line()
        if line and not self._quiet:
            self._print(f"{make_stamp(time.monotonic() - self._began)}  {line}")

    def _make_line(self) -> str | None:
        """Return a line on the progress, and write it into the log, if the last one was made half a
        minute ago or more; otherwise None.
        """
        if time.monotonic() - self._last_line < PLAIN_SECONDS:
            return None
        self._last_line = time.monotonic()
        share = min(self._bytes / max(self._size, 1), 1)
        minutes = self._seconds * (1 - share) / max(share, 1e-3) / 60
        line = f"{self._subject}: {share:.0%}, {self._rate}, about {minutes:,.0f} min left"
        write_log(line)
        return line

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
        """The speed and the bad records so far: `8.1 MB/s, 1.90 M tokens/s, 3 quarantined`."""
        megabytes = self._bytes / self._seconds / 1e6
        tokens = self._tokens / self._seconds / 1e6
        rate = f"{megabytes:.1f} MB/s, {tokens:.2f} M tokens/s"
        if self._bad:
            rate += f", {self._bad:,} quarantined"
        return rate


class Bar(PlainLines):
    """A watcher that shows one bar for all streams."""

    def __init__(self, progress: rich.progress.Progress) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("", visible=False, rate="")

    def _show(self) -> None:
        self._make_line()  # for the log
        self._progress.update(
            self._task,
            description=make_printable(self._subject),
            total=max(self._size, 1),
            completed=self._bytes,
            rate=self._rate,
            visible=True,
        )

    def _print(self, sentence: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(make_printable(sentence)))


class NotebookBar(PlainLines):
    """A watcher that shows one element below the cell of a notebook, and changes it in place: the
    sentences, and a bar for all streams. It needs no ipywidgets, which the bar of rich would.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = list[str]()
        self._display: Any = None
        "The element as IPython gives it; None until it is shown."
        self._last_draw = 0.0

    def __enter__(self) -> NotebookBar:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Replace the bar by a line on all that was read."""
        if self._size:
            ended = "stopped after " if error_type else ""
            self._lines.append(
                f"{ended}{format_size(self._bytes)}, {self._tokens:,} tokens read in "
                f"{self._seconds:.1f} s"
            )
        if self._lines:
            self._draw(is_ended=True)

    def _show(self) -> None:
        self._make_line()  # for the log
        if time.monotonic() - self._last_draw >= DRAW_SECONDS:
            self._draw()

    def _print(self, sentence: str) -> None:
        self._lines.append(sentence)
        self._draw()

    def _draw(self, is_ended: bool = False) -> None:
        """Draw the element, or draw it again."""
        from IPython import display

        from mdsmix.report.notebook import make_progress_html

        self._last_draw = time.monotonic()
        share = None
        if self._size and not is_ended:
            share = min(self._bytes / self._size, 1)
        text = f"{self._subject}: {self._rate}"
        shown = {
            "text/html": make_progress_html(self._lines, share, text),
            "text/plain": "\n".join(map(make_printable, self._lines)),
        }
        if self._display is None:
            self._display = display.display(shown, raw=True, display_id=True)
        else:
            self._display.update(shown, raw=True)


class Callback(PlainLines):
    """A watcher that passes each step to a function and prints nothing."""

    def __init__(self, function: Callable[[Progress], object]) -> None:
        super().__init__()
        self._function = function

    def say(self, sentence: str) -> None:
        self._call(sentence)

    def on_bad(self, records: int) -> None:
        super().on_bad(records)
        self._call()

    def _show(self) -> None:
        self._call()

    def _call(self, message: str = "") -> None:
        progress = Progress(
            stream=self._stream,
            bytes_done=self._bytes,
            bytes_expected=self._size,
            tokens=self._tokens,
            quarantined=self._bad,
            seconds=self._seconds,
            message=message,
        )
        self._function(progress)
