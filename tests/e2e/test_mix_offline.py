"""The whole way through a real store: streams in a bucket become one in the bucket, as they would on a disk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import boto3
import pytest
from typer.testing import CliRunner, Result

from mdsmix.cli.main import app
from mdsmix.shards.index import read_index
from mdsmix.shards.manifest import read_manifest
from mdsmix.shards.shard_samples import read_whole
from mdsmix.storage import locate
from tests.converting import lying_at
from tests.published import CONCAT, LENGTH, TOKENIZER, publish


@pytest.fixture(autouse=True)
def _known_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdsmix.mix.resolve._tokenizer", lambda config, recipe: (TOKENIZER, None))


@pytest.fixture
def recipe(tmp_path: Path, minio: str, bucket: str) -> Path:
    """Two streams of 60 and 40 samples in the bucket, a of four shards, b compressed."""
    client = boto3.client("s3", endpoint_url=minio)
    for name, n, compression in (("a", 60, None), ("b", 40, "zstd")):
        rows = [{"tokens": [len(name), n, i, 7, 8, 9, 10, 0]} for i in range(n)]
        home = publish(tmp_path / name, CONCAT, rows, card={}, shards=4, compression=compression)
        for path in (p for p in home.rglob("*") if p.is_file()):
            client.upload_file(str(path), bucket, str(path.relative_to(tmp_path)))
    return write_recipe(tmp_path / "remote.yaml", f"s3://{bucket}", "a", "b")


def write_recipe(path: Path, place: str, *streams: str) -> Path:
    key = "remote" if "://" in place else "local"
    tree = {
        "tokenizer": {"name": "tok"},
        "max_seq_len": LENGTH,
        "streams": {name: {key: f"{place}/{name}"} for name in streams},
        "train_loader": {"name": "text"},
    }
    path.write_text(json.dumps(tree))
    return path


def mix(recipe: Path, out: object) -> Result:
    command = ["mix", str(recipe), "--out", str(out), "--seed", "3", "mix.a.repeat=1.5"]
    return CliRunner().invoke(app, command)


def test_from_a_bucket_into_it_as_from_folders_into_one(
    recipe: Path, bucket: str, tmp_path: Path
) -> None:
    out = locate(f"s3://{bucket}/mixes/all")
    result = mix(recipe, out)
    assert result.exit_code == 0, result.output
    folder = out / "train"
    found = [s for shard in read_index(folder).shards for s in read_whole(folder, shard).lengths]
    assert len(found) == 60 + 30 + 40
    card = read_manifest(folder)
    assert card is not None
    assert Counter({part.name: part.drawn for part in card.mixed}) == {"a": 90, "b": 40}

    here = mix(write_recipe(tmp_path / "local.yaml", str(tmp_path), "a", "b"), tmp_path / "all")
    assert here.exit_code == 0, here.output
    assert lying_at(folder) == lying_at(locate(tmp_path / "all" / "train"))
    assert "up to date" in mix(recipe, out).output
    again = write_recipe(tmp_path / "again.yaml", f"s3://{bucket}/mixes", "all")
    assert CliRunner().invoke(app, ["render-yaml", str(again)]).exit_code == 0
