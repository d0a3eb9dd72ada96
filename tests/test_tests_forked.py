"""Programs that the tests fork end as their own processes would, and none is waited for without an end."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests import forked
from tests.forked import Standing


@pytest.fixture(scope="module")
def standing() -> Iterator[Standing]:
    programs = Standing("import time")
    yield programs
    programs.close()


@pytest.mark.parametrize(
    ("program", "code"), [("print(7)", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)]
)
def test_a_program_ends_as_its_own_process_would(
    standing: Standing, program: str, code: int
) -> None:
    ended = standing.start(program).wait()
    assert (ended.returncode, ended.stdout) == (code, "" if code else "7\n")
    assert ("ZeroDivisionError" in ended.stderr) == (code == 1)


def test_one_that_hangs_is_ended_and_one_that_is_not_waited_for_goes_on(
    standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "SECONDS", 0.2)
    served = standing.start("import sys; print(sys.stdin.read())", given="kept")
    assert standing.start("import time; time.sleep(60)").wait().returncode == -signal.SIGALRM
    monkeypatch.setattr(forked, "SECONDS", 60)
    assert served.wait().stdout == "kept\n"
