"""Where most records are bad, the sentence says what to do about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.converting import chats, documents, mdsmix, quarantined, write_jsonl, write_recipe

RECORDS = [{"text": f"document {n}"} for n in range(20)]


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("max_bad", [None, "100%"])
def test_a_file_that_is_one_array_is_named_as_that(
    tmp_path: Path, tokenizer_folder: Path, indent: int | None, max_bad: str | None
) -> None:
    """Whole on one line, an object a line, or laid out: how other tools write `.json`, under the name of lines."""
    if indent == 0:
        text = "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]\n"
    else:
        text = json.dumps(RECORDS, indent=indent)
    (tmp_path / "docs.jsonl").write_text(text)
    streams = {"docs": documents("docs.jsonl", layout="document")}
    answer = mdsmix(
        "convert", write_recipe(tmp_path, tokenizer_folder, streams=streams, max_bad=max_bad)
    )
    assert "begins with [, so it is one JSON array" in answer.out + answer.err
    assert "name it .json, or say source.format: json" in answer.out + answer.err
    # The last object of an array that has one a line ends in no comma: with max_bad: 100% it alone is published.
    assert answer.code == (0 if indent == 0 and max_bad else 5)
    reasons = {record["reason"] for record in quarantined(tmp_path / "out/docs/train")}
    assert "json_array" in reasons


def test_a_list_that_is_a_record_is_no_array_of_records(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_jsonl(tmp_path / "docs.jsonl", [*RECORDS, [], [1, 2], ["text"]])
    streams = {"docs": documents("docs.jsonl", layout="document")}
    answer = mdsmix("convert", write_recipe(tmp_path, tokenizer_folder, streams=streams))
    assert answer.code == 0
    assert "array" not in answer.out
    bad = quarantined(tmp_path / "out/docs/train")
    assert [record["reason"] for record in bad] == ["not_an_object"] * 3


def test_a_broken_line_that_begins_with_a_bracket_is_no_array(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    lines = [*map(json.dumps, RECORDS), '["text"', "[1, 2"]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    streams = {"docs": documents("docs.jsonl", layout="document")}
    answer = mdsmix("convert", write_recipe(tmp_path, tokenizer_folder, streams=streams))
    assert "array" not in answer.out
    bad = quarantined(tmp_path / "out/docs/train")
    assert [record["reason"] for record in bad] == ["not_json"] * 2


def test_fields_that_are_not_there_are_shown_beside_those_that_are(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_jsonl(tmp_path / "chat.jsonl", [{"id": 1, "conversations": []}] * 3)
    recipe = write_recipe(
        tmp_path, tokenizer_folder, streams={"chat": chats("chat.jsonl")}, max_bad=None
    )
    for override in ((), ("max_bad=1.0",)):
        answer = mdsmix("convert", recipe, *override)
        assert answer.code == 5
        assert (
            "The recipe reads messages; a bad record of chat.jsonl has the fields id, conversations."
            in answer.err
        )
        assert f"{tmp_path / 'out/chat/train/quarantine'}" in answer.err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            {"text": "text"},
            "The recipe reads text; a bad record of it.csv has the fields 1, hello.",
        ),
        ({"messages": "1"}, "not one sample came of its source"),
        ({"conversations": "1", "tags": {"role_tag": "role"}}, "not one sample came of its source"),
    ],
)
def test_rows_that_are_no_json_are_no_reason_to_fail(
    tmp_path: Path, tokenizer_folder: Path, source: dict[str, Any], said: str
) -> None:
    (tmp_path / "it.csv").write_text(
        '1,hello\n"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""who"", ""content"": ""a""}]",b\n'
    )
    kind = "pretraining" if "text" in source else "finetuning"
    streams = {"rows": {"kind": kind, "source": {"path": "it.csv", **source}}}
    answer = mdsmix("convert", write_recipe(tmp_path, tokenizer_folder, streams=streams))
    assert answer.code == 5, answer.err
    assert said in answer.err


def test_what_the_chat_template_refuses_is_told_in_its_words(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    config = tmp_path / "tokenizer/tokenizer_config.json"
    shutil.copytree(tokenizer_folder, config.parent)
    template = "{{ raise_exception('IDs have \\x1b[31m nine letters!') }}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": said}])
    streams = {"chat": chats("chat.jsonl")}
    answer = mdsmix("convert", write_recipe(tmp_path, config.parent, streams=streams))
    assert answer.code == 5
    words = r'template_error is by the chat template: "IDs have \x1b[31m nine letters!".'
    assert words in answer.err


def test_a_run_that_is_refused_shows_its_own_bad_records_alone(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    streams = {"docs": documents("docs.jsonl", layout="document")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    for wrong in ("body", "content"):
        write_jsonl(tmp_path / "docs.jsonl", [{wrong: "a"}])
        answer = mdsmix("convert", recipe)
        assert answer.code == 5
        assert f"a bad record of docs.jsonl has the fields {wrong}." in answer.err
        assert len(quarantined(tmp_path / "out/docs/train")) == 1
