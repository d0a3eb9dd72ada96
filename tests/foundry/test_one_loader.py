"""Pretraining rows in LLM-Foundry's finetuning loader give exactly the loss of plain language modelling.

The same documents are converted twice, for the text loader and for the finetuning loader; what the text loader trains on
is the measure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.converting import documents
from tests.foundry.conftest import Foundry
from tests.foundry.records import POLICIES
from tests.foundry.steps import converted, rendered

LENGTH = 128
UNPACKED: list[dict[str, Any]] = [
    {"target_prompts": prompts, "target_responses": responses, "decoder_only_format": True}
    for prompts, responses, is_decoder in [*POLICIES, ("length>=1", "last", True)]
    if is_decoder
]
PACKED = [{**case, "packing_ratio": 3.0} for case in UNPACKED]


LOADERS = ("text", "finetuning")


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, corpus_folder: Path
) -> dict[tuple[str, str], Path]:
    """The recipes of each layout for each loader: 200 docstrings, a few of them longer than a row."""
    folder, source = tmp_path_factory.mktemp("both"), corpus_folder / "docs.jsonl"
    return {
        (layout, loader): converted(
            folder / layout / loader,
            tokenizer_folder,
            streams={"only": documents(source, layout=layout)},
            max_seq_len=LENGTH,
            train_loader={"name": loader, "num_workers": 0, "dataset": {"shuffle": False}},
        )
        for layout in ("concat", "document")
        for loader in LOADERS
    }


def seen(
    foundry: Foundry, both: dict[tuple[str, str], Path], layout: str, tokenizer: Path, cases: Any
) -> list[dict[str, int]]:
    """One answer a case; every piece, label and sequence_id has been compared there."""
    text, finetuning = (str(both[layout, n].parent / "out/only/train") for n in LOADERS)
    asked = {"tokenizer": str(tokenizer), "text": text, "finetuning": finetuning}
    return list(foundry("one_loader.compare", length=LENGTH, cases=cases, **asked))


@pytest.mark.parametrize("layout", ["concat", "document"])
def test_labels_are_those_of_plain_language_modelling_under_every_policy(
    layout: str, both: dict[tuple[str, str], Path], foundry: Foundry, tokenizer_folder: Path
) -> None:
    for told in seen(foundry, both, layout, tokenizer_folder, UNPACKED):
        assert told["pieces"] == told["rows"] == told["wanted"] > 100


@pytest.mark.parametrize("layout", ["concat", "document"])
def test_packing_gives_every_document_a_sequence_id_and_trains_nothing_across(
    layout: str, both: dict[tuple[str, str], Path], foundry: Foundry, tokenizer_folder: Path
) -> None:
    for told in seen(foundry, both, layout, tokenizer_folder, PACKED):
        # Foundry drops the bins that wait when an epoch ends.
        assert told["wanted"] / 3 <= told["pieces"] <= told["wanted"]
        assert told["firsts"] <= told["rows"], "no document's first token is trained in the middle"
        assert (told["pieces"] > told["rows"] * 1.2) == (layout == "document")


def test_both_loaders_give_the_same_loss_at_every_step(
    both: dict[tuple[str, str], Path], foundry: Foundry
) -> None:
    text, finetuning = (
        foundry("train.losses", path=str(rendered(both["concat", loader])), steps=12)
        for loader in LOADERS
    )
    assert len(text) == 12
    assert finetuning == pytest.approx(text, abs=1e-5, rel=0)
    assert text[-1] < text[0] - 0.5
