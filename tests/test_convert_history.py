"""Chats under a template that rewrites history, through every command: what a recipe's `rewritten_history` makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.converting import (
    chats,
    documents,
    manifest_of,
    mdsmix,
    quarantined,
    run_recipe,
    samples,
    write_jsonl,
    write_recipe,
)
from tests.styles import QWEN_3, train_style
from tests.test_encode_history import chats as conversations
from tests.test_encode_history import theirs


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template drops the reasoning of earlier answers."""
    return train_style(tmp_path_factory.mktemp("forgetful"), "plain", QWEN_3)


def recipe_of(folder: Path, tokenizer: Path, said: list[Any], **stream: Any) -> Path:
    source = write_jsonl(folder / "chats.jsonl", [{"messages": messages} for messages in said])
    streams = {"chat": chats(source, **stream)}
    return write_recipe(folder, tokenizer, streams=streams, max_seq_len=512, target_responses="all")


def texts(folder: Path, tokenizer: Path) -> list[str]:
    """Every row of the stream as one text."""
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rows = [sample["turns"] for sample in samples(folder / "out/chat/train")]
    ids = [
        [i for turn in row for side in ("input_ids", "labels") for i in turn[side]] for row in rows
    ]
    return model.decode_batch(ids, skip_special_tokens=False)


def test_each_answer_is_published_as_inference_sees_it(tmp_path: Path, forgetful: Path) -> None:
    said = list(conversations(40))
    recipe = recipe_of(tmp_path, forgetful, said, rewritten_history="each")
    run_recipe(recipe)
    published = manifest_of(tmp_path / "out/chat/train")
    answers = [(m, i) for m in said for i in range(len(m)) if m[i]["role"] == "assistant"]
    expected = {theirs(QWEN_3, m[: i + 1], False) for m, i in answers}
    found = texts(tmp_path, forgetful)
    assert set(found) <= expected
    assert len(found) == published.totals.samples > published.records.written == len(said)
    for command in ("check", "render-yaml"):
        assert mdsmix(command, recipe).code == 0
    target = tmp_path / "out/chat/train"
    assert mdsmix("verify", target).code == mdsmix("inspect", target).code == 0
    said_rows = mdsmix("convert", recipe).out
    assert f"{published.totals.samples} rows of {len(said)} records" in said_rows


def test_by_default_they_are_quarantined_with_both_texts(tmp_path: Path, forgetful: Path) -> None:
    said = [m for m in conversations(60) if len(m) > 3 and "</think>" in m[-3]["content"]][:3]
    assert mdsmix("convert", recipe_of(tmp_path, forgetful, said)).code == 5
    bad = quarantined(tmp_path / "out/chat/train")
    assert {record["reason"] for record in bad} == {"not_prefix_stable"}
    for record in bad:
        assert record["detail"]["printed"] != record["detail"]["printed_later"]


def test_variables_of_the_template_are_part_of_the_stream(tmp_path: Path, forgetful: Path) -> None:
    said = [
        [
            {"role": r, "content": c}
            for r, c in (("user", "a"), ("assistant", "<think>\n\n</think>\n\nb"))
        ]
    ]
    recipe = recipe_of(tmp_path, forgetful, said)
    run_recipe(recipe)
    before = samples(tmp_path / "out/chat/train")
    without = "tokenizer.template.enable_thinking=false"
    why = mdsmix("convert", recipe, "--dry-run", without).out
    assert "template was {} and is {'enable_thinking': False}" in why
    assert mdsmix("convert", recipe, without).code == 0
    after = samples(tmp_path / "out/chat/train")
    thought = len(before[0]["turns"][0]["labels"]) - len(after[0]["turns"][0]["labels"])
    assert thought == len(after[0]["turns"][0]["input_ids"]) - len(
        before[0]["turns"][0]["input_ids"]
    )
    assert thought > 0
    assert mdsmix("check", recipe, without).code == 0


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "tokenizer.template.enable_thinkin=false",
            "would change nothing, since the chat template of .* does not read it: did you mean enable_thinking?",
        ),
        ("tokenizer.template.messages=x", "tokenizer.template.messages is given by mdsmix itself"),
        (
            "tokenizer.kwargs.enable_thinking=false",
            "PreTrainedTokenizerFast does not read it: correct or remove it; a variable",
        ),
        (
            "tokenizer.kwargs.model_max_lenght=1",
            "tokenizer.kwargs: model_max_lenght would change nothing",
        ),
        ("streams.chat.rewritten_history=each target_responses=last", "each trains every answer"),
    ],
)
def test_what_nothing_reads_is_refused(
    tmp_path: Path, forgetful: Path, override: str, sentence: str
) -> None:
    recipe = recipe_of(tmp_path, forgetful, [])
    answer = mdsmix("convert", recipe, *override.split())
    assert answer.code == 2
    assert re.search(sentence, answer.err), answer.err


def test_template_variables_need_messages_and_a_template_is_missed_by_them_alone(
    tmp_path: Path,
) -> None:
    tokenizer = train_style(tmp_path / "bare", "no_template")
    said = mdsmix("convert", recipe_of(tmp_path, tokenizer, list(conversations(3)))).out
    warning = "WARNING: the tokenizer has no chat template, so conversations are rendered as ChatML"
    assert warning in said
    source = write_jsonl(tmp_path / "docs.jsonl", [{"text": "a"}])
    streams = {"docs": documents(source, layout="document")}
    recipe = write_recipe(tmp_path, tokenizer, streams=streams)
    assert "chat template" not in mdsmix("convert", recipe).out
    answer = mdsmix("convert", recipe, "tokenizer.template.enable_thinking=false")
    assert answer.code == 2
    assert "no stream has messages" in answer.err
