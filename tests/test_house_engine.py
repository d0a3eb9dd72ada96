"""A stranger adds an engine as one class: here one that does each task in this process, as another machine would."""

import pickle
import random
import shutil
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsmix.convert import unit
from mdsmix.convert.planning import Options
from mdsmix.convert.run import convert
from mdsmix.engines.tasks import Attempt, Engine, OnProgress, Reporter
from mdsmix.kinds import open_recipe
from tests import converting
from tests.converting import files, mdsmix


@dataclass
class Elsewhere(Engine, Reporter):
    """Tasks arrive as bytes, in a drawn order, where the only tokenizer is the one beside the streams."""

    cache: Path
    peak, memory = 0, 1 << 30

    def run(self, tasks: Sequence[Any], on_progress: OnProgress, say: Any) -> Generator[Any]:
        self.on_progress = on_progress
        for number in random.Random(1).sample(range(len(tasks)), len(tasks)):
            away = (self.cache / "tokenizers").rename(self.cache / "away")
            unit._backends.clear()
            result = pickle.loads(pickle.dumps(tasks[number])).do(Attempt(), self)
            shutil.rmtree(self.cache / "fetched")
            away.rename(self.cache / "tokenizers")
            yield number, result


def test_an_engine_is_one_class(tmp_path: Path, tokenizer_folder: Path, monkeypatch: Any) -> None:
    converting.windows(monkeypatch, 600)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    texts = [{"text": f"Document {n}. " * 5, "n": str(n)} for n in range(99)]
    web = converting.write_jsonl(tmp_path / "a.jsonl", texts)
    faq = {"path": str(web), "prompt": "n", "response": "text"}
    recipe = converting.write_recipe(tmp_path, tokenizer_folder, streams={"web": converting.documents(web), "faq": {"kind": "finetuning", "source": faq}}, max_seq_len=64, mix={"faq": {"repeat": 2}})  # fmt: skip
    engine = Elsewhere(tmp_path / "cache")
    found = list(convert(open_recipe(recipe), Options(), converting.Told(), engine))
    assert min(outcome.done for outcome in found) > 5
    converting.run_recipe(recipe, f"local={tmp_path / 'other'}")
    assert files(tmp_path / "out") == files(tmp_path / "other"), "equal to the local engine's"
    for command in (("check", recipe), ("inspect", tmp_path / "out/web"), ("verify", tmp_path / "out/faq"), ("render-yaml", recipe, "-o", tmp_path / "t.yaml", "train_loader.num_workers=0")):  # fmt: skip
        assert mdsmix(*command).code == 0, command
