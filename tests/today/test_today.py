"""A conversion with transformers 5 on Python 3.13 or later, and streams that mdsmix made with
transformers 4 before: `make test-today`.

The commands are run as by a user. `.venv` has transformers 4, and makes the streams that are then
checked, loaded and converted again with today's libraries.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from mdsmix.load import build_loader
from tests.converting import manifest_of

ROOT = Path(__file__).parents[2]
TODAY = Path(sys.executable).with_name("mdsmix")
BEFORE = ROOT / ".venv/bin/mdsmix"
Command = Callable[..., str]
FIRST = 40
"So many batches of both are compared."


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Write the corpus and recipe of `make demo` to an empty folder. Return a function that runs a
    command there.
    """
    (tmp_path / "yamls").mkdir()
    (tmp_path / "yamls/demo.yaml").write_text((ROOT / "yamls/demo.yaml").read_text())
    monkeypatch.chdir(tmp_path)

    def run(program: Path | str, *words: object, code: int = 0) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MDSMIX_CACHE": f"{tmp_path}/cache"}
        ended = subprocess.run(
            [program, *map(str, words)], env=environment, capture_output=True, text=True
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    run(sys.executable, "-m", "tests.corpus", "demo")
    return run


def load_batches(config: str) -> list[dict[str, Any]]:
    return list(islice(build_loader(config, batch_size=8), FIRST))


def test_these_are_todays_libraries() -> None:
    assert int(transformers.__version__.partition(".")[0]) >= 5
    assert sys.version_info >= (3, 13)


def test_the_demo_converts_checks_renders_loads_and_trains(demo: Command) -> None:
    demo(TODAY, "convert", "yamls/demo.yaml")
    assert "may be mixed" in demo(TODAY, "check", "yamls/demo.yaml")
    demo(TODAY, "render-yaml", "yamls/demo.yaml", "-o", "demo/train.yaml")
    demo(TODAY, "inspect", "demo/mix/chat")

    class MixTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return build_loader("demo/train.yaml", batch_size=8)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_768,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    arguments = TrainingArguments(
        "out",
        max_steps=12,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = MixTrainer(LlamaForCausalLM(config), arguments)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12
    assert sum(losses[:3]) - sum(losses[-3:]) > 3


def test_streams_made_with_transformers_4_are_the_same(demo: Command) -> None:
    """They pass `check`, give the same batches, and nothing is converted again."""
    demo(BEFORE, "convert", "yamls/demo.yaml")
    demo(BEFORE, "render-yaml", "yamls/demo.yaml", "-o", "demo/train.yaml")
    manifest = manifest_of("demo/mix/chat/train")
    read = (
        "import pickle; from itertools import islice; from mdsmix.load import build_loader;"
        f"loader = build_loader('demo/train.yaml', batch_size=8);"
        f"pickle.dump(list(islice(loader, {FIRST})), open('batches', 'wb'))"
    )
    demo(BEFORE.with_name("python"), "-c", read)
    before = pickle.loads(Path("batches").read_bytes())

    assert "may be mixed" in demo(TODAY, "check", "yamls/demo.yaml")
    assert "as planned" in demo(TODAY, "check", "demo/train.yaml", "--lock")
    today = load_batches("demo/train.yaml")
    assert len(today) == len(before) == FIRST
    for one, other in zip(today, before, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    plan = demo(TODAY, "convert", "yamls/demo.yaml", "--dry-run")
    assert plan.count("0 of 1 work units would be converted") == 5, plan
    demo(TODAY, "convert", "yamls/demo.yaml")
    assert manifest_of("demo/mix/chat/train") == manifest
    assert len(list(Path("demo/mix").glob("tokenizer-*"))) == 1


def test_each_line_of_the_override_file_is_needed() -> None:
    """It lifts a bound of a dependency that today's version exceeds, or that would keep an old
    version.
    """
    lines = (ROOT / "overrides.txt").read_text().splitlines()
    wanted = [Requirement(line.partition("#")[0]) for line in lines if line[:1] != "#"]
    pins = [Requirement(pin) for pin in metadata.requires("mosaicml-streaming") or ()]
    by_name = {pin.name: pin for pin in pins if pin.marker is None}
    for requirement in wanted:
        installed = metadata.version(requirement.name)
        assert requirement.specifier.contains(installed)
        if requirement.name in by_name:
            assert not by_name[requirement.name].specifier.contains(installed), "needless line"
