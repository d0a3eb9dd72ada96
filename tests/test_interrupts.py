"""Ctrl-C, which a notebook's kernel survives, leaves no worker and no lease behind, at whatever
line it comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mdsmix
from mdsmix import interrupts
from mdsmix.engines import local_engine
from mdsmix.engines.local_engine import LocalEngine
from mdsmix.engines.tasks import Attempt, Reporter
from mdsmix.interrupts import delay_signals, keep_imports_whole
from mdsmix.shards import lease
from mdsmix.shards.lease import hold_lease
from mdsmix.storage import locate
from tests.tasks import ignore_progress, make_call, make_settings

Line = tuple[str, int]
"A file, and the number of a line."


class Interrupter:
    """Traces the lines of some modules, and sends this process a SIGINT at one of them."""

    def __init__(self, *modules: Any, at: Line | None = None) -> None:
        self._files = {str(module.__file__) for module in modules}
        self._at = at
        self.lines = dict[Line, None]()
        "The lines that were run, in this order."

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line":
            self.lines.setdefault(line)
        if event == "line" and line == self._at:
            self._at = None
            os.kill(os.getpid(), signal.SIGINT)
        return self._trace


def list_children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def double(number: int, attempt: Attempt, reporter: Reporter) -> int:
    sys.settrace(None)  # of the process that forked this one
    return 2 * number


def run_three_tasks() -> list[tuple[int, int]]:
    """Run tasks as a conversion does."""
    engine = LocalEngine(make_settings(2))
    with ExitStack() as cleanup:
        for _ in range(2):
            cleanup.callback(engine.close)
        tasks = [make_call(double, number) for number in range(3)]
        return sorted(engine.run(tasks, ignore_progress, print))
    raise AssertionError


def run_until_interrupted(line: Line) -> bool:
    """Run tasks until this line is reached, and return whether it was. Some lines are run only if
    a worker is late.
    """
    try:
        for _ in range(50):
            with Interrupter(local_engine, at=line):
                run_three_tasks()
    except KeyboardInterrupt:
        return True
    return False


def lines_to_interrupt() -> Iterator[Line]:
    with Interrupter(local_engine) as interrupter:
        run_three_tasks()
    yield from interrupter.lines


def test_an_interrupt_at_any_line_of_the_engine_leaves_no_worker() -> None:
    children = list_children()
    lines = list(lines_to_interrupt())
    interrupted = 0
    for line in lines:
        interrupted += run_until_interrupted(line)
        assert list_children() == children, line
    # A line that was run under load, since a worker was late, may not be reached again.
    assert interrupted > max(50, 0.9 * len(lines))
    assert run_three_tasks() == [(0, 0), (1, 2), (2, 4)]


def test_an_interrupt_at_any_line_of_the_lease_leaves_nobody_who_renews_it(tmp_path: Path) -> None:
    """A run that was interrupted while it took the lease may leave a file, which grows stale."""

    def take_and_release() -> None:
        with hold_lease(locate(tmp_path), print):
            pass

    threads = threading.enumerate()
    with Interrupter(lease, interrupts) as interrupter:
        take_and_release()
    file = tmp_path / lease.LEASE_PATH
    left_files = 0
    for line in interrupter.lines:
        with pytest.raises(KeyboardInterrupt), Interrupter(lease, interrupts, at=line):
            take_and_release()
        assert threading.enumerate() == threads, line
        left_files += file.exists()
        file.unlink(missing_ok=True)
    assert left_files < len(interrupter.lines) / 3


def test_signals_come_after_the_block_once_and_find_the_handlers_of_before() -> None:
    calls = list[int]()
    before = signal.signal(signal.SIGALRM, lambda number, _: calls.append(number))
    try:
        with delay_signals():
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGALRM)
            assert calls == []
        assert calls == [signal.SIGALRM]
        with pytest.raises(KeyboardInterrupt), delay_signals():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGALRM)
        assert calls == [signal.SIGALRM] * 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_another_thread_changes_no_handler() -> None:
    handlers = list[Any]()

    def note_handler() -> None:
        with delay_signals():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=note_handler)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("times", [1, 2])
def test_an_import_in_a_function_of_the_api_is_whole(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C breaks it off, since it may wait for a disk for ever."""
    signals = f"import signal\nfor _ in range({times}): signal.raise_signal(signal.SIGINT)\n"
    (tmp_path / "half.py").write_text(f"{signals}IS_WHOLE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "half", raising=False)
    lines = []

    @keep_imports_whole
    def load() -> None:
        import half  # type: ignore[import-not-found]  # noqa: F401

        lines.append("the next line")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert lines == []
    assert ("half" in sys.modules) == (times == 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.gettrace() is None


def test_an_import_that_calls_a_function_of_the_api_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the user may convert for hours while it is imported."""
    (tmp_path / "converting.py").write_text(
        "import signal\n"
        "from pathlib import Path\n"
        "from mdsmix.interrupts import keep_imports_whole\n"
        "@keep_imports_whole\n"
        "def convert():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    Path(__file__).with_name('converted').touch()\n"
        "convert()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        import converting  # type: ignore[import-not-found]  # noqa: F401
    assert not (tmp_path / "converted").exists()


def test_ctrl_c_outside_of_imports_is_raised_at_once() -> None:
    lines = []

    @keep_imports_whole
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        lines.append("the next line")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert lines == []


def test_a_handler_of_a_program_stays() -> None:
    def handle(*_: object) -> None:
        raise AssertionError

    earlier = signal.signal(signal.SIGINT, handle)
    try:
        assert keep_imports_whole(signal.getsignal)(signal.SIGINT) is handle
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_each_function_of_the_api_keeps_imports_whole() -> None:
    names = [name for name, home in mdsmix._HOMES.items() if home == "api"]
    assert len(names) > 10
    assert all(hasattr(getattr(mdsmix, name), "__wrapped__") for name in names)
