"""The real llm-foundry has an environment of its own: these tests convert here, render into the
config of a tiny model and run it there.

`MDSMIX_FOUNDRY_PYTHON` names another such interpreter. A missing one fails the tests; a skipped
test of the real thing would look like a passed one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

from mdsmix.tokenizer.opening import WITHOUT_FRAMEWORKS
from tests.converting import chats, documents, pairs, run_ok, write_recipe
from tests.preloaded import PreloadedPython
from tests.styles import STYLES, train_style

for name in WITHOUT_FRAMEWORKS:  # the real thing needs torch
    os.environ.pop(name, None)

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / ".venv-foundry" / "bin" / "python"
SCRIPTS = Path(__file__).with_name("scripts")
SECONDS = 400
IMPORTS = (
    "import llmfoundry.cli.cli, composer.loggers, mdsmix.load, tests.shared_prefix; "
    "tests.shared_prefix.count_apart()"
)
TINY = Path(__file__).with_name("tiny.yaml")
MDSMIX = "from mdsmix.cli.main import run; run()"
LLMFOUNDRY = "from llmfoundry.cli.cli import app; app()"
SERVE = "import sys; sys.path.insert(0, sys.argv[1]); import serve; serve.main(int(sys.argv[2]))"


class Foundry:
    """Calls functions of `scripts/` in one process of Foundry's interpreter:
    foundry("train.losses", path=...).
    """

    def __init__(self, programs: PreloadedPython) -> None:
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
            said = answer.get("error") or self.process.read("err")[-4000:]
            pytest.fail(f"{call}: {said}", pytrace=False)
        return answer["value"]

    def end(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def programs(
    tmp_path_factory: pytest.TempPathFactory, own_temporary: None
) -> Iterator[PreloadedPython]:
    """The interpreter that has llm-foundry 0.22 and mdsmix, with LLM-Foundry imported
    once, 15 s.
    """
    python = Path(os.environ.get("MDSMIX_FOUNDRY_PYTHON", HERE))
    if not os.access(python, os.X_OK):
        pytest.fail(f"no Foundry environment at {python}: run `make foundry-env`", pytrace=False)
    # One thread: a step of the tiny model is over before a second one has started.
    home = {"HF_HOME": str(tmp_path_factory.mktemp("hf")), "OMP_NUM_THREADS": "1"}
    python_with_imports = PreloadedPython(IMPORTS, home | {"PYTHONPATH": str(ROOT)}, python)
    yield python_with_imports
    python_with_imports.close()


@pytest.fixture(scope="session")
def foundry(programs: PreloadedPython) -> Iterator[Foundry]:
    """A process of that interpreter, whose functions are called."""
    served = Foundry(programs)
    yield served
    served.end()


@pytest.fixture(scope="session")
def styled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer folder of every style; shared, since the first look at each costs 4 s."""
    folder = tmp_path_factory.mktemp("styles")
    return {style: train_style(folder / style, style) for style in STYLES}


class Lab:
    """A test's folder, a tokenizer and the demo's corpus: recipes are converted there, and rendered
    into the config of the tiny model.
    """

    def __init__(self, folder: Path, tokenizer: Path, corpus: Path) -> None:
        self.folder, self.tokenizer, self.corpus = folder, tokenizer, corpus

    def demo(self, names: str = "web docs faq chat heldout") -> dict[str, Any]:
        """Streams of the demo: two of pretraining, two of finetuning, one held out."""
        held = {"layout": "document", "min_tokens": 8}
        streams = {
            "web": documents(self.corpus / "web.jsonl.zst"),
            "docs": documents(self.corpus / "docs.jsonl", **held),
            "faq": pairs(self.corpus / "faq.jsonl"),
            "chat": chats(self.corpus / "chat.jsonl"),
            "heldout": documents(self.corpus / "heldout.jsonl", **held, split="val"),
        }
        return {name: streams[name] for name in names.split()}

    def converted(self, name: str = "", **settings: Any) -> Path:
        """The recipe, in a folder of this name, whose streams are published in `out` there unless
        `settings` say otherwise.
        """
        (folder := self.folder / name).mkdir(parents=True, exist_ok=True)
        recipe = write_recipe(folder, self.tokenizer, **settings)
        run_ok("convert", recipe)
        return recipe

    def rendered(self, name: str = "", **settings: Any) -> Path:
        """train.yaml beside such a recipe: the tiny model on its mix."""
        recipe = self.converted(name, **settings)
        config = recipe.with_name("train.yaml")
        run_ok("render-yaml", recipe, "--into", TINY, "-o", config)
        return config


@pytest.fixture
def lab(tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path) -> Lab:
    return Lab(tmp_path, tokenizer_folder, corpus_folder)
