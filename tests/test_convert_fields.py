"""Paths, templates, conditions and names of records, through a whole conversion."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.converting import Web, documents, encoder, mdsmix, windows

RECORDS: list[Any] = [
    {"meta": {"id": "a", "lang": "en"}, "title": "One", "body": "first words"},
    {"meta": {"id": "b", "lang": "de"}, "title": "Zwei", "body": "zweite"},
    {"meta": {"id": "c", "lang": "en"}, "title": "Three"},
    {"meta": {"id": "d"}, "title": "Four", "body": "x"},
    {"meta": {"id": "e", "lang": "en"}, "title": "Five", "body": "fifth words", "lost": 1},
    {"meta": {"id": "f", "lang": 3}, "title": "Six", "body": "sixth words"},
    7,
]


def says(web: Web, **source: Any) -> Web:
    stream = documents(web.holds(RECORDS), layout="document")
    stream["source"] |= source
    return web.says(stream, max_seq_len=64)


def test_a_template_a_condition_and_a_name_make_rows_counts_and_a_quarantine(web: Web) -> None:
    says(web, text="{title}\n\n{body}", where="meta.lang >= 'en'", id="meta.id")
    answer = web.convert()
    assert answer.code == 0, answer.err
    assert "WARNING: 28.6% of the records are filtered" in answer.out, "a false one is asked for"
    ids, end = encoder(web.tokenizer), web.rows[0][-1]
    said = ["One\n\nfirst words", "Five\n\nfifth words"]
    assert web.rows == [[*ids(text), end] for text in said]
    records = web.manifest.records
    assert records.adds_up
    assert records.read == len(RECORDS)
    assert records.filtered == {"where": 1, "where_missing_field": 1, "where_not_comparable": 1}
    assert records.quarantined == {"missing_field": 1, "not_an_object": 1}
    assert records.unread == {"lost": 1}, "what a path, a template or a condition reads is read"
    assert [bad.get("detail") for bad in web.bad] == [{"id": "c", "missing": "body"}, None]
    shown = mdsmix("quarantine", web.train).out
    assert "id: c" in shown
    assert "missing: body" in shown


def named(stream: Path, *numbers: int) -> list[Any]:
    """The ids that inspect shows of these samples; of those of the first shard where none is given."""
    each = [("--sample", number) for number in numbers] or [("-n", 1000)]
    answers = (json.loads(mdsmix("inspect", stream, *of, "--json").out) for of in each)
    return [next(iter(row["ids"]), None) for answer in answers for row in answer["shown"]]


def test_inspect_says_which_record_a_sample_is_of(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of long documents have the name of theirs, over several units and shards; rows of several documents have none."""
    windows(monkeypatch, 600)
    monkeypatch.setattr("mdsmix.shards.shard_files.SHARD_ROWS", 3)
    records = [{"id": f"n{n}", "text": "some words " * n} for n in range(40)]
    records[7]["id"] = ["none"]
    stream = documents(web.holds(records), layout="document")
    stream["source"]["id"] = "id"
    outcome = web.says(stream, publish="versioned").run()
    assert outcome.units > 3
    ids, expected = encoder(web.tokenizer), list[Any]()
    for record in records:
        length = len(ids(record["text"])) + 1
        rows = sum(min(16, length - start) > 1 for start in range(0, length, 16))
        expected += [record["id"] if isinstance(record["id"], str) else None] * rows
    folder = web.out / "web"
    assert len(expected) == outcome.manifest.totals.samples > 60
    assert named(folder, *range(3, len(expected), 17)) == expected[3::17]
    one = mdsmix("inspect", folder, "--sample", len(expected) - 1)
    assert ", id n39 " in one.out
    again = web.run()
    assert (again.done, again.manifest) == (0, outcome.manifest)
    joined = web.says(stream | {"layout": "concat"}).anew()
    assert not list(joined.train.glob("*.ids.side"))
    assert {*named(joined.train)} == {None}


def test_a_lost_or_damaged_file_of_names_is_made_anew(web: Web) -> None:
    first = says(web, text="title", id="meta.id").run()
    (side,) = web.train.glob("*.ids.side")
    content = side.read_bytes()
    assert named(web.train) == list("abcdef")
    side.write_bytes(b"x" * len(content))
    answer = mdsmix("inspect", web.train)
    assert answer.code == 3
    assert side.name in answer.err
    assert mdsmix("repair", web.train, "--recipe", web.recipe).code == 0
    assert side.read_bytes() == content
    side.unlink()
    assert web.run().manifest == first.manifest
    assert side.read_bytes() == content
