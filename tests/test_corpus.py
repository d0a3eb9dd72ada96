"""The corpus under all other tests: the same on every run, well formed, and of any size."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import orjson

from tests import corpus


def test_every_text_has_content_and_no_docstring_comes_twice() -> None:
    texts = [record["text"] for record in corpus.docstrings(300)]
    assert len(set(texts)) == 300
    assert all(record["text"].strip() for record in corpus.documents(20))
    assert all(row["prompt"] and row["response"] for row in corpus.questions(300))


def test_chats_alternate_and_end_with_the_assistant() -> None:
    rows = list(corpus.chats(300))
    starts = set()
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        starts.add(roles[0])
        turns = roles[roles[0] == "system" :]
        assert turns[0] == "user"
        assert turns[-1] == "assistant"
        assert all(a != b for a, b in pairwise(turns))
    assert starts == {"system", "user"}
    assert {2, 4, 6} <= {len(row["messages"]) for row in rows}


def test_the_held_out_records_are_in_no_other_file(corpus_folder: Path) -> None:
    docs, heldout = (
        set((corpus_folder / name).read_bytes().splitlines())
        for name in ("docs.jsonl", "heldout.jsonl")
    )
    assert (len(docs), len(heldout)) == (200, 20)
    assert not docs & heldout


def test_corpus_and_tokenizer_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    for run in ("first", "second"):
        corpus.write_corpus(tmp_path / run / "corpus", 5, 50, 50, 50, 5)
        corpus.train_tokenizer(tmp_path / run / "tokenizer", vocab_size=400, documents_n=5)
    first, second = (sorted((tmp_path / run).rglob("*.*")) for run in ("first", "second"))
    assert len(first) == 8
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_big_documents_are_seeded_json_that_hardly_repeats(tmp_path: Path) -> None:
    same, again, other = (
        corpus.big_documents(tmp_path / name, 2_000_000, seed).read_bytes()
        for name, seed in (("same", 1), ("again", 1), ("other", 2))
    )
    assert same == again != other
    assert len(same) >= 2_000_000
    texts = [orjson.loads(line)["text"] for line in same.splitlines()]
    assert all(texts)
    assert len(set(texts)) > 0.99 * len(texts)
