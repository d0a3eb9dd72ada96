"""The process of a command ends as Python ends it, except that its memory is not freed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PREPARED = """
import atexit, os, sys, threading

def wait():
    threading.main_thread().join()
    print("thread", end=" ")

class Freed:
    def __del__(self, write=os.write):
        write(1, b"freed")

freed = Freed()
atexit.register(print, "handler", end=" ")
threading.Thread(target=wait).start()
sys.modules.update(dict.fromkeys(sys.argv[2:]))
"""
"""A program that leaves a thread, an exit handler and an object. Its words after the first are
names of modules that count as imported.
"""
END = "from mdsmix.cli.process_end import end_process; print('output', end=' '); end_process({})"


def run_program(*words: str, program: str = PREPARED, **options: object) -> tuple[int, str, str]:
    """Run a program. Return its exit code, stdout and stderr."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    done = subprocess.run([sys.executable, "-c", program, *words], **settings)  # type: ignore[call-overload]
    return done.returncode, done.stdout or "", done.stderr


def test_threads_and_exit_handlers_end_and_nothing_is_freed() -> None:
    code, out, err = run_program(program=f"{PREPARED}\n{END.format(3)}")
    assert (code, out.split(), err) == (3, ["output", "thread", "handler"], "")


@pytest.mark.parametrize("code", [130, 143])
def test_after_a_signal_no_thread_is_waited_for(code: int) -> None:
    """It may wait for a store that does not answer."""
    thread = "threading.Thread(target=threading.Event().wait).start()"
    program = f"{PREPARED}\n{thread}\n{END.format(code)}"
    ended, out, err = run_program(program=program, timeout=60)
    assert (ended, out.split(), err) == (code, ["output", "handler"], "")


def test_a_thread_that_opens_a_tokenizer_is_left() -> None:
    thread = "each = threading.Thread(target=threading.Event().wait); each.can_be_left = True"
    program = f"import threading\n{thread}\neach.start()\n{END.format(2)}"
    assert run_program(program=program, timeout=60) == (2, "output ", "")


def test_after_torch_python_itself_ends_the_process() -> None:
    program = f"{PREPARED}\n{END.format(3)}\nsys.exit(4)"
    code, out, err = run_program("", "torch", program=program)
    assert (code, out.split(), err) == (4, ["output", "thread", "handler", "freed"], "")


def test_a_profiler_prints_its_result() -> None:
    words = ["-m", "cProfile", "-m", "mdsmix", "--version"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0
    assert "function calls" in done.stdout


def test_output_that_cannot_be_written_is_reported_by_python() -> None:
    program = f"{END.format(3)}; import sys; sys.exit(3)"
    buffered = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        code, _, err = run_program(program=program, stdout=full, env=buffered)
    assert code == 120
    assert "No space left on device" in err


def test_closed_output_is_left_to_python() -> None:
    end = END.format(3).replace("print('output', end=' '); ", "")
    program = f"import sys; sys.stdout.close(); {end}; sys.exit(4)"
    assert run_program(program=program) == (4, "", "")


COMMAND = """
def leave(code, leave=os._exit):
    os.write(1, b"left")
    leave(code)

os._exit = leave
from mdsmix.__main__ import main
main()
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["check", "none.yaml"], 2)])
def test_a_command_ends_so(words: list[str], code: int, tmp_path: Path) -> None:
    """Also one that fails."""
    paths = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ended, out, err = run_program(*words, program=PREPARED + COMMAND, cwd=tmp_path, env=paths)
    assert (ended, out.split()[-3:]) == (code, ["thread", "handler", "left"])
    assert err.count("\n") == (code > 0)
