"""Ctrl-C and SIGTERM end a command by an exit code and without a traceback: in imports, in
callbacks whose exceptions Python drops, before the command line is there and after its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdsmix.cli import stop_signals
from mdsmix.cli.main import KEPT
from mdsmix.cli.stop_signals import note_stop_signals, raise_stop_signals
from tests.alarm import fail_after

IMPORTED = """
import signal
for _ in range({times}):
    signal.raise_signal({number})
IS_WHOLE = True
"""
SENT_AT = """
import atexit, os, signal, sys

class Sender:
    def find_spec(self, name, *_):
        if name == "{moment}":
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Sender())
if "{moment}" == "atexit":
    atexit.register(os.kill, os.getpid(), {number})
"""
"A sitecustomize.py that sends a signal when a module is looked for, or when Python ends."


@pytest.fixture(autouse=True)
def handlers_of_before() -> Iterator[None]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    hook = sys.unraisablehook
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert sys.unraisablehook is hook
    assert sys.gettrace() is None


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, times: int, number: int) -> None:
    """Write a module `interrupted` that sends this process signals while it is imported."""
    (folder / "interrupted.py").write_text(IMPORTED.format(times=times, number=int(number)))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "interrupted", raising=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_is_whole_before_the_signal_is_raised(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, 1, number)
    lines = []

    def run() -> None:
        with raise_stop_signals():
            try:
                import interrupted  # type: ignore[import-not-found]  # noqa: F401

                lines.append("the next line")
            finally:
                lines.append("cleaned up")

    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        with pytest.raises(SystemExit, match="143"):
            run()
    assert lines == ["cleaned up"]
    assert sys.modules["interrupted"].IS_WHOLE


def test_a_long_import_is_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "IMPORT_SECONDS", 0.05)
    write_module(tmp_path, monkeypatch, 1, signal.SIGINT)
    endless = "def call(): pass\nwhile True: call()\n"
    module = tmp_path / "interrupted.py"
    module.write_text(module.read_text() + endless)
    with fail_after(20), pytest.raises(KeyboardInterrupt), raise_stop_signals():
        import interrupted  # noqa: F401
    assert "interrupted" not in sys.modules


def test_a_second_signal_breaks_an_import_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, 2, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), raise_stop_signals():
        import interrupted  # noqa: F401
    assert "interrupted" not in sys.modules


def test_a_signal_in_a_callback_is_raised_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Python would print "Exception ignored", and the command would go on."""

    class Owner:
        pass

    owners = [Owner()]
    reference = weakref.ref(owners[0], lambda _: signal.raise_signal(signal.SIGINT))
    lines = []

    def run() -> None:
        with raise_stop_signals():
            owners.clear()
            lines.append("the next line")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert reference() is None
    assert lines == []
    assert capsys.readouterr().err == ""


def test_a_signal_before_the_command_is_raised_when_it_begins() -> None:
    handlers = note_stop_signals()
    try:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), raise_stop_signals():
            raise AssertionError("the command has begun")
        with raise_stop_signals():
            pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_an_ignored_signal_stays_ignored() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raise_stop_signals():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("moment", "sentence"),
    [
        ("mdsmix.cli.stop_signals", ""),
        ("mdsmix.cli.main", f"{KEPT}\n"),
        ("mdsmix.cli.check", f"{KEPT}\n"),
        ("atexit", ""),
    ],
)
def test_a_signal_at_any_moment_of_the_process(
    moment: str, sentence: str, number: signal.Signals, tmp_path: Path
) -> None:
    """The command itself fails by another exit code, since there is no recipe."""
    (tmp_path / "sitecustomize.py").write_text(SENT_AT.format(moment=moment, number=int(number)))
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    answer = subprocess.run(
        [sys.executable, "-m", "mdsmix", "check", "recipe.yaml"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    message = answer.stderr
    if moment == "atexit":  # the command has ended, and has printed its error
        assert message.startswith("error: ")
        assert message.count("\n") == 1
    else:
        assert message == sentence
    assert answer.returncode == 128 + number
