"""`mdsmix doctor` at a real store that refuses one thing at a time."""

import json
from pathlib import Path

import pytest

from mdsmix import doctor
from mdsmix.storage import s3_conditions
from tests.converting import documents, lying_at, mdsmix, write_jsonl, write_recipe
from tests.faults import IGNORES, Proxy, Rule


@pytest.fixture
def recipe(bucket: str, tmp_path: Path, tokenizer_folder: Path) -> Path:
    streams = {"web": documents(write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}]))}
    remote = f"s3://{bucket}/mix"
    return write_recipe(tmp_path, tokenizer_folder, remote=remote, local=None, streams=streams)


def said(recipe: Path) -> tuple[int, list[str]]:
    answer = mdsmix("doctor", recipe, "--json")
    found = json.loads(answer.out)["diagnoses"]
    return answer.code, [f"{d['state']} {d['what']}: {d['said']}" for d in found]


def test_rights_clock_and_conditions_are_looked_at_one_by_one(
    recipe: Path, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = said(recipe)
    assert code == 0
    assert any("credentials from env" in line for line in found)
    assert any(line.startswith("ok target") for line in found)
    assert any(line.startswith("ok clock") for line in found)
    assert lying_at(f"s3://{bucket}") == {}
    for operation, right in (
        ("GET list", "s3:ListBucket"),
        ("PUT", "s3:PutObject"),
        ("GET", "s3:GetObject"),
        ("DELETE", "s3:DeleteObject"),
    ):
        proxy.rules = [Rule("403 AccessDenied", operation, times=100)]
        code, found = said(recipe)
        refused = [line for line in found if line.startswith("problem")]
        assert (code, any(f"({right})" in line for line in refused)) == (4, True), found
        assert all("may not" in line for line in refused)
    proxy.rules = [Rule(IGNORES, "PUT", times=100)]
    monkeypatch.setattr(s3_conditions, "_kept", {})
    monkeypatch.setattr(doctor, "MOST_SKEW", -1)
    code, found = said(recipe)
    assert code == 0
    assert any(line.startswith("warning target") and "If-None-Match" in line for line in found)
    assert any(line.startswith("warning clock") for line in found)


def test_wrong_keys_and_a_missing_bucket(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = mdsmix("doctor", recipe, "remote=s3://no-such-bucket-here/mix")
    assert (answer.code, "the bucket does not exist" in answer.out) == (4, True)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    answer = mdsmix("doctor", recipe)
    assert (answer.code, answer.out.count("the secret key is wrong")) == (4, 1)
