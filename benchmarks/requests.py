"""What mdsmix asks of a store: the requests of whole commands at a real MinIO, counted by a proxy
before it.

    python -m benchmarks.requests [--most N] [NAME ...]

Requests, unlike seconds, are the same on every machine. `goal` is what issue-sized streams may
cost; a command that asks for more ends with exit code 1. The sources lie on the disk, so that only
what is asked of the target counts.
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
    """Where a case works: a folder and a bucket of its own, behind the proxy."""

    folder: Path
    tokenizer: Path
    proxy: Proxy
    bucket: str

    def recipe(self, streams: dict[str, Any], **settings: Any) -> Path:
        remote = f"s3://{self.bucket}/mix"
        return write_recipe(self.folder, self.tokenizer, remote=remote, streams=streams, **settings)

    def streams(self, count: int) -> dict[str, Any]:
        """Streams of one unit each."""
        return {f"s{n}": documents(self._file(f"s{n}", [n])) for n in range(count)}

    def units(self, count: int) -> dict[str, Any]:
        """A stream of so many units, a shard each."""
        return {"web": documents(self._file("web", range(count)), layout="document")}

    def _file(self, name: str, numbers: Any) -> Path:
        path = self.folder / f"{name}.jsonl"
        return write_jsonl(path, [{"text": f"Document {n:08} of many. " * 8} for n in numbers])


LINE = len(b'{"text":""}\n') + 8 * len("Document 00000000 of many. ")
"Bytes of a document: windows of so many make each a unit."


def check(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.streams(n))
    run_recipe(recipe)
    with count_requests(bench.proxy) as found:
        run_checks(resolve_mix([str(recipe)]))
    return found


def check_versioned(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.streams(n), publish="versioned")
    run_recipe(recipe)
    with count_requests(bench.proxy) as found:
        run_checks(resolve_mix([str(recipe)]))
    return found


def second_convert(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.streams(n))
    run_recipe(recipe)
    with count_requests(bench.proxy) as found:
        run_recipe(recipe)
    return found


def first_convert(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.streams(n))
    with count_requests(bench.proxy) as found:
        run_recipe(recipe)
    return found


def many_shards(bench: Bench, n: int) -> RequestCount:
    recipe = bench.recipe(bench.units(n))
    with count_requests(bench.proxy) as found:
        run_recipe(recipe, workers=2)
    return found


def one_more(bench: Bench, n: int, **settings: Any) -> RequestCount:
    recipe = bench.recipe(bench.units(n), **settings)
    run_recipe(recipe, workers=2)
    recipe = bench.recipe(bench.units(n + 1), **settings)
    with count_requests(bench.proxy) as found:
        run_recipe(recipe)
    return found


def one_more_version(bench: Bench, n: int) -> RequestCount:
    return one_more(bench, n, publish="versioned")


def one_new_file(bench: Bench, n: int) -> RequestCount:
    """Beside units that are finished, published and known on this machine, a file of one
    unit more.
    """
    (like,) = run_recipe(bench.recipe({"like": bench.units(1)["web"]}))
    streams = bench.units(n)
    finish_units(bench.recipe(streams), locate(like.target))
    new = bench._file("new", [n])
    path = streams["web"]["source"]["path"]
    recipe = bench.recipe({"web": documents([path, str(new)], layout="document")})
    with count_requests(bench.proxy) as found:
        (outcome,) = run_recipe(recipe)
    assert (outcome.units, outcome.reused) == (n + 1, n)
    return found


def fresh_machine(bench: Bench, n: int, **options: Any) -> RequestCount:
    """What was converted elsewhere is up to date: sources that lie in the bucket too, a
    unit each.
    """
    for number in range(n):
        record = {"text": f"Document {number:08} of many. " * 8}
        at = locate(f"s3://{bench.bucket}/raw/{number:06}.jsonl")
        at.write(orjson.dumps(record) + b"\n")
    recipe = bench.recipe({"web": documents(f"s3://{bench.bucket}/raw/*.jsonl")})
    run_recipe(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDSMIX_CACHE", str(bench.folder / "another machine"))
        with count_requests(bench.proxy) as found:
            (outcome,) = run_recipe(recipe, **options)
    assert not outcome.done
    return found


def verified_source(bench: Bench, n: int) -> RequestCount:
    found = fresh_machine(bench, n, verify_source=True)
    assert found.for_key(".jsonl")["GET"] == n
    return found


def missing(bench: Bench, n: int) -> RequestCount:
    places = [locate(f"s3://{bench.bucket}/none/{number}") for number in range(n)]
    with count_requests(bench.proxy) as found:
        assert not any(place.stat() or place.fetch() for place in places)
    return found


@dataclass(frozen=True)
class Case:
    """A command, how often it is multiplied, and what it may cost."""

    what: str
    run: Callable[[Bench, int], RequestCount]
    n: int
    before: int
    "Requests before anybody counted them."
    goal: int
    seconds: float = inf
    "How long the command may take, which is told where there is such a goal."


CASES = [
    Case("check of {} streams", check, 100, 1000, 310),
    Case("check of {} versioned streams", check_versioned, 4, 68, 17),
    Case("second convert of {} streams", second_convert, 100, 1300, 410),
    Case("first convert of {} streams", first_convert, 4, 152, 80),
    Case("convert of {} units of a shard", many_shards, 1001, 8074, 4070),
    Case("{} known units and one new", one_more, 1000, 3069, 2075),
    Case("{} known units and one new, versioned", one_more_version, 1000, 5089, 3096),
    Case("{} finished units and one new file", one_new_file, 500, 1513, 50),
    Case("{} finished units and one new file", one_new_file, 10_000, 20_069, 115, seconds=15),
    Case("a machine that never saw the {} objects of a source", fresh_machine, 200, 225, 10),
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
            found = case.run(bench, n)
            goal = case.goal if n == case.n else None
            failed |= bool(goal and (found.total > goal or found.seconds > case.seconds))
            took = f"in {found.seconds:.1f} s ({found.processor:.1f} of the processor), goal {case.seconds}, "
            took *= case.seconds < inf
            print(
                f"{case.what.format(n)}: {found}; {case.before} before, goal {goal}, {took}"
                f"{time.monotonic() - began:.0f} s with what came before",
                flush=True,
            )
    sys.exit(failed)


@contextmanager
def _surroundings(work: Path) -> Iterator[tuple[Path, Proxy]]:
    """A tokenizer, and a proxy before a MinIO that the environment names."""
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
