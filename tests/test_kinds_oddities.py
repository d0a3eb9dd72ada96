"""What is in the records and not trained on is counted, field by field, and said where the user looks anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mdsmix.kinds.finetuning import placeholders_in
from mdsmix.kinds.read_records import MOST_FIELDS, OTHERS, Oddities
from tests.converting import (
    chats,
    documents,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)

ALPACA: list[dict[str, Any]] = [
    {
        "prompt": f"do {n}",
        "response": "done",
        "input": "with this" if n % 3 else "",
        "label": n % 2 == 0,
    }
    for n in range(12)
]


def test_a_field_counts_where_it_says_something() -> None:
    oddities = Oddities(["text"])
    empty = [None, "", [], {}]
    full = [0, False, 0.0, " ", [None], {"a": None}]
    oddities.look_at_fields([{"text": "x", "other": value} for value in [*empty, *full]])
    oddities.look_at_fields([["text"], "text", None, {"text": 1}])
    assert oddities.counts["unread"] == {"other": len(full)}


def test_records_of_any_fields_are_counted_in_bounded_memory() -> None:
    oddities = Oddities(["text"])
    oddities.look_at_fields([{f"field {n}": 1} for n in range(1_000)])
    assert len(oddities.counts["unread"]) == MOST_FIELDS + 1
    assert oddities.counts["unread"][OTHERS] == 1_000 - MOST_FIELDS
    assert next(iter(oddities.counts["unread"])) == "field 0"


def test_placeholders_are_counted_once_a_record() -> None:
    texts = ["<image><image>\n<video>", "a < b\n<image>", "<im\nage>"]
    assert placeholders_in("\n".join(texts), texts) == {"<image>": 2, "<video>": 1}
    assert placeholders_in("<im\nage>", ["<im", "age>"]) == {}


def test_lost_parts_of_records_are_said_with_their_numbers(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "alpaca.jsonl", ALPACA)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"faq": pairs(source)})
    windows(monkeypatch, 300)  # several units: their counts are summed
    for _ in range(2):  # said again when all is up to date
        said = mdsmix("convert", recipe).out
        assert "fields not read: label (12 of 12 not empty), input (8 of 12 not empty)" in said
        assert "WARNING: the field input of 8 records is not read" in said
        assert "WARNING: the field label of 12 records" in said
    assert manifest_of(tmp_path / "out/faq/train").records.unread == {"input": 8, "label": 12}


def test_a_stream_whose_records_are_read_whole_has_nothing_to_say(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "docs.jsonl", [{"text": "about <image> tags", "id": ""}])
    streams = {"docs": documents(source, layout="document")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    said = mdsmix("convert", recipe).out
    assert "not read" not in said
    assert "WARNING" not in said
    assert b"unread" not in (tmp_path / "out/docs/train/mdsmix.manifest").read_bytes()


def test_many_filtered_records_are_warned_of_with_the_way_out(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Two answers, the first of which fits: `all` keeps what `last` filters."""
    long, longer = "word " * 30, "word " * 400
    texts = [
        ("a", "b", "c", "d"),
        ("a", "b", long, "d"),
        (long, "b", "c", "d"),
        (longer, "b", "c", "d"),
    ]
    said = [
        {
            "messages": [
                {"role": r, "content": c}
                for r, c in zip(("user", "assistant") * 2, each, strict=True)
            ]
        }
        for each in texts
    ]
    source = write_jsonl(tmp_path / "chat.jsonl", said)
    streams = {"chat": chats(source)}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    out = mdsmix("convert", recipe).out
    assert "WARNING: 75.0% of the records are filtered: 3 no_loss_tokens\n" in out
    assert "a larger max_seq_len, or target_responses: all, may keep those" in out
    for change, kept in (("max_seq_len=128", 3), ("target_responses=all", 2)):
        run_recipe(recipe, change)
        assert manifest_of(tmp_path / "out/chat/train").records.written == kept


def test_tokens_that_the_loader_cuts_off_are_not_counted_as_seen(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word " * 300}]
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    source = write_jsonl(tmp_path / "chat.jsonl", [{"messages": m} for m in (long, short, short)])
    recipe = write_recipe(
        tmp_path, tokenizer_folder, streams={"chat": chats(source)}, max_seq_len=64
    )
    out = mdsmix("convert", recipe).out
    totals = manifest_of(tmp_path / "out/chat/train").totals
    assert totals.cut_rows == 1
    assert totals.cut_tokens == totals.longest - 64
    assert totals.seen_tokens == totals.tokens - totals.cut_tokens < 200
    assert (
        f"1 of 3 rows are longer than max_seq_len: the loader cuts off {totals.cut_tokens} tokens"
        in out
    )
    assert f" {totals.seen_tokens} " in out
    share = f"{totals.cut_tokens / totals.tokens:.1%}"
    assert share in out
    assert mdsmix("mix", recipe, "--out", tmp_path / "mixed", "--seed", "1").code == 0
    mixed = manifest_of(tmp_path / "mixed/train").totals
    assert (mixed.cut_rows, mixed.cut_tokens) == (totals.cut_rows, totals.cut_tokens)
