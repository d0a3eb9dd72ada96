"""The command `mdsmix`, also as `python -m mdsmix`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes 5 ms more to import
import os


def main() -> None:
    """Run the command, and end the process with its exit code.

    Ctrl-C and SIGTERM end it by exit code 130 or 143, without a traceback, at any moment: while the
    command line is imported, which takes 60 ms, while the command runs, and after that.
    """
    defaults = {_signal.SIGINT: _signal.default_int_handler, _signal.SIGTERM: _signal.SIG_DFL}
    for number, default in defaults.items():
        if _signal.getsignal(number) == default:  # not ignored, as in a background job of a shell
            _signal.signal(number, lambda signaled, _: os._exit(128 + signaled))
    from mdsmix.cli.stop_signals import end_at_stop_signals, note_stop_signals

    note_stop_signals()
    try:
        code = _run_command()
    finally:
        end_at_stop_signals()
    from mdsmix.cli.process_end import end_process

    end_process(code)
    raise SystemExit(code)


def _run_command() -> int:
    """Run the command. Return its exit code."""
    from mdsmix.cli.main import run

    try:
        run()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    main()
