"""Pretraining rows in LLM-Foundry's finetuning loader teach exactly what the text loader trains on of the same records."""

from pathlib import Path
from typing import Any

import pytest

from tests.converting import documents
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted, rendered
from tests.foundry.test_rows import POLICIES

UNPACKED: list[dict[str, Any]] = [
    {"target_prompts": prompts, "target_responses": responses, "decoder_only_format": True}
    for prompts, responses, is_decoder in [*POLICIES, ("length>=1", "last", True)]
    if is_decoder
]
PACKED = [{**case, "packing_ratio": 3.0} for case in UNPACKED]


def test_text_rows_in_the_finetuning_loader_are_language_modelling(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path, foundry: Foundry
) -> None:
    """Under every policy, packed by Foundry or not, for 200 docstrings of which a few are longer than a row."""
    loaders, source = ("text", "finetuning"), corpus_folder / "docs.jsonl"
    for layout in ("concat", "document"):
        keys: dict[str, Any] = {"streams": {"only": documents(source, layout=layout)}}
        keys |= {"max_seq_len": 128}
        recipes = []
        for name in loaders:
            loader = {"name": name, "num_workers": 0, "dataset": {"shuffle": False}}
            folder = tmp_path / layout / name
            recipes.append(converted(folder, tokenizer_folder, train_loader=loader, **keys))
        asked: dict[str, Any] = {"tokenizer": str(tokenizer_folder), "length": 128}
        asked |= {n: str(r.parent / "out/only/train") for n, r in zip(loaders, recipes, strict=True)}  # fmt: skip
        for told in foundry("lessons.of_rows", cases=UNPACKED, **asked):
            assert told["pieces"] == told["rows"] == told["wanted"] > 100
        for told in foundry("lessons.of_rows", cases=PACKED, **asked):
            # Foundry drops the bins that wait when an epoch ends.
            assert told["wanted"] / 3 <= told["pieces"] <= told["wanted"]
            assert told["firsts"] <= told["rows"], "a document's first token trained in the middle"
            assert (told["pieces"] > told["rows"] * 1.2) == (layout == "document")
        if layout == "concat":
            text, finetuning = (foundry("train.losses", path=str(rendered(recipe)), steps=4) for recipe in recipes)  # fmt: skip
            assert len(text) == 4
            assert finetuning == pytest.approx(text, abs=1e-5, rel=0)
