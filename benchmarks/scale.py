"""What grows with the work, at the size that it has beyond one machine: names, units, shards, each
case in a process of its own.

    python -m benchmarks.scale [NAME ...]

Seconds are of the processor, so that a busy machine changes little; of a simulated store it is said
what its answers would add. A case that takes more than its goal, in seconds or memory, ends the run
with exit code 1. No source is converted: what a conversion would have left is written by the
functions that write it (`finished.py`). docs/many-machines.md quotes the figures.
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
class Took:
    """What a case came to; `said` is more of it."""

    seconds: float
    said: str
    peak: int = 0


def plan_prefixes(work: Path) -> Took:
    return _planned(50_000, patterns=1000, size=40 * MB)


def plan_names(work: Path) -> Took:
    return _planned(1_000_000, patterns=100, size=MB)


def _planned(count: int, patterns: int, size: int) -> Took:
    """Finds and plans objects of a store whose listings are made up, and looks each unit up in a
    memory that knows none.
    """
    each, began = count // patterns, time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        asked = _listings(patch, each, size)
        files = sources.find_files([f"s3://bucket/raw/{n}/*.jsonl" for n in range(patterns)], "/")
    units, cache = sources.plan_units(files), KnownSources.empty("nowhere")
    assert len(files) == count
    assert not any(map(cache.content, units))
    seconds = time.process_time() - began
    return Took(seconds, f"{len(units):,} units; {len(asked):,} listings, 16 at a time")


def _listings(patch: pytest.MonkeyPatch, each: int, size: int) -> list[str]:
    when, asked = datetime(2026, 1, 1, tzinfo=timezone.utc), list[str]()

    def page(wanted: dict[str, Any], client: Any) -> dict[str, Any]:
        start = int(wanted.get("ContinuationToken", 0))
        end, folder = min(each, start + PAGE), wanted["Prefix"].rpartition("/")[0]
        asked.append(folder)
        found = [
            {
                "Key": f"{folder}/part-{n:07}.jsonl",
                "Size": size + n % PAGE,
                "ETag": f'"{n:032x}"',
                "LastModified": when,
            }
            for n in range(start, end)
        ]
        more = {"IsTruncated": end < each, "NextContinuationToken": str(end)}
        return {"Contents": found, **more}

    patch.setattr(s3, "_list_page", page)
    patch.setattr(s3, "ask", lambda url, request: request(None))
    return asked


def one_file_more(work: Path, count: int = 20_000) -> Took:
    """The real run, on a disk: one new file beside so many finished units."""
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
        ledger = [stat.size for _, stat in (locate(outcome.target) / ".mdsmix").list()]
    said = f"manifest {manifest.size / MB:.1f} MB, index {index.size / MB:.1f} MB, {len(ledger)} files of the ledger, {sum(ledger) / MB:.1f} MB"
    return Took(seconds, said)


def _processor() -> float:
    """Of this process and its workers."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def _entries(count: int) -> Iterator[SourceEntry]:
    for n in range(count):
        digest = xxhash.xxh128_hexdigest(str(n))
        path = f"s3://bucket/crawl-2026-11/segment-{n // 10_000:05}/part-{n:08}.jsonl.zst"
        yield SourceEntry(path=path, size=40 * MB + n, hash=digest)


def _write_names(work: Path, count: int) -> list[SourceList]:
    return store_sources(locate(work), list(_entries(count)))


def write_names(work: Path, count: int = 10_000_000) -> Took:
    began = time.process_time()
    parts = _write_names(work, count)
    seconds = time.process_time() - began
    size = sum(part.bytes for part in parts)
    return Took(seconds, f"{len(parts)} parts, {size / MB:.0f} MB")


def read_names(work: Path, count: int = 10_000_000) -> Took:
    """The names that another process wrote, as whoever lists the sources reads them: a part at a
    time.
    """
    parts = _elsewhere(_write_names, work, count // 10)
    began = time.process_time()
    found = sum(len(read_source_list(locate(work), part)) for _ in range(10) for part in parts)
    assert found == count
    return Took(time.process_time() - began, f"{len(parts) * 10} reads of a part")


def read_index(work: Path, count: int = 400_000) -> Took:
    """The largest index that is read: made, written as text and read back."""
    layout = ShardLayout({"tokens": "ndarray:uint16"}, None)
    shards = [make_shard(layout, 11_500, _file(n), None) for n in range(count)]
    content = make_index(shards).content
    del shards
    began = time.process_time()
    index: Index = parse_index(content, "index.json")
    seconds = time.process_time() - began
    assert len(index.shards) == count
    return Took(seconds, f"{len(content) / MB:.0f} MB")


def _file(number: int) -> StoredFile:
    digest = xxhash.xxh128_hexdigest(str(number))
    return StoredFile(basename=f"{digest}.mds", bytes=47 * MB, hashes={"xxh128": digest})


@dataclass(frozen=True)
class Case:
    """What is done, and what it may take."""

    run: Callable[[Path], Took]
    what: str
    seconds: float
    memory: int
    "MB that the process may hold at most."


CASES = [
    Case(plan_prefixes, "50,000 objects below 1,000 patterns, found and planned", 10, 1000),
    Case(plan_names, "1,000,000 objects, found and planned", 60, 1000),
    Case(one_file_more, "one new file beside 20,000 finished units", 30, 1000),
    Case(write_names, "10,000,000 source names, written in parts", 300, 4000),
    Case(read_names, "10,000,000 source names, read", 150, 1000),
    Case(read_index, "an index of 400,000 shards, read", 60, 4000),
]


def main() -> None:
    arguments = _arguments()
    chosen = [c for c in CASES if not arguments.names or c.run.__name__ in arguments.names]
    print(
        "| what | CPU s | goal | peak MB | goal | more |\n| --- | ---: | ---: | ---: | ---: | --- |"
    )
    failed = False
    for case in chosen:
        took = _elsewhere(_alone, case.run)
        failed |= took.seconds > case.seconds or took.peak > case.memory
        row = (
            case.what,
            f"{took.seconds:.1f}",
            f"{case.seconds:g}",
            took.peak,
            case.memory,
            took.said,
        )
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    sys.exit(failed)


def _elsewhere(function: Callable[..., R], *args: Any) -> R:
    """In a new process, so that what it holds is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _alone(run: Callable[[Path], Took]) -> Took:
    with tempfile.TemporaryDirectory() as work:
        took = run(Path(work))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // MB
    return Took(took.seconds, took.said, peak)


def _arguments() -> argparse.Namespace:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases, by the names of their functions")
    return parser.parse_args()


if __name__ == "__main__":
    main()
