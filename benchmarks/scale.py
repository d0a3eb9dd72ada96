"""Costs that grow with the work, measured at sizes beyond one machine: names, units, shards. Each
case runs in its own process.

    python -m benchmarks.scale [NAME ...]

Seconds are CPU seconds, so a busy machine changes little; they do not include the answer times of
the simulated store. If a case needs more seconds or memory than its goal, the exit code is 1. No
source is converted: `finished.py` writes the files that a conversion would have left, with the same
functions. docs/many-machines.md quotes the figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import pytest
import xxhash

from benchmarks.finished import finish_units
from mdsmix import sources
from mdsmix.conversion.source_cache import KnownSources
from mdsmix.shards.index import Index, StoredFile, make_index, parse_index
from mdsmix.shards.shard_files import ShardLayout, make_shard
from mdsmix.shards.side_files import SourceEntry, SourceList, read_source_list, store_sources
from mdsmix.storage import locate, s3
from tests.converting import documents, run_recipe, set_window_size, write_jsonl, write_recipe
from tests.corpus import train_tokenizer

R = TypeVar("R")
MB = 1_000_000
PAGE = 1000
LINE = len(b'{"text":""}\n') + 8 * len("Document 00000000 of many. ")


@dataclass(frozen=True)
class Cost:
    """The result of a case, with a note on its sizes."""

    seconds: float
    note: str
    peak: int = 0


def plan_prefixes(work: Path) -> Cost:
    return _planned(50_000, patterns=1000, size=40 * MB)


def plan_names(work: Path) -> Cost:
    return _planned(1_000_000, patterns=100, size=MB)


def _planned(count: int, patterns: int, size: int) -> Cost:
    """Find and plan objects of a simulated store, and look up each unit in an empty cache."""
    per_pattern = count // patterns
    began = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        listed = _simulate_listings(patch, per_pattern, size)
        files = sources.find_files([f"s3://bucket/raw/{n}/*.jsonl" for n in range(patterns)], "/")
    units, cache = sources.plan_units(files), KnownSources.empty("nowhere")
    assert len(files) == count
    assert not any(map(cache.content, units))
    seconds = time.process_time() - began
    return Cost(seconds, f"{len(units):,} units; {len(listed):,} listings, 16 at a time")


def _simulate_listings(patch: pytest.MonkeyPatch, per_pattern: int, size: int) -> list[str]:
    """Replace listings of S3. Return the list to which each request appends its folder."""
    when = datetime(2026, 1, 1, tzinfo=timezone.utc)
    listed = list[str]()

    def page(request: dict[str, Any], client: Any) -> dict[str, Any]:
        start = int(request.get("ContinuationToken", 0))
        end = min(per_pattern, start + PAGE)
        folder = request["Prefix"].rpartition("/")[0]
        listed.append(folder)
        objects = [
            {
                "Key": f"{folder}/part-{n:07}.jsonl",
                "Size": size + n % PAGE,
                "ETag": f'"{n:032x}"',
                "LastModified": when,
            }
            for n in range(start, end)
        ]
        return {
            "Contents": objects,
            "IsTruncated": end < per_pattern,
            "NextContinuationToken": str(end),
        }

    patch.setattr(s3, "_list_page", page)
    patch.setattr(s3, "ask", lambda url, request: request(None))
    return listed


def one_file_more(work: Path, count: int = 20_000) -> Cost:
    """Convert one new file next to `count` finished units, on a disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDSMIX_CACHE", str(work / "cache"))
        set_window_size(patch, LINE)
        tokenizer = train_tokenizer(work / "tokenizer", documents_n=30)

        def recipe(*names: str) -> Path:
            stream = documents([str(work / f"{name}.jsonl") for name in names], layout="document")
            return write_recipe(work, tokenizer, streams={names[0]: stream})

        for name, numbers in (("like", [0]), ("web", range(count)), ("new", [count])):
            texts = [{"text": f"Document {n:08} of many. " * 8} for n in numbers]
            write_jsonl(work / f"{name}.jsonl", texts)
        (like,) = run_recipe(recipe("like"))
        finish_units(recipe("web"), locate(like.target))
        before = _processor()
        (outcome,) = run_recipe(recipe("web", "new"))
        assert (outcome.units, outcome.reused) == (count + 1, count)
        seconds = _processor() - before
        manifest = (locate(outcome.target) / "mdsmix.manifest").stat()
        index = (locate(outcome.target) / "index.json").stat()
        assert manifest is not None
        assert index is not None
        unit_files = [stat.size for _, stat in (locate(outcome.target) / ".mdsmix").list()]
    note = (
        f"manifest {manifest.size / MB:.1f} MB, index {index.size / MB:.1f} MB, "
        f"{len(unit_files)} unit files, {sum(unit_files) / MB:.1f} MB"
    )
    return Cost(seconds, note)


