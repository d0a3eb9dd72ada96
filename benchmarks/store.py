"""Compares a conversion from and to a MinIO on this machine with the same one on the disk, and
counts the requests of each unit.

    python -m benchmarks.store [--megabytes N] [--rounds N]

The server uses processor time of the same cores; the disk does not.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import boto3
import orjson

from benchmarks import corpus
from benchmarks.contenders import HERE, Setup, write_recipe
from benchmarks.figures import Figure
from benchmarks.measure import measure
from benchmarks.rounds import MB, environment
from tests.counting import count_requests
from tests.faults import make_failing_proxy
from tests.minio import Server, start_own_minio

BUCKET = "bench"


def store_figures(setup: Setup, size: int, rounds: int) -> Iterator[Figure]:
    """Measure the time with a store compared with the disk, and the requests per unit."""
    source = corpus.source(setup.work, "words", size)
    with (
        tempfile.TemporaryDirectory(dir=setup.work) as folder,
        start_own_minio(Path(folder)) as server,
    ):
        client = boto3.client("s3", **_keys(server))
        client.create_bucket(Bucket=BUCKET)
        client.upload_file(str(source / "0.jsonl"), BUCKET, f"{source.name}/0.jsonl")
        walls = [_measure_both(setup, source, server) for _ in range(rounds)]
        ratio = median(remote / local for local, remote in walls)
        megabytes = f"{size / MB:,.0f} MB"
        what = f"{megabytes} from and to MinIO on the same cores: seconds over those on the disk"
        yield Figure(what, ratio, "x", 1.25)
        yield Figure("requests to MinIO for each unit", _requests(setup, source, server), "", 25)


def _measure_both(setup: Setup, source: Path, server: Server) -> tuple[float, float]:
    """Return the seconds on the disk, and with the store."""
    output = setup.work / "out"
    shutil.rmtree(output, ignore_errors=True)
    local: list[str | Path] = [
        setup.mdsmix,
        "convert",
        write_recipe(setup, {"words": source}, output),
    ]
    log = setup.work / "log"
    local_seconds = measure(local, environment(setup), log).wall
    _empty(server)
    remote = _remote_command(setup, source)
    return local_seconds, measure(remote, environment(setup) | server.settings, log).wall


def _remote_command(setup: Setup, source: Path) -> list[str | Path]:
    """Return the command that converts into a new folder of the bucket. The disk's folder is new
    too, which mdsmix sees. In a store it only knows where it has converted before.
    """
    sources = {"words": f"s3://{BUCKET}/{source.name}"}
    recipe = write_recipe(setup, sources, setup.work / "remote")
    return [setup.mdsmix, "convert", recipe, f"remote=s3://{BUCKET}/mix/{secrets.token_hex(4)}"]


def _requests(setup: Setup, source: Path, server: Server) -> float:
    _empty(server)
    with (
        make_failing_proxy(server.settings["S3_ENDPOINT_URL"]) as proxy,
        count_requests(proxy) as counted,
    ):
        settings = server.settings | {"S3_ENDPOINT_URL": proxy.endpoint}
        log = setup.work / "log"
        measure([*_remote_command(setup, source), "--json"], environment(setup) | settings, log)
    state = orjson.loads(log.read_bytes())["rows"][0]["state"]
    return counted.total / int(state.split()[0])


def _empty(server: Server) -> None:
    bucket = boto3.resource("s3", **_keys(server)).Bucket(BUCKET)
    bucket.objects.filter(Prefix="mix/").delete()


def _keys(server: Server) -> dict[str, str]:
    settings = server.settings
    return {
        "endpoint_url": settings["S3_ENDPOINT_URL"],
        "aws_access_key_id": settings["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": settings["AWS_SECRET_ACCESS_KEY"],
        "region_name": settings["AWS_DEFAULT_REGION"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench")
    arguments = parser.parse_args()
    setup = Setup(work=arguments.work, foundry=Path(os.devnull), peers=Path(os.devnull))
    corpus.tokenizer(setup.work)
    for figure in store_figures(setup, arguments.megabytes * MB, arguments.rounds):
        print(f"{figure.what}: {figure.value:.2f} {figure.unit} (<= {figure.goal})")


if __name__ == "__main__":
    main()
