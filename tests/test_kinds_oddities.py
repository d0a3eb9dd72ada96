"""What is in the records and not trained on is counted, field by field, and said where the user looks anyway."""

from pathlib import Path

import pytest

from mdsmix.kinds.finetuning import PLACEHOLDERS, placeholders_in
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


def test_a_field_counts_where_it_says_something_in_bounded_memory() -> None:
    oddities = Oddities(["text"])
    full = [0, False, 0.0, " ", [None], {"a": None}]
    values = [None, "", [], {}, *full]
    oddities.look_at_fields([{"text": "x", "other": value} for value in values])
    oddities.look_at_fields([["text"], "text", None, {"text": 1}])
    assert oddities.counts["unread"] == {"other": len(full)}
    oddities = Oddities(["text"])
    oddities.look_at_fields([{f"field {n}": 1} for n in range(1_000)])
    found = oddities.counts["unread"]
    assert (len(found), found[OTHERS]) == (MOST_FIELDS + 1, 1_000 - MOST_FIELDS)
    assert next(iter(found)) == "field 0"


def test_placeholders_are_counted_once_a_record() -> None:
    texts = ["<image><image>\n<video>", "a < b\n<image>", "<im\nage>"]
    assert placeholders_in(texts, texts) == {"<image>": 2, "<video>": 1}
    assert placeholders_in(["<im", "age>"], ["<im\nage>"]) == {}
    for each in PLACEHOLDERS:
        assert placeholders_in(["a", f"b{each}"], [f"a\nb{each}", "c"]) == {each: 1}


def test_lost_parts_of_records_are_said_with_their_numbers(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a stream whose records are read whole has nothing to say."""
    records = [
        {"prompt": f"do {n}", "response": "done", "input": "this" * (n % 3), "label": n % 2 == 0}
        for n in range(12)
    ]
    whole = [{"text": "about <image> tags", "id": ""}]
    streams = {
        "faq": pairs(write_jsonl(tmp_path / "alpaca.jsonl", records)),
        "docs": documents(write_jsonl(tmp_path / "docs.jsonl", whole), layout="document"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    windows(monkeypatch, 300)  # several units: their counts are summed
    for _ in range(2):  # said again when all is up to date
        said = mdsmix("convert", recipe).out
        assert "fields not read: label (12 of 12 not empty), input (8 of 12 not empty)" in said
        assert "WARNING: the field input of 8 records is not read" in said
        assert "WARNING: the field label of 12 records" in said
        assert said.count("WARNING") == 2
    assert manifest_of(tmp_path / "out/faq/train").records.unread == {"input": 8, "label": 12}
    assert b"unread" not in (tmp_path / "out/docs/train/mdsmix.manifest").read_bytes()


def talks(folder: Path, tokenizer: Path, *texts: tuple[str, ...]) -> Path:
    """A recipe of conversations of these texts."""
    roles = ("user", "assistant") * 2
    said = [
        {"messages": [{"role": r, "content": c} for r, c in zip(roles, each, strict=False)]}
        for each in texts
    ]
    streams = {"chat": chats(write_jsonl(folder / "chat.jsonl", said))}
    return write_recipe(folder, tokenizer, streams=streams, max_seq_len=64)


def test_many_filtered_records_are_warned_of_with_the_way_out(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Two answers, the first of which fits: `all` keeps what `last` filters."""
    long, longer = "word " * 30, "word " * 400
    texts = [(long, "b", "c", "d"), (longer, "b", "c", "d")]
    recipe = talks(tmp_path, tokenizer_folder, tuple("abcd"), ("a", "b", long, "d"), *texts)
    out = mdsmix("convert", recipe).out
    assert "WARNING: 75.0% of the records are filtered: 3 no_loss_tokens\n" in out
    assert "a larger max_seq_len, or target_responses: all, may keep those" in out
    for change, kept in (("max_seq_len=128", 3), ("target_responses=all", 2)):
        run_recipe(recipe, change)
        assert manifest_of(tmp_path / "out/chat/train").records.written == kept


def test_tokens_that_the_loader_cuts_off_are_not_counted_as_seen(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = talks(tmp_path, tokenizer_folder, ("a", "word " * 300), ("a", "b"), ("a", "b"))
    out = mdsmix("convert", recipe).out
    totals = manifest_of(tmp_path / "out/chat/train").totals
    cut = totals.cut_tokens
    assert (totals.cut_rows, cut) == (1, totals.longest - 64)
    assert totals.seen_tokens == totals.tokens - cut < 200
    said = f"1 of 3 rows are longer than max_seq_len: the loader cuts off {cut} tokens"
    for words in (said, f" {totals.seen_tokens} ", f"{cut / totals.tokens:.1%}"):
        assert words in out
    assert mdsmix("mix", recipe, "--out", tmp_path / "mixed", "--seed", "1").code == 0
    mixed = manifest_of(tmp_path / "mixed/train").totals
    assert (mixed.cut_rows, mixed.cut_tokens) == (1, cut)
