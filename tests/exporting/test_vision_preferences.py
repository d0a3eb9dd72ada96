"""Batches of preferences with images equal those of TRL's own collator, which renders, tokenizes
and decodes the records itself: `make test-exports`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import yaml

from mdsmix.load import build_loader
from mdsmix.load.vision import load_processor
from tests.converting import run_recipe
from tests.pictures import drawing, write_drawings
from tests.processors import FAMILIES, ask_in_process, write_processor
from tests.with_torch.seeing import rendered
from tests.with_torch.test_load_preferences import LENGTH, open_upright, preference, write


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_that_of_trl(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

    ask_in_process(monkeypatch)
    folders = write_processor(family, tokenizer_folder, tmp_path / "model")
    write_drawings(tmp_path / "img", 2, (70, 40))
    (tmp_path / "img/wide.png").write_bytes(drawing("PNG", (200, 60)))
    asked = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "A drawing."},
        {"role": "user", "content": "Of what?"},
    ]
    records = [
        preference("img/0.jpg", chosen="A box. " * 60),
        preference("img/1.png", "img/wide.png", rejected="Nobody knows what it is."),
        preference("img/wide.png") | {"prompt": asked},
    ]
    recipe = write(tmp_path, folders, records, dataset={"pad_to_longest": True})
    run_recipe(recipe)
    (actual,) = build_loader(yaml.safe_load(Path(rendered(recipe)).read_text()), len(records))

    processor = load_processor(str(folders[1])).processor
    config = json.loads((folders[0] / "tokenizer_config.json").read_text())
    processor.chat_template = config["chat_template"]
    collator = DataCollatorForVisionPreference(processor, max_length=LENGTH)
    examples = copy.deepcopy(records)
    for example in examples:
        example["images"] = open_upright(recipe, example["images"])
    expected = collator(examples)
    assert actual.keys() <= expected.keys()
    for key, values in expected.items():
        if key in actual:
            assert torch.equal(actual[key], values), key
        else:
            assert key == "token_type_ids", "types that are all 0 are left out"
            assert not values.any()
