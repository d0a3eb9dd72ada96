"""What LLM-Foundry's own loader trains of conversations is what inference sees: under templates that rewrite history, and with messages
that are not to be trained."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.converting import chats, write_jsonl
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted
from tests.styles import REWRITING, train_style
from tests.test_encode_history import chats as conversations
from tests.test_encode_history import theirs
from tests.tool_styles import QWEN_2_5, as_objects, called

SAID = list(conversations(40))
ANSWERS = [(said, i) for said in SAID for i, m in enumerate(said) if m["role"] == "assistant"]


def texts(
    foundry: Foundry, folder: Path, template: str, stream: dict[str, Any], length: int
) -> list[tuple[str, str]]:
    """All of each row, and what is trained of it."""
    tokenizer = train_style(folder / "tokenizer", "plain", template)
    policies = {"max_seq_len": length, "target_responses": "all"}
    streams = {"chat": stream}
    converted(folder, tokenizer, streams=streams, special_tokens_in_text="allow", **policies)
    dataset = policies | {"target_prompts": "none", "decoder_only_format": True}
    asked = {"tokenizer": str(tokenizer), "folder": f"{folder}/out/chat/train"}
    return [(row[0], row[1]) for row in foundry("loaders.texts", **asked, dataset=dataset)]


@pytest.mark.parametrize("name", REWRITING)
def test_each_answer_trains_as_inference_sees_it(
    name: str, foundry: Foundry, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": said} for said in SAID])
    stream = chats(source, rewritten_history="each")
    found = texts(foundry, tmp_path, REWRITING[name], stream, 512)
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


def test_what_is_not_to_be_trained_is_a_prompt(foundry: Foundry, tmp_path: Path) -> None:
    """Half of the answers are to be trained, one or more of each conversation, calls of tools among them."""
    draw, records = random.Random(11), []
    for messages, tools in called(60):
        answers = [message for message in messages if message["role"] == "assistant"]
        chosen = [id(m) for m in draw.sample(answers, draw.randint(1, len(answers)))]
        marked = [m | {"weight": int(id(m) in chosen)} if m["role"] == "assistant" else m for m in messages]  # fmt: skip
        records.append({"messages": marked, "tools": tools})
    assert sum(m.get("weight") == 0 for record in records for m in record["messages"]) > 40
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    stream = {"kind": "finetuning", "source": {"path": str(path), "shape": "openai"}}
    found = texts(foundry, tmp_path, QWEN_2_5, stream, 2048)
    assert found == [expected(record) for record in records]


def expected(record: dict[str, Any]) -> tuple[str, str]:
    """The same from transformers' rendering alone."""
    messages, tools = record["messages"], record["tools"]
    bare = as_objects([{key: value for key, value in m.items() if key != "weight"} for m in messages])  # fmt: skip
    trained = [i for i, message in enumerate(messages) if message.get("weight")]
    answers = []
    for i in trained:
        prompt = theirs(QWEN_2_5, bare[:i], True, tools=tools)
        answers.append(theirs(QWEN_2_5, bare[: i + 1], False, tools=tools)[len(prompt) :])
    whole = theirs(QWEN_2_5, bare[: trained[-1] + 1], False, tools=tools)
    return whole + "</s>", "".join(answers) + "</s>"
