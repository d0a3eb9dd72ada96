"""`mdsmix quarantine` shows what was set aside: by reason, with the place and the record, however the stream was published."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.report.inspection import bad_record_lines
from tests.converting import documents, mdsmix, write_recipe

LINES = [
    '{"text": "good"}',
    '{"text": 1}',
    "no json",
    '{"text": 2)',
    '{"other": "\\u001b[31mred"}',
    '{"text": "end"}',
]


def convert(folder: Path, tokenizer: Path, lines: list[str] = LINES, **settings: Any) -> Path:
    (folder / "docs.jsonl").write_text("\n".join(lines) + "\n")
    streams = {"docs": documents("docs.jsonl", layout="document")}
    mdsmix("convert", write_recipe(folder, tokenizer, streams=streams, **settings))
    return folder / "out/docs"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return convert(tmp_path_factory.mktemp("bad"), tokenizer_folder)


def test_each_reason_has_its_count_and_its_first_records(
    target: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    versioned = convert(tmp_path, tokenizer_folder, publish="versioned")
    for at in (target, target / "train", versioned, versioned / "train"):
        shown = mdsmix("quarantine", at, "-n", 1)
        assert shown.code == 0
        assert shown.out == (
            f"{at if at.name == 'train' else at / 'train'}: 4 bad records\n"
            "\nnot_json: 2\n  docs.jsonl, line 3, offset 29, 7 bytes\n    no json\n"
            '\nfield_not_text: 1\n  docs.jsonl, line 2, offset 17, 11 bytes\n    {"text": 1}\n'
            "\nmissing_field: 1\n  docs.jsonl, line 5, offset 49, 26 bytes\n"
            '    {"other": "\\u001b[31mred"}\n    missing: text\n'
        )


def test_json_holds_the_records_as_they_were_kept(target: Path) -> None:
    found = json.loads(mdsmix("quarantine", target, "--reason", "not_json", "--json").out)
    assert (found["bad"], found["others"]) == (2, {"field_not_text": 1, "missing_field": 1})
    assert [r["raw"] for r in found["reasons"]["not_json"]["records"]] == [LINES[2], LINES[3]]
    record = {"file": "a.jsonl", "length": 9, "raw_base64": "eyJhIjogIv8ifQ=="}
    assert list(bad_record_lines(record))[1] == '{"a": "\\xff"}', "of no text what is text"


def test_a_run_that_published_nothing_has_bad_records_a_good_one_none_and_a_sentence_tells_the_rest(
    target: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    bad = convert(tmp_path, tokenizer_folder, max_bad="10%") / "train"
    assert not (bad / "index.json").exists()
    assert "not_json: 2" in mdsmix("quarantine", bad).out
    (tmp_path / "good").mkdir()
    good = convert(tmp_path / "good", tokenizer_folder, LINES[:1]) / "train"
    others = "; of other reasons: not_json: 2, field_not_text: 1, missing_field: 1"
    copied = shutil.copytree(target, tmp_path / "docs")
    (kept,) = (copied / "train/quarantine").iterdir()
    kept.write_bytes(kept.read_bytes()[:-9])
    for arguments, code, said in (
        ([good], 0, f"{good}: 0 bad records\n"),
        ([bad, "--reason", "no_json"], 0, f"{bad}: 0 bad records{others}\n"),
        ([tmp_path / "nowhere"], 4, "no published stream"),
        ([copied], 4, "is damaged"),
    ):
        answer = mdsmix("quarantine", *arguments)
        assert (answer.code, said in answer.out + answer.err) == (code, True), answer.err


def test_a_terminal_gets_records_folded_between_words(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = '{"other": "' + "words and 123,456,789 numbers " * 5 + '"}'
    target = convert(tmp_path, tokenizer_folder, ['{"text": "good"}', raw])
    assert f"    {raw}\n" in mdsmix("quarantine", target).out, "whole lines where it is none"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    folded = mdsmix("quarantine", target).out.splitlines()
    record = [line for line in folded if line.startswith("    ")]
    assert len(record) > 2
    assert all(len(line) <= 60 for line in record)
    assert " ".join(line.strip() for line in record) == f"{raw} missing: text"
