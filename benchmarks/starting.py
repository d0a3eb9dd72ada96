"""Measures the time from the start of a process to its first batch: for the ranks of one node, a
first and a second start, from a folder and a MinIO.

    python -m benchmarks.starting [--samples 1000000 100000000] [--shards 20000] [--ranks 1 8]
    [--minio]

It reproduces a known problem: a tool that builds an index of the data at every start, for 30
minutes. The cost of a start grows with samples and shards, so the streams are synthetic
(`synthetic.py`). mdsmix is compared with a bare StreamingDataset and, if its package is in
.venv-bench, with Megatron-core's GPTDataset on as many tokens. Imports, which take the same time
for any data, are shown separately. CPU seconds are those of all ranks together: eight ranks on two
cores wait for each other, so their wall seconds do not apply to a node with eight GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import HERE
from benchmarks.synthetic import WIDTH, write_stream
from tests.minio import start_own_minio

BATCH = 8
MB = 1_000_000
SCRIPT = HERE / "others/first_batch.py"
MEGATRON = HERE / "others/megatron_index.py"
HEAD = (
    *("loader", "samples", "from", "ranks", "start", "imports s", "loader s", "first batch s"),
    *("CPU s of imports", "CPU s", "MB read", "MB written", "peak MB"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loader and its stream."""

    loader: str
    folder: Path
    "The folder of the stream."
    samples: int
    ranks: int
    remote: str | None = None
    "The URL of the stream in a store; shards are then cached in a separate folder."


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of all ranks: seconds of the slowest, bytes of all."""

    imports: float
    "Seconds of one process; the ranks are forked from it."
    built: float
    "Seconds from the fork until the loaders are built."
    first_batch: float
    "Seconds from the fork until the first batches."
    cpu_imports: float
    cpu: float
    read: int
    written: int
    peak: int
    "Memory of the largest rank."


def main() -> None:
    arguments = _arguments()
    print(f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores", flush=True)
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
    with (
        start_own_minio(_empty(arguments.work / "minio"))
        if arguments.minio
        else nullcontext() as server
    ):
        for samples in arguments.samples:
            folder = write_stream(
                arguments.work / f"starting-{samples}-{arguments.shards}", samples, arguments.shards
            )
            for case in _cases(arguments, folder, samples):
                _print_starts(case, arguments.work, {})
            if server:
                remote = _upload(folder, samples, server.settings)
                for ranks in arguments.ranks:
                    case = Case(
                        loader="mdsmix", folder=folder, samples=samples, ranks=ranks, remote=remote
                    )
                    _print_starts(case, arguments.work, server.settings)
            _megatron(arguments, samples)


def _cases(arguments: argparse.Namespace, folder: Path, samples: int) -> Iterator[Case]:
    for ranks in arguments.ranks:
        yield Case(loader="mdsmix", folder=folder, samples=samples, ranks=ranks)
        if ranks == 1:
            yield Case(loader="bare", folder=folder, samples=samples, ranks=ranks)


def _print_starts(case: Case, work: Path, store: Mapping[str, str]) -> None:
    for number, s in zip(("first", "second"), start_twice(case, work, store), strict=True):
        storage = "MinIO" if case.remote else "a folder"
        seconds = (s.imports, s.built, s.first_batch, s.cpu_imports, s.cpu)
        sizes = (s.read, s.written, s.peak)
        cells: list[Any] = [case.loader, f"{case.samples:,}", storage, case.ranks, number]
        cells += [f"{n:.1f}" for n in seconds] + [f"{n / MB:,.0f}" for n in sizes]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def start_twice(case: Case, work: Path, store: Mapping[str, str]) -> Iterator[Start]:
    """Yield the first start, with empty caches, and the second."""
    caches = {name: _empty(work / f"starting-{name}") for name in ("cache", "local")}
    for _ in range(2):
        yield start_ranks(case, caches, store)
    for folder in caches.values():
        shutil.rmtree(folder)


def start_ranks(case: Case, caches: Mapping[str, Path], store: Mapping[str, str]) -> Start:
    """Start all ranks at once, and wait for their first batches."""
    local = caches["local"] if case.remote else case.folder
    command = [SCRIPT, case.loader, local, case.remote or "-", WIDTH, BATCH, case.ranks]
    own = {"MDSMIX_CACHE": str(caches["cache"]), "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=os.environ | store | own, capture_output=True
    )
    if done.returncode:
        raise SystemExit(f"a rank ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    return Start(
        imports=answers[0]["imports"],
        built=max(a["built"] for a in answers),
        first_batch=max(a["done"] for a in answers),
        cpu_imports=answers[0]["cpu_imports"],
        cpu=sum(a["cpu"] for a in answers),
        read=sum(a["read"] for a in answers),
        written=sum(a["written"] for a in answers),
        peak=max(a["peak"] for a in answers),
    )


def _upload(folder: Path, samples: int, store: Mapping[str, str]) -> str:
    """Upload all files of the stream, as a conversion does. Return its URL."""
    from concurrent.futures import ThreadPoolExecutor

    import boto3

    names = ("aws_access_key_id", "aws_secret_access_key")
    keys = {name: store[name.upper()] for name in names}
    client = boto3.client(
        "s3", endpoint_url=store["S3_ENDPOINT_URL"], region_name="us-east-1", **keys
    )
    bucket = f"starting-{samples}"
    client.create_bucket(Bucket=bucket)
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(
            lambda p: client.put_object(Bucket=bucket, Key=f"s/{p.name}", Body=p.read_bytes()),
            folder.iterdir(),
        ):
            pass
    return f"s3://{bucket}/s"


def _megatron(arguments: argparse.Namespace, samples: int) -> None:
    python = arguments.others / "bin/python"
    folder = _empty(arguments.work / "starting-megatron")
    command: Sequence[Any] = [python, "-W", "ignore", MEGATRON, folder, samples, WIDTH, BATCH]
    try:
        subprocess.run([*map(str, command), "--make"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Megatron-core is not compared: {error}", flush=True)
        return
    for number in ("first", "second"):
        before = _size(folder)
        answer = subprocess.run(list(map(str, command)), check=True, capture_output=True).stdout
        result = json.loads(answer.splitlines()[-1])
        cells = ["Megatron-core GPTDataset", f"{samples:,}", "a folder", 1, number, "", ""]
        cells += [f"{result['seconds']:.1f}", "", f"{result['cpu']:.1f}", ""]
        cells += [f"{(_size(folder) - before) / MB:,.0f}", ""]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    shutil.rmtree(folder)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starting", description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000_000, 100_000_000])
    parser.add_argument("--shards", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--minio", action="store_true", help="also from a MinIO")
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--others", type=Path, default=HERE.parent / ".venv-bench")
    return parser.parse_args()


if __name__ == "__main__":
    main()
