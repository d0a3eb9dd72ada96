"""From a real store `check` reads indexes, manifests and the head of a shard, never a dataset."""

from __future__ import annotations

from pathlib import Path

import boto3
import numpy as np
import pytest

from mdsmix.mix.checking import findings, is_refused
from mdsmix.mix.resolve import mix_of_streams
from mdsmix.shards.shard_samples import HEAD_BYTES
from mdsmix.storage.s3 import S3Path
from tests.published import publish


def test_only_the_head_of_a_shard_is_read_and_the_others_are_there(
    tmp_path: Path, minio: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = boto3.client("s3", endpoint_url=minio)
    rows = [{"tokens": np.arange(2048) % 500}] * 1200
    for path in publish(tmp_path, {"tokens": "ndarray:int32"}, rows, shards=3).rglob("*.*"):
        client.upload_file(str(path), bucket, f"web/{path.relative_to(tmp_path)}")
    read, whole = [], S3Path.read

    def counted(self: S3Path, start: int = 0, length: int | None = None) -> bytes:
        data = whole(self, start, length)
        read.append((self.name, len(data)))
        return data

    monkeypatch.setattr(S3Path, "read", counted)
    assert not is_refused(findings(mix_of_streams([f"s3://{bucket}/web"])))
    assert [name for name, _ in read] == ["shard.00000.mds"] * 2
    assert sum(size for _, size in read) < HEAD_BYTES < 1200 * 2048 * 4 / 3
    client.delete_object(Bucket=bucket, Key="web/train/shard.00002.mds")
    found = findings(mix_of_streams([f"s3://{bucket}/web"]))
    (error,) = [f for f in found if f.severity == "error"]
    assert (error.id, "shard.00002.mds" in error.message) == ("shard-missing", True)
