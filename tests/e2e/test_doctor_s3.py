"""`mdsmix doctor` at a real store that refuses one thing at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mdsmix import doctor
from tests.converting import documents, lying_at, mdsmix, write_jsonl, write_recipe
from tests.faults import IGNORES, Proxy, Rule


@pytest.fixture
def recipe(bucket: str, tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(
        tmp_path, tokenizer_folder, remote=f"s3://{bucket}/mix", local=None, streams=streams
    )


def said(recipe: Path) -> tuple[int, list[str]]:
    answer = mdsmix("doctor", recipe, "--json")
    found = json.loads(answer.out)["diagnoses"]
    return answer.code, [f"{d['state']} {d['what']}: {d['said']}" for d in found]


def test_rights_clock_and_conditions_of_a_store_that_is_well(recipe: Path, bucket: str) -> None:
    code, found = said(recipe)
    assert code == 0
    assert any("credentials from env" in line for line in found)
    assert any(line.startswith("ok target") for line in found)
    assert any(line.startswith("ok clock") for line in found)
    assert lying_at(f"s3://{bucket}") == {}


@pytest.mark.parametrize(
    ("operation", "right"),
    [
        ("GET list", "s3:ListBucket"),
        ("PUT", "s3:PutObject"),
        ("GET", "s3:GetObject"),
        ("DELETE", "s3:DeleteObject"),
    ],
)
def test_a_right_that_is_missing_is_named(
    recipe: Path, proxy: Proxy, operation: str, right: str
) -> None:
    proxy.rules = [Rule("403 AccessDenied", operation, times=100)]
    code, found = said(recipe)
    assert code == 4
    refused = [line for line in found if line.startswith("problem")]
    assert any(f"({right})" in line for line in refused)
    assert all("may not" in line for line in refused)


def test_a_store_that_keeps_no_conditions_is_warned_of(recipe: Path, proxy: Proxy) -> None:
    proxy.rules = [Rule(IGNORES, "PUT", times=100)]
    code, found = said(recipe)
    assert code == 0
    assert any(line.startswith("warning target") and "If-None-Match" in line for line in found)


def test_wrong_keys_and_a_missing_bucket(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = mdsmix("doctor", recipe, "remote=s3://no-such-bucket-here/mix")
    assert answer.code == 4
    assert "the bucket does not exist" in answer.out
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    answer = mdsmix("doctor", recipe)
    assert answer.code == 4
    assert answer.out.count("the secret key is wrong") == 1


def test_a_clock_that_is_off(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MOST_SKEW", -1)
    code, found = said(recipe)
    assert code == 0
    assert any(line.startswith("warning clock") for line in found)
