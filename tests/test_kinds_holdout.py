"""A share for evaluation: every record is on one side and none on both, whatever else there is in the sources."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from mdsmix.kinds.membership import is_held_out
from mdsmix.record import Conversation, Pair
from tests.converting import (
    chats,
    documents,
    manifest_of,
    mdsmix,
    run_recipe,
    samples,
    windows,
    write_jsonl,
    write_recipe,
)

TEXTS = [f"document {n}, with words of its own" for n in range(400)]


def rows(folder: Path) -> list[bytes]:
    return sorted(sample["tokens"].tobytes() for sample in samples(folder))


def recipe_of(folder: Path, tokenizer: Path, **stream: Any) -> Path:
    stream = documents("*.jsonl", layout="document", **stream)
    return write_recipe(folder, tokenizer, streams={"web": stream}, max_seq_len=64)


def test_each_record_is_on_one_side(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    windows(monkeypatch, 2_000)
    run_recipe(recipe_of(tmp_path, tokenizer_folder), f"local={tmp_path / 'whole'}")
    run_recipe(recipe_of(tmp_path, tokenizer_folder, holdout="10%"), workers=3)
    whole, train, held = (
        rows(tmp_path / at) for at in ("whole/web/train", "out/web/train", "out/web/eval")
    )
    assert sorted(train + held) == whole
    assert not set(train) & set(held)
    assert 20 < len(held) < 60  # 40, and a standard deviation of 6
    for side, reason in (("train", "held_out"), ("eval", "not_held_out")):
        records = manifest_of(tmp_path / "out/web" / side).records
        assert records.read == len(TEXTS)
        assert records.filtered == {reason: len(TEXTS) - records.written}


def test_what_a_record_says_decides_and_not_how_it_is_written() -> None:
    message, turned = {"role": "user", "content": "a"}, {"content": "a", "role": "user"}
    for share in (Fraction(n, 64) for n in range(64)):
        sides = {is_held_out(Conversation([each]), share) for each in (message, turned)}
        assert len(sides) == 1
    assert {is_held_out(Pair("a", str(n)), Fraction(1, 2)) for n in range(64)} == {True, False}


def test_it_is_rendered_as_an_eval_loader_and_no_record_in_it_is_said(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    said_back = {"role": "assistant", "content": "a"}
    asked = ({"role": "user", "content": f"q {n}"} for n in range(60))
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [each, said_back]} for each in asked])
    streams = {"chat": chats(source, holdout="25%")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    said = mdsmix("convert", recipe, "--only", "chat")
    assert (said.code, "chat-eval" in said.out, "WARNING" in said.out) == (0, True, False)
    assert mdsmix("check", recipe).code == 0
    rendered = mdsmix("render-yaml", recipe).out
    assert "label: chat-eval" in rendered
    assert "split: eval" in rendered
    assert "up to date" in mdsmix("convert", recipe).out

    write_jsonl(tmp_path / "a.jsonl", [{"text": TEXTS[0]}])
    answer = mdsmix("convert", recipe_of(tmp_path, tokenizer_folder, holdout="0.1%"))
    assert answer.code == 5
    assert "web-eval: not one sample came of its source (1 records: 1 not_held_out)" in answer.err
    assert manifest_of(tmp_path / "out/web/train").totals.samples == 1
