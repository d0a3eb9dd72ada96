"""From a real MinIO: workers do not share a connection, and a shard that the store lost is named."""

from pathlib import Path
from typing import Any

import pytest

from mdsmix.errors import Unreachable
from mdsmix.load import MixLoader, build_loader
from tests.alarm import at_most
from tests.with_torch.load_streams import IDS, config, write_tokens

pytestmark = pytest.mark.usefixtures("_release_loaders")


@pytest.fixture
def client(minio: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=minio)


@pytest.fixture
def published(client: Any, bucket: str, tmp_path: Path) -> str:
    """A bucket that holds 24 rows in eight shards under web/train."""
    for file in write_tokens(tmp_path / "made", 24, shard_bytes=260).iterdir():
        client.upload_file(str(file), bucket, f"web/train/{file.name}")
    return bucket


def loader_of(bucket: str, local: Path, workers: int) -> MixLoader:
    stream = {"remote": f"s3://{bucket}/web", "local": str(local), "split": "train"}
    stream |= {"download_retry": 1}
    return build_loader(config({"web": stream}, "text", num_workers=workers), 2, ids=IDS)


def test_two_workers_fetch_with_a_client_each_and_a_lost_shard_is_named(
    published: str, client: Any, tmp_path: Path
) -> None:
    loader = loader_of(published, tmp_path / "cache", workers=2)
    # Over the one connection that Streaming leaves open it takes 31 s.
    assert loader.dataset.streams[0]._downloader._s3_client is None
    with at_most(20):
        batches = list(loader)
    del loader
    assert sum(len(batch["input_ids"]) for batch in batches) == 24
    client.delete_object(Bucket=published, Key="web/train/shard.00002.mds")
    named = f"shard shard.00002.mds under s3://{published}/web/train is lost"
    with at_most(30), pytest.raises(Unreachable, match=named):
        list(loader_of(published, tmp_path / "other", workers=0))
    with (
        at_most(30),
        pytest.raises(Unreachable, match=r"s3://none-[\w-]+/web/train cannot be used"),
    ):
        loader_of(f"none-{published}", tmp_path / "third", workers=0)
