"""`mdsmix inspect` shows what is there: the card, and samples as text with the trained tokens marked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.converting import chats, documents, mdsmix, pairs, write_jsonl, write_recipe
from tests.published import CONCAT, TOKEN_ROW, publish

CHAT = {
    "messages": [
        {"role": "user", "content": "Which one?"},
        {"role": "assistant", "content": "The red one."},
    ]
}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def mix(tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "docs.jsonl", [{"text": f"[bold]Document[/bold] {n}"} for n in range(5)])
    write_jsonl(tmp_path / "faq.jsonl", [{"prompt": "Which one?", "response": " The red one."}])
    write_jsonl(tmp_path / "chat.jsonl", [CHAT])
    streams = {
        "docs": documents(tmp_path / "docs.jsonl", layout="document"),
        "faq": pairs(tmp_path / "faq.jsonl"),
        "chat": chats(tmp_path / "chat.jsonl"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    assert mdsmix("convert", recipe).code == 0
    return tmp_path / "out"


def test_the_stream_or_its_split_may_be_named(mix: Path) -> None:
    whole, split = mdsmix("inspect", mix / "docs"), mdsmix("inspect", mix / "docs" / "train")
    assert whole == split
    assert (whole.code, whole.err) == (0, "")
    assert "5 read = 5 written + 0 filtered + 0 quarantined" in whole.out
    assert re.findall(r"^sample (\d) ─", whole.out, re.M) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        ("docs", "[⟦bold]Document[/bold] 0⟨<|endoftext|>⟩⟧"),
        ("faq", "Which one?⟦ The red one.⟧"),
        ("chat", "⟨<|im_start|>⟩user\nWhich one?⟨<|im_end|>⟩\n⟨<|im_start|>⟩assistant\n⟦The red one.⟨<|im_end|>⟩\n⟧"),
    ],
)  # fmt: skip
def test_samples_are_text_with_the_trained_part_marked(mix: Path, stream: str, shown: str) -> None:
    assert shown in mdsmix("inspect", mix / stream, "-n", 1).out


def test_a_sample_gets_no_line_break_that_is_not_in_its_text(
    mix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert "[⟦bold]Document[/bold] 0⟨<|endoftext|>⟩⟧\n" in mdsmix("inspect", mix / "docs").out


def test_another_tokenizer_may_decode(mix: Path, tokenizer_folder: Path) -> None:
    arguments = ("inspect", mix / "faq", "-n", 1)
    assert mdsmix(*arguments, "--tokenizer", tokenizer_folder) == mdsmix(*arguments)


def test_a_stream_of_another_tool_is_shown_in_ids(tmp_path: Path) -> None:
    publish(tmp_path, CONCAT, [TOKEN_ROW])
    answer = mdsmix("inspect", tmp_path)
    assert answer.code == 0
    assert "only the index speaks" in answer.out
    assert "5 ⟦6 0 7 8 9 10 0 ⟧" in answer.out


@pytest.mark.parametrize("place", ["nothing", "."])
def test_no_stream_is_one_sentence(tmp_path: Path, place: str) -> None:
    answer = mdsmix("inspect", tmp_path / place)
    assert (answer.code, answer.out) == (4, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert "no published stream" in answer.err


def test_two_splits_are_to_be_told_apart(mix: Path, tmp_path: Path) -> None:
    (mix / "docs" / "train").rename(mix / "docs" / "val")
    (mix / "faq" / "train").rename(mix / "docs" / "train")
    answer = mdsmix("inspect", mix / "docs")
    assert answer.code == 4
    assert "2 splits (train, val)" in answer.err


def test_a_damaged_shard_is_one_sentence(mix: Path) -> None:
    (shard,) = (mix / "docs" / "train").glob("*.mds")
    shard.write_bytes(shard.read_bytes()[:20])
    answer = mdsmix("inspect", mix / "docs")
    assert answer.code == 4
    assert shard.name in answer.err
    assert answer.err.count("\n") == 1


def typed(folder: Path, tokenizer: Path) -> Path:
    """A document in which somebody typed a control token's text, a mark of ours, and what rich takes for an emoji."""
    write_jsonl(folder / "docs.jsonl", [{"text": "Say <|endoftext|> and ⟨x⟩ :smile:"}])
    streams = {"docs": documents(folder / "docs.jsonl", layout="document")}
    assert mdsmix("convert", write_recipe(folder, tokenizer, streams=streams, max_seq_len=128)).code == 0  # fmt: skip
    return folder / "out/docs"


def test_text_that_looks_like_a_control_token_is_none(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    out = mdsmix("inspect", typed(tmp_path, tokenizer_folder)).out
    assert " <|endoftext|> and \\u27e8x\\u27e9 :smile:⟨<|endoftext|>⟩⟧\n" in out


def test_programs_are_told_where_the_control_tokens_stand(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    at = typed(tmp_path, tokenizer_folder)
    first, rest = json.loads(mdsmix("inspect", at, "--json").out)["first_samples"][0]
    assert first["control"] == []
    assert rest["text"].count("<|endoftext|>") == 2
    assert [rest["ids"][place] for place in rest["control"]] == [0]


def test_on_a_terminal_control_tokens_have_a_colour(
    mix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = mdsmix("inspect", mix / "chat", "-n", 1).out
    assert "\x1b[36m⟨<|im_start|>⟩\x1b[0muser\n" in out
