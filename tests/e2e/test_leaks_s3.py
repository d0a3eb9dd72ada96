"""`mdsmix leaks` where what is trained and what is evaluated lie in a bucket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3
import numpy as np

from tests.converting import documents, mdsmix, run_recipe, windows, write_jsonl, write_recipe
from tests.counting import counted
from tests.faults import Proxy


def text(number: int) -> str:
    draw = np.random.default_rng(number)
    return " ".join(f"w{n}" for n in draw.integers(0, 1000, 40).tolist())


def test_leaks_of_a_bucket_are_those_of_a_folder_and_each_shard_is_fetched_once(
    bucket: str, proxy: Proxy, tmp_path: Path, tokenizer_folder: Path, monkeypatch: Any
) -> None:
    windows(monkeypatch, 600)
    web = [{"text": text(n)} for n in range(12)]
    quiz = [{"id": f"q{n}", "text": text(n)} for n in (3, 11, 50)]
    settings = {"layout": "document"}
    quizzed = documents(write_jsonl(tmp_path / "quiz.jsonl", quiz), split="eval", **settings)
    quizzed["source"]["id"] = "id"
    streams = {"web": documents(write_jsonl(tmp_path / "web.jsonl", web), **settings), "quiz": quizzed}  # fmt: skip
    said = []
    for place in ({"local": str(tmp_path / "out")}, {"remote": f"s3://{bucket}/mix"}):
        recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=512, compression="zstd", **place)  # fmt: skip
        run_recipe(recipe)
        with counted(proxy) as asked:
            answer = mdsmix("leaks", recipe, "--json", "-n", 0)
        assert answer.code == 0, answer.err
        said.append({**json.loads(answer.out), "evaluations": [], "streams": []})
    assert said[0] == said[1]
    found = [(leak["sample"], leak["places"][0]["sample"]) for leak in said[1]["leaks"]]
    assert sorted(found) == [(0, 3), (1, 11)]
    shards = [request.key for request in asked.requests if request.key.endswith(".mds.zstd")]
    assert len(shards) == len(set(shards)) == 5
    told = mdsmix("leaks", f"s3://{bucket}/mix/web", "--eval", f"s3://{bucket}/mix/quiz", "-n", 1)
    assert "quiz sample 1, id q11: " in told.out, "the passages, of samples that are fetched again"
    boto3.client("s3", endpoint_url=proxy.endpoint).delete_object(
        Bucket=bucket, Key=shards[-1].removeprefix(f"/{bucket}/")
    )
    answer = mdsmix("leaks", recipe)
    assert (answer.code, answer.out) == (4, "")
    assert f"s3:/{shards[-1]}" in answer.err