def _processor() -> float:
    """Return the CPU seconds of this process and its workers."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def _entries(count: int) -> Iterator[SourceEntry]:
    for n in range(count):
        digest = xxhash.xxh128_hexdigest(str(n))
        path = f"s3://bucket/crawl-2026-11/segment-{n // 10_000:05}/part-{n:08}.jsonl.zst"
        yield SourceEntry(path=path, size=40 * MB + n, hash=digest)


def _write_names(work: Path, count: int) -> list[SourceList]:
    return store_sources(locate(work), list(_entries(count)))


def write_names(work: Path, count: int = 10_000_000) -> Cost:
    began = time.process_time()
    parts = _write_names(work, count)
    seconds = time.process_time() - began
    size = sum(source_list.bytes for source_list in parts)
    return Cost(seconds, f"{len(parts)} parts, {size / MB:.0f} MB")


def read_names(work: Path, count: int = 10_000_000) -> Cost:
    """Read the names that another process wrote, one part at a time."""
    parts = _run_in_new_process(_write_names, work, count // 10)
    began = time.process_time()
    names = 0
    for _ in range(10):
        names += sum(len(read_source_list(locate(work), source)) for source in parts)
    assert names == count
    return Cost(time.process_time() - began, f"{len(parts) * 10} reads of a part")


def read_index(work: Path, count: int = 400_000) -> Cost:
    """Make an index of about the largest size that is accepted, and read it back."""
    layout = ShardLayout({"tokens": "ndarray:uint16"}, None)
    shards = [make_shard(layout, 11_500, _file(n), None) for n in range(count)]
    content = make_index(shards).content
    del shards
    began = time.process_time()
    index: Index = parse_index(content, "index.json")
    seconds = time.process_time() - began
    assert len(index.shards) == count
    return Cost(seconds, f"{len(content) / MB:.0f} MB")


def _file(number: int) -> StoredFile:
    digest = xxhash.xxh128_hexdigest(str(number))
    return StoredFile(basename=f"{digest}.mds", bytes=47 * MB, hashes={"xxh128": digest})


@dataclass(frozen=True)
class Case:
    """A function to measure, and its goals."""

    run: Callable[[Path], Cost]
    title: str
    seconds: float
    memory: int
    "The largest memory of the process, in MB."


CASES = [
    Case(plan_prefixes, "50,000 objects below 1,000 patterns, found and planned", 10, 1000),
    Case(plan_names, "1,000,000 objects, found and planned", 60, 1000),
    Case(one_file_more, "one new file next to 20,000 finished units", 30, 1000),
    Case(write_names, "10,000,000 source names, written in parts", 300, 4000),
    Case(read_names, "10,000,000 source names, read", 150, 1000),
    Case(read_index, "an index of 400,000 shards, read", 60, 4000),
]


def main() -> None:
    arguments = _arguments()
    chosen = [c for c in CASES if not arguments.names or c.run.__name__ in arguments.names]
    print("| case | CPU s | goal | peak MB | goal | sizes |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    failed = False
    for case in chosen:
        cost = _run_in_new_process(_measure, case.run)
        failed |= cost.seconds > case.seconds or cost.peak > case.memory
        row = (
            case.title,
            f"{cost.seconds:.1f}",
            f"{case.seconds:g}",
            cost.peak,
            case.memory,
            cost.note,
        )
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    sys.exit(failed)


def _run_in_new_process(function: Callable[..., R], *args: Any) -> R:
    """Run the function in a new process, so that only its own memory is measured."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _measure(run: Callable[[Path], Cost]) -> Cost:
    with tempfile.TemporaryDirectory() as work:
        cost = run(Path(work))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // MB
    return Cost(cost.seconds, cost.note, peak)


def _arguments() -> argparse.Namespace:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases, by the names of their functions")
    return parser.parse_args()


if __name__ == "__main__":
    main()
