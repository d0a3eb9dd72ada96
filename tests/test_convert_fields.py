"""Paths, templates, conditions and names of records, through a whole conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mdsmix.convert.job import make_job
from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.kinds import open_recipe
from tests.converting import (
    chats,
    documents,
    encoder,
    manifest_of,
    mdsmix,
    quarantined,
    run_recipe,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.styles import QWEN_3, train_style
from tests.test_encode_history import chats as conversations

RECORDS: list[Any] = [
    {"meta": {"id": "a", "lang": "en"}, "title": "One", "body": "first words"},
    {"meta": {"id": "b", "lang": "de"}, "title": "Zwei", "body": "zweite"},
    {"meta": {"id": "c", "lang": "en"}, "title": "Three"},
    {"meta": {"id": "d"}, "title": "Four", "body": "x"},
    {"meta": {"id": "e", "lang": "en"}, "title": "Five", "body": "fifth words", "lost": 1},
    {"meta": {"id": "f", "lang": 3}, "title": "Six", "body": "sixth words"},
    "no object",
]


def recipe_of(folder: Path, tokenizer: Path, **source: Any) -> Path:
    stream = documents(write_jsonl(folder / "a.jsonl", RECORDS), layout="document")
    stream["source"] |= source
    return write_recipe(folder, tokenizer, max_seq_len=64, streams={"web": stream})


def test_a_template_a_condition_and_a_name_make_rows_counts_and_a_quarantine(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = recipe_of(
        tmp_path,
        tokenizer_folder,
        text="{title}\n\n{body}",
        where="meta.lang >= 'en'",
        id="meta.id",
    )
    answer = mdsmix("convert", recipe)
    assert answer.code == 0, answer.err
    assert "WARNING: 28.6% of the records are filtered" in answer.out, "a false one is asked for"
    published = tmp_path / "out/web/train"
    ids = encoder(tokenizer_folder)
    end = token_rows(published)[0][-1]
    said = ["One\n\nfirst words", "Five\n\nfifth words"]
    assert token_rows(published) == [[*ids(text), end] for text in said]
    records = manifest_of(published).records
    assert records.adds_up
    assert records.read == len(RECORDS)
    assert records.filtered == {"where": 1, "where_missing_field": 1, "where_not_comparable": 1}
    assert records.quarantined == {"missing_field": 1, "not_an_object": 1}
    assert records.unread == {"lost": 1}, "what a path, a template or a condition reads is read"
    bad = quarantined(published)
    assert [record.get("detail") for record in bad] == [{"id": "c", "missing": "body"}, None]
    shown = mdsmix("quarantine", published).out
    assert "id: c" in shown
    assert "missing: body" in shown


def test_only_what_is_given_is_part_of_a_units_key(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The key without a condition or a name is the one that such a stream always had."""

    def key(**source: Any) -> tuple[str, set[str]]:
        recipe = open_recipe(recipe_of(tmp_path, tokenizer_folder, **source))
        job = make_job(recipe, recipe.streams["web"], open_tokenizer(recipe.tokenizer), None)
        assert {"where", "id"} & job.encoding.stated.keys() == source.keys() - {"text"}
        parsed = {"meta"} if "meta" in str(source) else set()
        assert set(job.fields_parsed) == parsed, "a cell of csv that a path goes into is JSON"
        return job.settings_hash, set(job.fields_read)

    plain, read = key()
    assert read == {"text"}
    given = ({"where": "meta.lang == 'en'"}, {"id": "meta.id"}, {"text": "{title} {meta.x}"})
    others = [key(**source) for source in given]
    assert len({plain, *(hash for hash, _ in others)}) == 4
    roots = [{name for name in read if name.isalpha()} for _, read in others]
    assert roots == [{"text", "meta"}, {"text", "meta"}, {"title", "meta"}]


