"""The real llm-foundry has an environment of its own: these tests convert here and run it there.

`MDSMIX_FOUNDRY_PYTHON` names another such interpreter. A missing one fails the tests; a skipped
test of the real thing would look like a passed one.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.encode.snapshot import WITHOUT
from tests.styles import STYLES, train_style

for name in WITHOUT:  # the real thing needs torch
    os.environ.pop(name, None)

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / ".venv-foundry" / "bin" / "python"
SCRIPTS = Path(__file__).with_name("scripts")
SECONDS = 400


class Foundry:
    """Calls functions of `scripts/` in one process of Foundry's interpreter: foundry("train.losses", path=...)."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.log = folder / "log"
        # One thread: a step of the tiny model is over before a second one has started.
        own = {"HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, SCRIPTS / "serve.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | own,
                cwd=folder,
            )

    def __call__(self, call: str, **arguments: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(
            json.dumps({"call": call, "arguments": arguments}).encode() + b"\n"
        )
        self.process.stdin.flush()
        ready = select.select([self.process.stdout], [], [], SECONDS)[0]
        line = self.process.stdout.readline() if ready else b""
        answer = json.loads(line) if line else {"error": self.log.read_text()[-4000:]}
        if "error" in answer:
            pytest.fail(f"{call}: {answer['error']}", pytrace=False)
        return answer["value"]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="session")
def foundry_python() -> Path:
    """The interpreter that has llm-foundry 0.22 and mdsmix."""
    python = Path(os.environ.get("MDSMIX_FOUNDRY_PYTHON", HERE))
    if not os.access(python, os.X_OK):
        pytest.fail(f"no Foundry environment at {python}: run `make foundry-env`", pytrace=False)
    return python


@pytest.fixture(scope="session")
def foundry(foundry_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foundry]:
    """That interpreter with LLM-Foundry imported once, for whatever need not be a command of its own."""
    served = Foundry(foundry_python, tmp_path_factory.mktemp("foundry"))
    yield served
    served.end()


@pytest.fixture(scope="session")
def styled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer folder of every style; shared, since the first look at each costs 4 s."""
    folder = tmp_path_factory.mktemp("styles")
    return {style: train_style(folder / style, style) for style in STYLES}
