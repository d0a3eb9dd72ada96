"""Converting to and from a real MinIO: the same bytes as on a disk, and every refusal in one sentence without a key."""

from __future__ import annotations

import gzip
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


def refused(*arguments: object, words: list[str], code: int = 4) -> None:
    answer = mdsmix(*arguments)
    assert answer.code == code
    assert answer.out == ""
    (line,) = answer.err.splitlines()
    assert line.startswith("error: ")
    assert all(word in f"{line}\n" for word in words), line
    assert not any(secret in line for secret in SECRETS), line


def test_a_bucket_that_does_not_exist(recipe: Path, tmp_path: Path) -> None:
    missing = "s3://no-such-bucket-here"
    refused("convert", recipe, f"remote={missing}/mix", words=["no-such-bucket-here"])
    for source in (f"{missing}/a.jsonl", f"{missing}/*.jsonl"):
        source = f"streams.web.source.path={source}"
        refused("convert", recipe, source, words=["no-such-bucket-here"])
    refused("inspect", f"{missing}/mix/web", words=["no-such-bucket-here"])


def test_wrong_credentials(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-password")
    for command in ("convert", "check", "render-yaml"):
        refused(command, recipe, words=["s3://mdsmix-", "correct AWS_SECRET_ACCESS_KEY\n"])


def test_no_credentials(recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    refused("convert", recipe, words=["s3://mdsmix-", "credentials"])


def test_an_endpoint_without_scheme(
    recipe: Path, minio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = minio.removeprefix("http://")
    monkeypatch.setenv("S3_ENDPOINT_URL", bare)
    refused("convert", recipe, words=[bare, "http"])