def test_a_condition_that_leaves_nothing_names_its_field_and_those_that_are_there(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    where = "mata.lang == 'fr' and title != ''"
    answer = mdsmix("convert", recipe_of(tmp_path, tokenizer_folder, text="title", where=where))
    assert answer.code == 5
    lacks = f"where: {where} reads a field that 6 records lack"
    assert f"{lacks}; they have the fields body, lost, meta, title" in answer.err


def named(stream: Path, number: int) -> Any:
    """The id that inspect shows of a sample."""
    shown = json.loads(mdsmix("inspect", stream, "--sample", number, "--json").out)["shown"]
    return shown[0].get("id")


@pytest.mark.parametrize("publish", ["replace", "versioned"])
def test_inspect_says_which_record_a_sample_is_of(
    tmp_path: Path, tokenizer_folder: Path, publish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of long documents have the name of theirs, over several units and shards."""
    windows(monkeypatch, 600)
    monkeypatch.setattr("mdsmix.shards.shard_files.SHARD_ROWS", 3)
    records = [{"id": f"n{n}", "text": "some words " * n} for n in range(40)]
    records[7]["id"] = ["none"]
    stream = documents(write_jsonl(tmp_path / "a.jsonl", records), layout="document")
    stream["source"]["id"] = "id"
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": stream}, publish=publish)
    (outcome,) = run_recipe(recipe)
    assert outcome.units > 3
    ids = encoder(tokenizer_folder)
    expected = []
    for record in records:
        length = len(ids(record["text"])) + 1
        rows = sum(min(16, length - start) > 1 for start in range(0, length, 16))
        expected += [record["id"] if isinstance(record["id"], str) else None] * rows
    folder = tmp_path / "out/web"
    assert len(expected) == outcome.manifest.totals.samples > 60
    for number in range(0, len(expected), 5):
        assert named(folder, number) == expected[number]
    assert ", id n39 " in mdsmix("inspect", folder, "--sample", len(expected) - 1).out
    (again,) = run_recipe(recipe)
    assert again.done == 0
    assert again.manifest == outcome.manifest


def test_a_conversation_of_several_rows_names_each(tmp_path: Path) -> None:
    tokenizer = train_style(tmp_path / "tok", "plain", QWEN_3)
    said = [
        [{**first, "content": f"talk {n}."}, *rest]
        for n, (first, *rest) in enumerate(conversations(12))
    ]
    records = [{"id": n, "messages": messages} for n, messages in enumerate(said)]
    stream = chats(write_jsonl(tmp_path / "a.jsonl", records), rewritten_history="each")
    stream["source"]["id"] = "id"
    settings = {"max_seq_len": 512, "target_responses": "all"}
    (outcome,) = run_recipe(write_recipe(tmp_path, tokenizer, streams={"chat": stream}, **settings))
    rows = token_rows(tmp_path / "out/chat/train")
    assert len(rows) == outcome.manifest.totals.samples > len(records)
    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    for number, row in enumerate(rows):
        said_first = f"talk {named(tmp_path / 'out/chat', number)}."
        assert said_first in model.decode(row, skip_special_tokens=False)


def test_a_lost_or_damaged_file_of_names_is_made_anew(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = recipe_of(tmp_path, tokenizer_folder, text="title", id="meta.id")
    (first,) = run_recipe(recipe)
    published = tmp_path / "out/web/train"
    (side,) = published.glob("*.ids.side")
    content = side.read_bytes()
    assert [named(published, n) for n in range(6)] == list("abcdef")
    side.write_bytes(b"x" * len(content))
    answer = mdsmix("inspect", published)
    assert answer.code == 3
    assert side.name in answer.err
    assert mdsmix("verify", published).code == 3
    assert mdsmix("repair", published, "--recipe", recipe).code == 0
    assert side.read_bytes() == content
    side.unlink()
    (again,) = run_recipe(recipe)
    assert side.read_bytes() == content
    assert again.manifest == first.manifest


def test_rows_of_several_documents_have_no_name(tmp_path: Path, tokenizer_folder: Path) -> None:
    stream = documents(write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "text": "words " * 50}]))
    stream["source"]["id"] = "id"
    run_recipe(write_recipe(tmp_path, tokenizer_folder, streams={"web": stream}))
    assert not list((tmp_path / "out/web/train").glob("*.ids.side"))
    assert named(tmp_path / "out/web", 0) is None
