"""A run on a bucket is planned before and after its stream is converted into it; before, nothing is written there."""

from __future__ import annotations

from pathlib import Path

import boto3
import orjson
import pytest

from mdsmix.mix.plan.make import PlanOptions, make_plan, resolve_for_plan
from mdsmix.table import Estimate
from tests.converting import documents, lying_at, run_recipe, write_recipe


def test_what_nodes_fetch_of_a_bucket_is_what_lies_there(
    tmp_path: Path, tokenizer_folder: Path, minio: str, bucket: str
) -> None:
    lines = b"".join(orjson.dumps({"text": f"word {n} " * (n % 9 + 1)}) + b"\n" for n in range(900))
    store = boto3.client("s3", endpoint_url=minio)
    store.put_object(Bucket=bucket, Key="raw/a.jsonl", Body=lines)
    remote = f"s3://{bucket}/mix"
    recipe = write_recipe(
        tmp_path,
        tokenizer_folder,
        remote=remote,
        compression="zstd",
        streams={"a": documents(f"s3://{bucket}/raw/a.jsonl")},
    )
    asked = PlanOptions(nodes=1, gpus=1, batch=4)
    before = make_plan(resolve_for_plan([str(recipe)]), asked)
    assert list(lying_at(f"s3://{bucket}")) == ["raw/a.jsonl"]
    run_recipe(recipe)
    after = make_plan(resolve_for_plan([str(recipe)]), asked)
    stored = {name: len(data) for name, data in lying_at(f"{remote}/a/train").items()}
    fetched = sum(n for name, n in stored.items() if name.endswith((".zstd", "index.json")))
    assert after.node.run_bytes == fetched
    assert not isinstance(after.node.run_bytes, Estimate)
    assert before.node.remote_streams == after.node.remote_streams == 1
    assert before.epoch.tokens == pytest.approx(after.epoch.tokens, rel=0.1)
    assert before.node.largest_shard == pytest.approx(after.node.largest_shard, rel=0.2)
