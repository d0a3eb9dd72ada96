"""`pack: true` under the real LLM-Foundry: what its collator does with each sample was done when the rows were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.converting import chats, documents, mdsmix, pairs, write_jsonl
from tests.foundry.conftest import Foundry
from tests.foundry.records import POLICIES
from tests.foundry.steps import converted, rendered
from tests.test_convert_packed import records

LENGTH = 96
OF_DECODERS = [(prompts, responses) for prompts, responses, is_decoder in POLICIES if is_decoder]


def both(folder: Path, tokenizer: Path, stream: dict[str, Any], **policies: Any) -> tuple[str, str]:
    """The folders of a stream, unpacked for the finetuning loader and packed."""
    for name, more in (("plain", {}), ("packed", {"pack": True})):
        loader = {} if more else {"train_loader": {"name": "finetuning"}}
        made = {"only": stream | more}
        shared = {"streams": made, "max_seq_len": LENGTH, **policies}
        converted(folder / name, tokenizer, **shared, **loader)
    plain, packed = (str(folder / name / "out/only/train") for name in ("plain", "packed"))
    return plain, packed


@pytest.mark.parametrize("kind", ["pairs", "chat", "docs"])
def test_packed_rows_teach_what_the_collator_makes_of_each_sample(
    foundry: Foundry, tokenizer_folder: Path, tmp_path: Path, kind: str
) -> None:
    # Every third answer is long, so that rows are cut in the midst of one, and at its end.
    found = records(60)
    for number, record in enumerate(found):
        record["response"] += " and so on" * (number % 3 * (10 + number))
    source = write_jsonl(tmp_path / "all.jsonl", found)
    stream = {
        "pairs": pairs(source),
        "chat": chats(source),
        "docs": documents(source, layout="document"),
    }[kind]
    policies = OF_DECODERS if kind != "docs" else [("all", "all")]
    for number, (prompts, responses) in enumerate(policies):
        given = {"target_prompts": prompts, "target_responses": responses}
        plain, packed = both(tmp_path / str(number), tokenizer_folder, stream, **given)
        case = {"max_seq_len": LENGTH, "decoder_only_format": True, **given}
        asked = {"tokenizer": str(tokenizer_folder), "plain": plain, "packed": packed}
        (seen,) = foundry("packed.compare", cases=[case], **asked)
        assert seen["lessons"] > 100
        assert seen["packed_rows"] < seen["rows"]


def test_its_own_loaders_fail_on_packed_rows_and_its_model_sees_no_other_document(
    foundry: Foundry, tokenizer_folder: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "all.jsonl", records(40))
    recipe = converted(
        tmp_path,
        tokenizer_folder,
        streams={
            "docs": documents(source, layout="document", pack=True),
            "chat": chats(source, pack=True),
            "web": documents(source),
        },
        max_seq_len=LENGTH,
        train_loader={"num_workers": 0, "dataset": {"shuffle_seed": 3}},
    )
    asked: dict[str, Any] = {"tokenizer": str(tokenizer_folder)}
    for name in ("docs", "chat"):
        packed = str(tmp_path / "out" / name / "train")
        failed = foundry("packed.failures", packed=packed, max_seq_len=LENGTH, **asked)
        assert failed == {"text": "RuntimeError", "finetuning": "KeyError"}
        case = {"max_seq_len": LENGTH, "decoder_only_format": True}
        masked, crossing = foundry("packed.difference", packed=packed, case=case, **asked)
        assert masked < 1e-4
        assert crossing > 1e-2

    config = rendered(recipe)
    assert "name: mdsmix" in config.read_text()
    assert "documents-unmasked [docs, chat]" in mdsmix("check", config).out
    settings = ["model.attn_config.attn_uses_sequence_id=true", "model.attn_config.alibi=true"]
    losses = foundry("train.losses", path=str(config), steps=8, settings=settings)
    assert losses[-1] < losses[0] - 0.3
