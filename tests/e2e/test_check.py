"""From a real store `check` reads indexes, manifests and the head of a shard, never a dataset."""

from __future__ import annotations

from pathlib import Path

import boto3
import numpy as np
import pytest

from mdsmix.errors import Unreachable
from mdsmix.mix.checking import findings, is_refused
from mdsmix.mix.resolve import mix_of_streams
from mdsmix.shards.shard_samples import HEAD_BYTES
from mdsmix.storage.s3 import S3Path
from tests.published import publish

ROW = {"tokens": np.arange(2048) % 500}
COLUMNS = {"tokens": "ndarray:int32"}


def upload(folder: Path, minio: str, bucket: str) -> str:
    client = boto3.client("s3", endpoint_url=minio)
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), bucket, f"web/{path.relative_to(folder)}")
    return f"s3://{bucket}/web"


def test_only_the_head_of_a_shard_is_read(
    tmp_path: Path, minio: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(publish(tmp_path, COLUMNS, [ROW] * 1200, shards=3), minio, bucket)
    read, whole = [], S3Path.read

    def counted(self: S3Path, start: int = 0, length: int | None = None) -> bytes:
        data = whole(self, start, length)
        read.append((self.name, len(data)))
        return data

    monkeypatch.setattr(S3Path, "read", counted)
    found = findings(mix_of_streams([url]))
    assert not is_refused(found)
    assert [name for name, _ in read] == ["shard.00000.mds"] * 2
    assert sum(size for _, size in read) < HEAD_BYTES < 1200 * 2048 * 4 / 3


def test_a_shard_that_is_gone_from_the_bucket_is_found(
    tmp_path: Path, minio: str, bucket: str
) -> None:
    url = upload(publish(tmp_path, COLUMNS, [ROW] * 6, shards=3), minio, bucket)
    boto3.client("s3", endpoint_url=minio).delete_object(
        Bucket=bucket, Key="web/train/shard.00002.mds"
    )
    errors = [f for f in findings(mix_of_streams([url])) if f.severity == "error"]
    assert [f.id for f in errors] == ["shard-missing"]
    assert "shard.00002.mds" in errors[0].message


def test_a_bucket_that_does_not_exist_is_not_a_verdict(minio: str) -> None:
    with pytest.raises(Unreachable, match="bucket"):
        mix_of_streams(["s3://no-such-bucket-of-ours/web"])
