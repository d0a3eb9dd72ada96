"""Messages that are not to be trained: LLM-Foundry's own loader trains exactly the others, calls of tools among them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.converting import write_jsonl
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted
from tests.styles import train_style
from tests.test_encode_history import theirs
from tests.tool_styles import QWEN_2_5, as_objects, called


def flagged(count: int) -> list[dict[str, Any]]:
    """Conversations of which one answer or more is to be trained, half of the answers in all."""
    draw, records = random.Random(11), []
    for messages, tools in called(count):
        answers = [message for message in messages if message["role"] == "assistant"]
        chosen = {id(m) for m in draw.sample(answers, draw.randint(1, len(answers)))}
        marked = [m | {"weight": int(id(m) in chosen)} if m["role"] == "assistant" else m for m in messages]  # fmt: skip
        records.append({"messages": marked, "tools": tools})
    return records


def expected(record: dict[str, Any]) -> tuple[str, str]:
    """All of the row, and what is trained of it, from transformers' rendering alone."""
    messages, tools = record["messages"], record["tools"]
    bare = as_objects([{key: value for key, value in m.items() if key != "weight"} for m in messages])  # fmt: skip
    trained = [i for i, message in enumerate(messages) if message.get("weight")]
    answers = []
    for i in trained:
        prompt = theirs(QWEN_2_5, bare[:i], True, tools=tools)
        answers.append(theirs(QWEN_2_5, bare[: i + 1], False, tools=tools)[len(prompt) :])
    whole = theirs(QWEN_2_5, bare[: trained[-1] + 1], False, tools=tools)
    return whole + "</s>", "".join(answers) + "</s>"  # the collator ends a row in EOS


def test_what_is_not_to_be_trained_is_a_prompt(foundry: Foundry, tmp_path: Path) -> None:
    records = flagged(60)
    untrained = sum(m.get("weight") == 0 for record in records for m in record["messages"])
    assert untrained > 40
    tokenizer = train_style(tmp_path / "tokenizer", "plain", QWEN_2_5)
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    source = {"path": str(path), "shape": "openai"}
    policies = {"max_seq_len": 2048, "target_responses": "all"}
    streams = {"chat": {"kind": "finetuning", "source": source}}
    converted(tmp_path, tokenizer, streams=streams, special_tokens_in_text="allow", **policies)
    found = foundry(
        "loaders.texts",
        tokenizer=str(tokenizer),
        folder=f"{tmp_path}/out/chat/train",
        dataset=policies | {"target_prompts": "none", "decoder_only_format": True},
    )
    assert [tuple(row) for row in found] == [expected(record) for record in records]
