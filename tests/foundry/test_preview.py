"""What a preview says of the first steps is what LLM-Foundry's own loaders draw, with the Streaming that it pins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.converting import documents
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted, rendered
from tests.foundry.test_train import streams

STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "finetuning": {"name": "finetuning", "num_workers": 2, "drop_last": True},
    "packed": {"name": "finetuning", "dataset": {"packing_ratio": 3.0}},
    "text": {"name": "text"},
}


@pytest.fixture(scope="module")
def configs(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, corpus_folder: Path
) -> dict[str, Path]:
    folder, docs = tmp_path_factory.mktemp("previewed"), corpus_folder / "docs.jsonl"
    plain = {"docs": documents(docs), "web": documents(corpus_folder / "web.jsonl.zst")}
    found = dict[str, Path]()
    for case, loader in CASES.items():
        dataset = {"shuffle": True, "shuffle_seed": 17, **loader.get("dataset", {})}
        listed = plain if case == "text" else streams(corpus_folder)
        recipe = converted(
            folder / case,
            tokenizer_folder,
            streams=listed,
            max_seq_len=128,
            train_loader={"num_workers": 0, **loader, "dataset": dataset},
        )
        found[case] = rendered(recipe)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_preview_is_what_the_real_loader_draws(
    case: str, configs: dict[str, Path], foundry: Foundry
) -> None:
    told = foundry("previewed.compare", path=str(configs[case]), steps=STEPS)
    assert told["version"].startswith("0.12.")
    ours, theirs = told["ours"], told["theirs"]
    if case == "packed":  # a packed row is several of those that are shown
        rows = [[side.pop("rows") for side in step] for step in zip(ours, theirs, strict=True)]
        assert all(len(one) == len(other) == 6 for one, other in rows)
    assert ours == theirs
    assert len(ours) == STEPS
