"""A conversion from and to a MinIO on this machine, beside the same one on the disk; and the
requests that a unit makes.

    python -m benchmarks.store [--megabytes N] [--rounds N]

The server takes processor time of the same cores, which the disk does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import boto3
import orjson

from benchmarks import corpus
from benchmarks.contenders import HERE, Place, write_recipe
from benchmarks.figures import Figure
from benchmarks.measure import measure
from benchmarks.rounds import MB, environment
from tests.counting import count_requests
from tests.faults import make_failing_proxy
from tests.minio import Server, start_own_minio

BUCKET = "bench"


def store_figures(place: Place, size: int, rounds: int) -> Iterator[Figure]:
    """What a store costs beside the disk, and requests a unit."""
    source = corpus.source(place.work, "words", size)
    with (
        tempfile.TemporaryDirectory(dir=place.work) as folder,
        start_own_minio(Path(folder)) as server,
    ):
        client = boto3.client("s3", **_keys(server))
        client.create_bucket(Bucket=BUCKET)
        client.upload_file(str(source / "0.jsonl"), BUCKET, f"{source.name}/0.jsonl")
        walls = [_both(place, source, server) for _ in range(rounds)]
        times = median(remote / local for local, remote in walls)
        what = f"{size / MB:,.0f} MB from and to MinIO on the same cores: seconds over those on the disk"
        yield Figure(what, times, "x", 1.25)
        yield Figure("requests to MinIO for each unit", _requests(place, source, server), "", 25)


def _both(place: Place, source: Path, server: Server) -> tuple[float, float]:
    """Seconds on the disk, and at the store."""
    out = place.work / "out"
    shutil.rmtree(out, ignore_errors=True)
    local: list[str | Path] = [place.mdsmix, "convert", write_recipe(place, {"words": source}, out)]
    before = measure(local, environment(place), place.work / "log").wall
    _empty(server)
    return before, measure(
        _remote(place, source), _told(place, server.settings), place.work / "log"
    ).wall


def _remote(place: Place, source: Path) -> list[str | Path]:
    there = {"words": f"s3://{BUCKET}/{source.name}"}
    recipe = write_recipe(place, there, place.work / "remote")
    return [place.mdsmix, "convert", recipe, f"remote=s3://{BUCKET}/mix"]


def _requests(place: Place, source: Path, server: Server) -> float:
    _empty(server)
    with (
        make_failing_proxy(server.settings["S3_ENDPOINT_URL"]) as proxy,
        count_requests(proxy) as found,
    ):
        settings = server.settings | {"S3_ENDPOINT_URL": proxy.endpoint}
        log = place.work / "log"
        measure([*_remote(place, source), "--json"], _told(place, settings), log)
    state = orjson.loads(log.read_bytes())["rows"][0]["state"]
    return found.total / int(state.split()[0])


def _told(place: Place, settings: dict[str, str]) -> dict[str, str]:
    return environment(place) | settings


def _empty(server: Server) -> None:
    bucket = boto3.resource("s3", **_keys(server)).Bucket(BUCKET)
    bucket.objects.filter(Prefix="mix/").delete()


def _keys(server: Server) -> dict[str, str]:
    given = server.settings
    return {
        "endpoint_url": given["S3_ENDPOINT_URL"],
        "aws_access_key_id": given["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": given["AWS_SECRET_ACCESS_KEY"],
        "region_name": given["AWS_DEFAULT_REGION"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench")
    given = parser.parse_args()
    place = Place(work=given.work, foundry=Path(os.devnull), others=Path(os.devnull))
    corpus.tokenizer(place.work)
    for figure in store_figures(place, given.megabytes * MB, given.rounds):
        print(f"{figure.what}: {figure.value:.2f} {figure.unit} (<= {figure.most})")


if __name__ == "__main__":
    main()
