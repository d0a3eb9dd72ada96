"""The command `mdsmix`, also as `python -m mdsmix`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes 5 ms more to import
import os


def main() -> None:
    """Run the command, and end the process with its exit code.

    Ctrl-C ends it without a traceback at any moment. The modules of the command line take 60 ms to
    import, in which Python would print one.
    """
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))
    from mdsmix.cli.stop_signals import end_at_stop_signals, note_stop_signals

    note_stop_signals()
    try:
        from mdsmix.cli.main import run

        run()
    except SystemExit as end:
        end_at_stop_signals()
        from mdsmix.cli.process_end import end_process

        end_process(int(end.code or 0))
        raise
    finally:
        end_at_stop_signals()


if __name__ == "__main__":
    main()
