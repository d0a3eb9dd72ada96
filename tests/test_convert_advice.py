"""Where most records are bad, the sentence says what to do about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.converting import chats, documents, mdsmix, quarantined, write_jsonl, write_recipe

LINES = [json.dumps({"text": f"document {n}"}) for n in range(20)]
ARRAY = ("begins with [, so it is one JSON array", "name it .json, or say source.format: json")
TABLE = '1,hello\n"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""who"", ""content"": ""a""}]",b\n'


@pytest.mark.parametrize(
    ("content", "strict", "code", "said", "reasons"),
    [
        (f"[{', '.join(LINES)}]", True, 5, ARRAY, None),
        (f"[{', '.join(LINES)}]", False, 5, ARRAY, None),
        # The last object of an array that has one a line ends in no comma: with max_bad: 100% it alone is published.
        ("[\n" + ",\n".join(LINES) + "\n]\n", False, 0, ARRAY, None),
        (json.dumps([*map(json.loads, LINES)], indent=2), True, 5, ARRAY, None),
        ("\n".join([*LINES, "[]", "[1, 2]", '["text"]']), False, 0, (), ["not_an_object"] * 3),
        ("\n".join([*LINES, '["text"', "[1, 2"]), False, 0, (), ["not_json"] * 2),
    ],
)
def test_a_file_that_is_one_array_is_named_as_that_and_no_other_is(
    tmp_path: Path,
    tokenizer_folder: Path,
    content: str,
    strict: bool,
    code: int,
    said: tuple[str, ...],
    reasons: list[str] | None,
) -> None:
    (tmp_path / "docs.jsonl").write_text(content)
    streams = {"docs": documents("docs.jsonl", layout="document")}
    settings = {"streams": streams, "max_bad": None if strict else "100%"}
    answer = mdsmix("convert", write_recipe(tmp_path, tokenizer_folder, **settings))
    assert answer.code == code
    assert all(words in answer.out + answer.err for words in said)
    assert said or "JSON array" not in answer.out
    found = [record["reason"] for record in quarantined(tmp_path / "out/docs/train")]
    assert "json_array" in found if reasons is None else found == reasons


def test_fields_that_are_not_there_are_shown_beside_those_that_are(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """And a run that is refused shows its own bad records alone."""
    streams = {"chat": chats("chat.jsonl")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_bad=None)
    for name in ("conversations", "talk"):
        write_jsonl(tmp_path / "chat.jsonl", [{"id": 1, name: []}] * 3)
        for override in ((), ("max_bad=1.0",)):
            answer = mdsmix("convert", recipe, *override)
            assert answer.code == 5
            fields = f"a bad record of chat.jsonl has the fields id, {name}."
            assert f"The recipe reads messages; {fields}" in answer.err
            assert f"{tmp_path / 'out/chat/train/quarantine'}" in answer.err
            assert len(quarantined(tmp_path / "out/chat/train")) == 3


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
    (tmp_path / "it.csv").write_text(TABLE)
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
