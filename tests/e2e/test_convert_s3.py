"""Converting to and from a real MinIO: the same bytes as on a disk, and every refusal in one sentence without a key."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
import zstandard

from mdsmix.storage import locate
from tests.converting import (
    chats,
    documents,
    files,
    lying_at,
    mdsmix,
    pairs,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)

SECRETS = ("a-password-for-loopback", "not-the-password", "mdsmix-tests")


@pytest.fixture
def sources(corpus_folder: Path, bucket: str) -> str:
    """The corpus in the bucket: plain, .gz and .zst."""
    docs = (corpus_folder / "docs.jsonl").read_bytes()
    faq = (corpus_folder / "faq.jsonl").read_bytes()
    content = {
        "web.jsonl.zst": (corpus_folder / "web.jsonl.zst").read_bytes(),
        "docs.jsonl": docs,
        "faq.jsonl.gz": gzip.compress(faq, mtime=0),
        "chat.jsonl.zst": zstandard.compress((corpus_folder / "chat.jsonl").read_bytes()),
    }
    for name, data in content.items():
        locate(f"s3://{bucket}/raw/{name}").write(data)
    return f"s3://{bucket}/raw"


def test_a_bucket_gets_the_bytes_of_a_disk_whatever_the_workers(
    tmp_path: Path,
    tokenizer_folder: Path,
    bucket: str,
    sources: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows(monkeypatch, 60_000)
    streams = {
        "web": documents(f"{sources}/web.jsonl.zst"),
        "docs": documents(f"{sources}/do*.jsonl", layout="document"),
        "faq": pairs(f"{sources}/faq.jsonl.gz"),
        "chat": chats(f"{sources}/chat.jsonl.zst"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    run_recipe(recipe)
    on_disk = files(tmp_path / "out")
    for workers in (1, 3):
        remote = f"s3://{bucket}/mix-{workers}"
        run_recipe(recipe, f"remote={remote}", workers=workers)
        assert lying_at(remote) == on_disk
    before = dict(locate(remote).list(recursive=True))
    outcomes = run_recipe(recipe, f"remote={remote}")
    assert {outcome.state for outcome in outcomes} == {"up to date"}
    assert dict(locate(remote).list(recursive=True)) == before


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, bucket: str) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"a document, number {n}"} for n in range(30)])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, remote=f"s3://{bucket}/mix")


def test_what_cannot_be_reached_is_one_sentence_without_a_key(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target, a source and a stream; each way in which a store refuses is looked at in test_storage_s3.py."""
    missing = "s3://no-such-bucket-here"
    source = f"streams.web.source.path={missing}"
    for arguments in (
        ("convert", recipe, f"remote={missing}/mix"),
        ("convert", recipe, f"{source}/a.jsonl"),
        ("convert", recipe, f"{source}/*.jsonl"),
        ("inspect", f"{missing}/mix/web"),
    ):
        assert "no-such-bucket-here" in refused(*arguments)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-password")
    for command in ("convert", "check", "render-yaml"):
        assert re.search(r"s3://mdsmix-.* correct AWS_SECRET_ACCESS_KEY$", refused(command, recipe))


def refused(*arguments: object) -> str:
    answer = mdsmix(*arguments)
    assert (answer.code, answer.out) == (4, "")
    (line,) = answer.err.splitlines()
    assert line.startswith("error: ")
    assert not any(secret in line for secret in SECRETS), line
    return line
