"""The real llm-foundry has an environment of its own: these tests convert here and run it there.

`MDSMIX_FOUNDRY_PYTHON` names another such interpreter. A missing one fails the tests; a skipped
test of the real thing would look like a passed one.
"""

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

from mdsmix.encode.transformers_process import WITHOUT
from tests.forked import Standing
from tests.styles import STYLES, train_style

for name in WITHOUT:  # the real thing needs torch
    os.environ.pop(name, None)

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / ".venv-foundry" / "bin" / "python"
SCRIPTS = Path(__file__).with_name("scripts")
SECONDS = 400
IMPORTS = "import llmfoundry.cli.cli, composer.loggers, mdsmix.load, tests.numbers; tests.numbers.count_apart()"
SERVE = "import sys; sys.path.insert(0, sys.argv[1]); import serve; serve.main(int(sys.argv[2]))"


class Foundry:
    """Calls functions of `scripts/` in one process of Foundry's interpreter: foundry("train.losses", path=...)."""

    def __init__(self, programs: Standing) -> None:
        with Listener(("127.0.0.1", 0)) as listener:
            self.process = programs.start(SERVE, SCRIPTS, listener.address[1])
            self.calls = listener.accept()

    def __call__(self, call: str, **arguments: Any) -> Any:
        self.calls.send(json.dumps({"call": call, "arguments": arguments}))
        try:
            answer = json.loads(self.calls.recv()) if self.calls.poll(SECONDS) else {}
        except EOFError:
            answer = {}
        if "value" not in answer:
            said = answer.get("error") or self.process.said("err")[-4000:]
            pytest.fail(f"{call}: {said}", pytrace=False)
        return answer["value"]

    def end(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def foundry_python() -> Path:
    """The interpreter that has llm-foundry 0.22 and mdsmix."""
    python = Path(os.environ.get("MDSMIX_FOUNDRY_PYTHON", HERE))
    if not os.access(python, os.X_OK):
        pytest.fail(f"no Foundry environment at {python}: run `make foundry-env`", pytrace=False)
    return python


@pytest.fixture(scope="session")
def programs(
    foundry_python: Path, tmp_path_factory: pytest.TempPathFactory, own_temporary: None
) -> Iterator[Standing]:
    """That interpreter with LLM-Foundry imported once, 15 s, for whatever need not be a command of its own."""
    # One thread: a step of the tiny model is over before a second one has started.
    home = {"HF_HOME": str(tmp_path_factory.mktemp("hf")), "OMP_NUM_THREADS": "1"}
    standing = Standing(IMPORTS, home | {"PYTHONPATH": str(ROOT)}, foundry_python)
    yield standing
    standing.close()


@pytest.fixture(scope="session")
def foundry(programs: Standing) -> Iterator[Foundry]:
    """A process of that interpreter, whose functions are called."""
    served = Foundry(programs)
    yield served
    served.end()


@pytest.fixture(scope="session")
def styled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer folder of every style; shared, since the first look at each costs 4 s."""
    folder = tmp_path_factory.mktemp("styles")
    return {style: train_style(folder / style, style) for style in STYLES}
