"""`mdsmix quarantine` shows what was set aside: by reason, with the place and the record, however the stream was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdsmix.report.quarantine_report import bad_record_lines
from tests.converting import documents, mdsmix, write_recipe

LINES = [
    '{"text": "good"}',
    '{"text": 1}',
    "no json",
    '{"text": 2}',
    '{"other": "\\u001b[31mred"}',
    '{"text": "end"}',
]


def convert(folder: Path, tokenizer: Path, lines: list[str] = LINES, **settings: Any) -> Path:
    (folder / "docs.jsonl").write_text("\n".join(lines) + "\n")
    streams = {"docs": documents("docs.jsonl", layout="document")}
    mdsmix("convert", write_recipe(folder, tokenizer, streams=streams, **settings))
    return folder / "out/docs"


@pytest.mark.parametrize("publish", ["replace", "versioned"])
def test_each_reason_has_its_count_and_its_first_records(
    tmp_path: Path, tokenizer_folder: Path, publish: str
) -> None:
    target = convert(tmp_path, tokenizer_folder, publish=publish)
    for at in (target, target / "train"):
        shown = mdsmix("quarantine", at, "-n", 1)
        assert shown.code == 0
        assert shown.out == (
            f"{target / 'train'}: 4 bad records\n"
            '\nfield_not_text: 2\n  docs.jsonl, line 2, offset 17, 11 bytes\n    {"text": 1}\n'
            "\nmissing_field: 1\n  docs.jsonl, line 5, offset 49, 26 bytes\n"
            '    {"other": "\\u001b[31mred"}\n    missing: text\n'
            "\nnot_json: 1\n  docs.jsonl, line 3, offset 29, 7 bytes\n    no json\n"
        )


def test_json_holds_the_records_as_they_were_kept(tmp_path: Path, tokenizer_folder: Path) -> None:
    target = convert(tmp_path, tokenizer_folder)
    found = json.loads(mdsmix("quarantine", target, "--reason", "field_not_text", "--json").out)
    assert found["bad"] == 2
    assert [r["raw"] for r in found["reasons"]["field_not_text"]["records"]] == [LINES[1], LINES[3]]


def test_a_run_that_published_nothing_has_bad_records_too(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    target = convert(tmp_path, tokenizer_folder, max_bad="10%")
    assert not (target / "train/index.json").exists()
    assert "field_not_text: 2" in mdsmix("quarantine", target / "train").out


def test_a_stream_without_bad_records_says_so(tmp_path: Path, tokenizer_folder: Path) -> None:
    target = convert(tmp_path, tokenizer_folder, LINES[:1])
    assert mdsmix("quarantine", target).out == f"{target / 'train'}: 0 bad records\n"
    answer = mdsmix("quarantine", target, "--reason", "not_json")
    assert answer.code == 2
    assert "none, since no record is bad" in answer.err


def test_what_is_not_there_or_damaged_is_a_sentence(tmp_path: Path, tokenizer_folder: Path) -> None:
    assert mdsmix("quarantine", tmp_path / "nowhere").code == 4
    target = convert(tmp_path, tokenizer_folder)
    answer = mdsmix("quarantine", target, "--reason", "not_jsn")
    assert answer.code == 2
    assert "the reasons are field_not_text, missing_field, not_json" in answer.err
    (kept,) = (target / "train/quarantine").iterdir()
    kept.write_bytes(kept.read_bytes()[:-9])
    answer = mdsmix("quarantine", target)
    assert answer.code == 4
    assert "is damaged" in answer.err


def test_a_terminal_gets_records_folded_between_words(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = '{"other": "' + "words and 123,456,789 numbers " * 5 + '"}'
    target = convert(tmp_path, tokenizer_folder, ['{"text": "good"}', raw])
    whole = mdsmix("quarantine", target).out
    assert f"    {raw}\n" in whole, "what is no terminal gets whole lines"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    folded = mdsmix("quarantine", target).out.splitlines()
    record = [line for line in folded if line.startswith("    ")]
    assert len(record) > 2
    assert all(len(line) <= 60 for line in record)
    assert " ".join(line.strip() for line in record) == f"{raw} missing: text"


def test_a_record_that_is_no_text_is_shown_as_far_as_it_is() -> None:
    record = {"file": "a.jsonl", "length": 9, "reason": "invalid_utf8", "raw_base64": "eyJhIjogIv8ifQ=="}  # fmt: skip
    assert list(bad_record_lines(record))[1] == '{"a": "\\xff"}'
