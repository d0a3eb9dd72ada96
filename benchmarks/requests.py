"""Counts the requests that whole commands make to a real MinIO, with a proxy between them.

    python -m benchmarks.requests [--most N] [NAME ...]

Unlike seconds, requests are the same on every machine. `goal` is the number that a case of full
size may make; if a command makes more, the exit code is 1. The sources are on the disk, so only
requests to the target count.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import boto3
import orjson
import pytest

from benchmarks.finished import finish_units
from mdsmix.mix.check import run_checks
from mdsmix.mix.streams.resolve import resolve_mix
from mdsmix.storage import locate
from tests.converting import documents, run_recipe, set_window_size, write_jsonl, write_recipe
from tests.corpus import train_tokenizer
from tests.counting import RequestCount, count_requests
from tests.faults import Proxy, make_failing_proxy
from tests.minio import start_own_minio


@dataclass(frozen=True)
class Bench:
    """The folder and the bucket of one case; the bucket is reached through the proxy."""

    folder: Path
    tokenizer: Path
    proxy: Proxy
    bucket: str

    def recipe(self, streams: dict[str, Any], **settings: Any) -> Path:
        remote = f"s3://{self.bucket}/mix"
        return write_recipe(self.folder, self.tokenizer, remote=remote, streams=streams, **settings)

    def streams(self, count: int) -> dict[str, Any]:
        """Return streams of one unit each."""
        return {f"s{n}": documents(self._file(f"s{n}", [n])) for n in range(count)}

    def units(self, count: int) -> dict[str, Any]:
        """Return a stream of `count` units, with one shard each."""
        return {"web": documents(self._file("web", range(count)), layout="document")}

    def _file(self, name: str, numbers: Any) -> Path:
        path = self.folder / f"{name}.jsonl"
        return write_jsonl(path, [{"text": f"Document {n:08} of many. " * 8} for n in numbers])


LINE = len(b'{"text":""}\n') + 8 * len("Document 00000000 of many. ")
"Bytes of a document. With windows of this size each document is a unit."


def check(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.streams(n))
    run_recipe(recipe)
    with count_requests(bench.proxy) as counted:
        run_checks(resolve_mix([str(recipe)]))
    return counted


def check_versioned(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.streams(n), publish="versioned")
    run_recipe(recipe)
    with count_requests(bench.proxy) as counted:
        run_checks(resolve_mix([str(recipe)]))
    return counted


def second_convert(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.streams(n))
    run_recipe(recipe)
    with count_requests(bench.proxy) as counted:
        run_recipe(recipe)
    return counted


def first_convert(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.streams(n))
    with count_requests(bench.proxy) as counted:
        run_recipe(recipe)
    return counted


def many_shards(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.units(n))
    with count_requests(bench.proxy) as counted:
        run_recipe(recipe, workers=2)
    return counted


def one_more(bench: Bench, n: int, **settings: Any) -> RequestCount:
    recipe = bench.recipe(bench.units(n), **settings)
    run_recipe(recipe, workers=2)
    recipe = bench.recipe(bench.units(n + 1), **settings)
    with count_requests(bench.proxy) as counted:
        run_recipe(recipe)
    return counted


def one_more_version(bench: Bench, n: int) -> RequestCount:
    return one_more(bench, n, publish="versioned")


def one_new_file(bench: Bench, n: int) -> RequestCount:
    """Convert a new file of one unit, after units that are finished, published and known on this
    machine.
    """
    (like,) = run_recipe(bench.recipe({"like": bench.units(1)["web"]}))
    streams = bench.units(n)
    finish_units(bench.recipe(streams), locate(like.target))
    new = bench._file("new", [n])
    path = streams["web"]["source"]["path"]
    recipe = bench.recipe({"web": documents([path, str(new)], layout="document")})
    with count_requests(bench.proxy) as counted:
        (outcome,) = run_recipe(recipe)
    assert (outcome.units, outcome.reused) == (n + 1, n)
    return counted


def fresh_machine(bench: Bench, n: int, **options: Any) -> RequestCount:
    """Check on another machine that a converted stream is up to date. Its sources, a unit each, are
    in the bucket too.
    """
    for number in range(n):
        record = {"text": f"Document {number:08} of many. " * 8}
        location = locate(f"s3://{bench.bucket}/raw/{number:06}.jsonl")
        location.write(orjson.dumps(record) + b"\n")
    recipe = bench.recipe({"web": documents(f"s3://{bench.bucket}/raw/*.jsonl")})
    run_recipe(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDSMIX_CACHE", str(bench.folder / "another machine"))
        with count_requests(bench.proxy) as counted:
            (outcome,) = run_recipe(recipe, **options)
    assert not outcome.done
    return counted


def verified_source(bench: Bench, n: int) -> RequestCount:
    counted = fresh_machine(bench, n, verify_source=True)
    assert counted.for_key(".jsonl")["GET"] == n
    return counted


def missing(bench: Bench, n: int) -> RequestCount:
    locations = [locate(f"s3://{bench.bucket}/none/{number}") for number in range(n)]
    with count_requests(bench.proxy) as counted:
        assert not any(each.stat() or each.fetch() for each in locations)
    return counted


@dataclass(frozen=True)
class Case:
    """A command, the number of its streams or units, and its goal."""

    title: str
    run: Callable[[Bench, int], RequestCount]
    n: int
    before: int
    "Requests before they were first counted and reduced."
    goal: int
    seconds: float = inf
    "The longest time that the command may take; printed only if there is such a goal."


CASES = [
    Case("check of {} streams", check, 100, 1000, 310),
    Case("check of {} versioned streams", check_versioned, 4, 68, 17),
    Case("second convert of {} streams", second_convert, 100, 1300, 410),
    Case("first convert of {} streams", first_convert, 4, 152, 80),
    Case("convert of {} units of one shard each", many_shards, 1001, 8074, 4070),
    Case("convert of {} known units and a new one", one_more, 1000, 3069, 2075),
    Case("convert of {} known units and a new one, versioned", one_more_version, 1000, 5089, 3096),
    Case("convert of {} finished units and one new file", one_new_file, 500, 1513, 50),
    Case(
        "convert of {} finished units and one new file",
        one_new_file,
        10_000,
        20_069,
        115,
        seconds=15,
    ),
    Case(
        "convert on a machine that has never seen the {} objects of a source",
        fresh_machine,
        200,
        225,
        10,
    ),
    Case("the same with --verify-source", verified_source, 200, 225, 250),
    Case("stat and fetch of {} missing objects", missing, 10, 40, 20),
]


def main() -> None:
    arguments = _arguments()
    chosen = [c for c in CASES if not arguments.names or c.run.__name__ in arguments.names]
    failed = False
    with tempfile.TemporaryDirectory() as work, _surroundings(Path(work)) as (tokenizer, proxy):
        for number, case in enumerate(chosen):
            n = min(case.n, arguments.most or case.n)
            bench = Bench(Path(work) / str(number), tokenizer, proxy, f"bench-{number}")
            bench.folder.mkdir()
            boto3.client("s3", endpoint_url=proxy.endpoint).create_bucket(Bucket=bench.bucket)
            began = time.monotonic()
            counted = case.run(bench, n)
            goal = case.goal if n == case.n else None
            failed |= bool(goal and (counted.total > goal or counted.seconds > case.seconds))
            duration = ""
            if case.seconds < inf:
                duration = (
                    f"in {counted.seconds:.1f} s ({counted.processor:.1f} of the processor), "
                    f"goal {case.seconds}, "
                )
            print(
                f"{case.title.format(n)}: {counted}; {case.before} before, goal {goal}, {duration}"
                f"{time.monotonic() - began:.0f} s with preparation",
                flush=True,
            )
    sys.exit(failed)


@contextmanager
def _surroundings(work: Path) -> Iterator[tuple[Path, Proxy]]:
    """Yield a tokenizer, and a proxy in front of a MinIO that the environment names."""
    with pytest.MonkeyPatch.context() as patch, start_own_minio(work) as server:
        patch.setenv("MDSMIX_CACHE", str(work / "cache"))
        for name, value in server.settings.items():
            patch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        set_window_size(patch, LINE)
        with make_failing_proxy(os.environ["S3_ENDPOINT_URL"]) as proxy:
            patch.setenv("S3_ENDPOINT_URL", proxy.endpoint)
            yield train_tokenizer(work / "tokenizer", documents_n=30), proxy


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.requests", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases, by the names of their functions")
    parser.add_argument("--most", type=int, help="streams or units of a case, at most")
    return parser.parse_args()


if __name__ == "__main__":
    main()
