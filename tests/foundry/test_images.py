"""Images under `train_loader.name: mdsmix`: the unmodified LLM-Foundry trains a model that sees, in microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.converting import documents, write_jsonl
from tests.foundry.conftest import SCRIPTS, Foundry
from tests.foundry.steps import converted, rendered
from tests.pictures import record, seeing_tokenizer, stream, write_drawings
from tests.processors import IMAGE_TOKEN, TOKENS, look_here, processor_of

STEPS = 6


def seeing(config: Path, processor: Path) -> Path:
    """The YAML with the tiny model that sees instead of the one that reads."""
    tree = yaml.safe_load(config.read_text())
    tree["model"] = {"name": "tiny_seeing", "processor": str(processor)}
    tree |= {"code_paths": [str(SCRIPTS / "seeing.py")], "accumulate_train_batch_on_tokens": True}
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    return config


def test_text_and_images_train_alike_in_whole_batches_and_in_microbatches(
    tmp_path: Path, tokenizer_folder: Path, foundry: Foundry, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_here(monkeypatch)
    declared = {"image_token": IMAGE_TOKEN["qwen"]}
    words = seeing_tokenizer(tokenizer_folder, tmp_path / "words", TOKENS, declared=declared)
    processor_of("qwen", words).save_pretrained(tmp_path / "qwen")
    names = [f"img/{path.name}" for path in write_drawings(tmp_path / "img", 12, (70, 40))]
    records = [record(name, answer=f"Drawing {n}.") for n, name in enumerate(names)]
    records += [record(names[0], names[5])] + [record(answer=f"None in {n}.") for n in range(3)]
    texts = [{"text": f"{n} one two three four five six seven"} for n in range(16)]
    loader = {"name": "mdsmix", "num_workers": 1, "dataset": {"dummy_image": True}}
    streams = {
        "see": stream(write_jsonl(tmp_path / "see.jsonl", records)),
        "read": documents(write_jsonl(tmp_path / "read.jsonl", texts), layout="document"),
    }
    given = {"streams": streams, "max_seq_len": 96, "processor": str(tmp_path / "qwen")}
    recipe = converted(tmp_path, words, train_loader=loader, **given)
    config = seeing(rendered(recipe), tmp_path / "qwen")
    whole, cut = (
        foundry(
            "train.losses",
            path=str(config),
            steps=STEPS,
            settings=[f"device_train_microbatch_size={size}", "optimizer.lr=0.02"],
        )
        for size in (8, 3)
    )
    assert cut == pytest.approx(whole, rel=1e-4), "8 rows as 3, 3 and 2"
    assert whole[-1] < whole[0] - 0.5
