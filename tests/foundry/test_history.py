"""Templates that rewrite history: what LLM-Foundry's loader trains of such a stream is each answer, as inference sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.converting import chats, write_jsonl
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted
from tests.styles import REWRITING, train_style
from tests.test_encode_history import chats as conversations
from tests.test_encode_history import theirs

SAID = list(conversations(40))
ANSWERS = [(said, i) for said in SAID for i, m in enumerate(said) if m["role"] == "assistant"]


@pytest.mark.parametrize("name", REWRITING)
def test_each_answer_trains_as_inference_sees_it(
    name: str, foundry: Foundry, tmp_path: Path
) -> None:
    tokenizer = train_style(tmp_path / "tokenizer", "plain", REWRITING[name])
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": said} for said in SAID])
    policies = {"max_seq_len": 512, "target_responses": "all"}
    stream = chats(source, rewritten_history="each")
    converted(
        tmp_path, tokenizer, streams={"chat": stream}, special_tokens_in_text="allow", **policies
    )
    found = foundry(
        "loaders.texts",
        tokenizer=str(tokenizer),
        folder=f"{tmp_path}/out/chat/train",
        dataset=policies | {"target_prompts": "none", "decoder_only_format": True},
    )
    said = {
        _closed(theirs(REWRITING[name], m[: i + 1], False)): m[i]["content"] for m, i in ANSWERS
    }
    assert sum(trained.count("answer ") for _, trained in found) == len(ANSWERS)
    assert len(found) > len(SAID)
    for text, trained in found:
        assert said[text].split("</think>")[-1].strip() in trained
        if not text.endswith(trained):  # its history stays, so that all of its turns are one row
            assert trained.count("answer ") == text.count("answer ") > 1


def _closed(text: str) -> str:
    """The collator ends a row in EOS where it does not end so."""
    return text if text.endswith("</s>") else text + "</s>"
