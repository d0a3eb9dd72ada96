"""Pretraining rows in LLM-Foundry's finetuning loader, and rows of `pack: true`, teach exactly what the plain ones do.

The same records are converted twice; what the text loader, or the collator of each sample, trains on is the measure.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.converting import chats, documents, pairs, write_jsonl
from tests.foundry.conftest import Foundry
from tests.foundry.records import POLICIES
from tests.foundry.steps import converted, rendered
from tests.test_convert_packed import records

OF_DECODERS = [(prompts, responses) for prompts, responses, is_decoder in POLICIES if is_decoder]
UNPACKED: list[dict[str, Any]] = [
    {"target_prompts": prompts, "target_responses": responses, "decoder_only_format": True}
    for prompts, responses in [*OF_DECODERS, ("length>=1", "last")]
]
PACKED = [{**case, "packing_ratio": 3.0} for case in UNPACKED]


def test_text_rows_in_the_finetuning_loader_are_plain_language_modelling(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path, foundry: Foundry
) -> None:
    """Under every policy, packed by Foundry or not, for 200 docstrings of which a few are longer than a row."""
    loaders, source = ("text", "finetuning"), corpus_folder / "docs.jsonl"
    for layout in ("concat", "document"):
        recipes = [
            converted(
                tmp_path / layout / loader,
                tokenizer_folder,
                streams={"only": documents(source, layout=layout)},
                max_seq_len=128,
                train_loader={"name": loader, "num_workers": 0, "dataset": {"shuffle": False}},
            )
            for loader in loaders
        ]
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


def test_packed_rows_teach_what_the_collator_makes_of_each_sample(
    foundry: Foundry, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Every third answer is long, so that rows are cut in the midst of one, and at its end."""
    found = records(60)
    for number, record in enumerate(found):
        record["response"] += " and so on" * (number % 3 * (10 + number))
    source = write_jsonl(tmp_path / "all.jsonl", found)
    both = {"pairs": pairs(source), "chat": chats(source)}
    for number, (prompts, responses) in enumerate(OF_DECODERS):
        listed = both
        if (prompts, responses) == ("all", "all"):
            listed = both | {"docs": documents(source, layout="document")}
        given = {"max_seq_len": 96, "target_prompts": prompts, "target_responses": responses}
        folder = tmp_path / str(number)
        plain = {"streams": listed, "train_loader": {"name": "finetuning"}}
        packed = {"streams": {name: stream | {"pack": True} for name, stream in listed.items()}}
        converted(folder / "plain", tokenizer_folder, **plain, **given)
        converted(folder / "packed", tokenizer_folder, **packed, **given)
        for name in listed:
            places = {of: f"{folder}/{of}/out/{name}/train" for of in ("plain", "packed")}
            case = {"decoder_only_format": True, **given}
            seen = foundry(
                "lessons.of_packed", tokenizer=str(tokenizer_folder), case=case, **places
            )
            assert seen["lessons"] > 100, (name, given)
            assert seen["packed_rows"] < seen["rows"]
