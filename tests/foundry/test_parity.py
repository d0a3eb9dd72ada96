"""Raw records through LLM-Foundry's converters and through mdsmix: the same rows, the same batches, the same losses.

Whole converters and loaders, from JSONL to batches; test_encode.py holds every policy of every tokenizer style against
Foundry's functions, here the styles share the policies among them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.converting import chats, documents, manifest_of, pairs
from tests.foundry import records
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted
from tests.styles import STYLES

ENDED = {"adds_eos", "adds_both"}
"The styles whose tokenizer itself ends every text."


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pairs.jsonl and chats.jsonl; not by orjson, which writes no lone surrogate."""
    folder = tmp_path_factory.mktemp("raw")
    for name, rows in (("pairs", records.pairs()), ("chats", records.chat_records())):
        assert len(rows) == records.ROWS
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("style", STYLES)
def test_finetuning_streams_are_those_of_convert_finetuning_dataset(
    style: str, styled: dict[str, Path], raw: Path, foundry: Foundry, tmp_path: Path
) -> None:
    targets = records.policy(list(STYLES).index(style))
    listed = {"pairs": pairs(raw / "pairs.jsonl"), "chats": chats(raw / "chats.jsonl")}
    if targets["target_prompts"] == "none" and targets["target_responses"] == "last":
        listed["compact"] = chats(raw / "chats.jsonl", columns="compact")
    tokenizer = styled[style]
    settings = {"streams": listed, "special_tokens_in_text": "allow", **targets}
    converted(tmp_path, tokenizer, **settings)
    for name in listed:
        source, ours = listed[name]["source"]["path"], f"{tmp_path}/out/{name}/train"
        theirs = {"out": f"{tmp_path}/theirs/{name}", "tokenizer": str(tokenizer)}
        taken = foundry("convert.finetuning", path=source, targets=targets, **theirs)
        found = foundry(
            "loaders.same",
            tokenizer=str(tokenizer),
            theirs=f"{theirs['out']}/train",
            ours=ours,
            name="finetuning",
            dataset=targets,
        )
        told = manifest_of(ours).records
        assert taken == records.ROWS - told.bad
        assert found["rows"] == told.written > records.ROWS / 5
        assert found["trained"] > found["rows"]


@pytest.mark.parametrize("style", STYLES)
def test_text_rows_are_those_of_convert_dataset_json(
    style: str, styled: dict[str, Path], corpus_folder: Path, foundry: Foundry, tmp_path: Path
) -> None:
    source = str(corpus_folder / "docs.jsonl")
    tokenizer = styled[style]
    settings = {"max_seq_len": 32, "special_tokens_in_text": "allow"}
    converted(tmp_path, tokenizer, streams={"docs": documents(source)}, **settings)
    theirs = f"{tmp_path}/theirs"
    around = {"bos_text": "", "eos_text": "" if style in ENDED else "</s>"}
    asked = {"tokenizer": str(tokenizer), "max_seq_len": 32}
    foundry("convert.text", path=source, out=theirs, **asked, **around)
    found = foundry(
        "loaders.same",
        tokenizer=str(tokenizer),
        theirs=theirs,
        ours=f"{tmp_path}/out/docs/train",
        name="text",
        dataset={"max_seq_len": 32},
    )
    assert found["rows"] >= records.ROWS
    assert found["trained"] == 32 * found["rows"]
