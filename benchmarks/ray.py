"""What a Ray cluster costs beside the processes of the same machine: the same documents, two
workers or two processors.

    python -m benchmarks.ray [--size MB] [--rounds N] [--work FOLDER]

CPU seconds are looked up in /proc while the processes live, since Ray lets nobody wait for its
workers. The cluster is `--engine ray`'s own, started and stopped within the run; its bytes are held
against the local engine's. Wants the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from filecmp import dircmp
from pathlib import Path
from statistics import median

from benchmarks import corpus
from benchmarks.contenders import Place
from benchmarks.measure import PERIOD, descendants
from benchmarks.rounds import environment
from mdsmix.engines.hang import read_cpu_ticks

MB = 1_000_000
ENGINES = {"local": ("--workers", "2"), "ray": ("--engine", "ray", "--workers", "2")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1000, help="MB of documents")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "mdsmix-bench")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
    for _ in range(arguments.rounds):
        for engine in ENGINES:
            runs[engine].append(_converted(work, arguments.size * MB, engine))
        if different := _different(dircmp(work / "ray-local", work / "ray-ray")):
            sys.exit(f"the bytes differ: {different}")
    for engine, of in runs.items():
        cpu, wall = map(median, zip(*of, strict=True))
        print(f"{engine}: {cpu:.1f} CPU seconds, {wall:.1f} s")


def _converted(work: Path, size: int, engine: str) -> tuple[float, float]:
    """CPU seconds and seconds of a conversion from nothing."""
    shutil.rmtree(work / f"ray-{engine}", ignore_errors=True)
    source = corpus.source(work, "documents", size)
    stream = {"kind": "pretraining", "source": {"path": f"{source}/*.jsonl", "text": "text"}}
    tree = {"tokenizer": str(corpus.tokenizer(work)), "max_seq_len": 2048}
    recipe = work / f"ray-{engine}.yaml"
    recipe.write_text(json.dumps(tree | {"local": f"ray-{engine}", "streams": {"web": stream}}))
    place = Place(work=work, foundry=work, others=work)
    command = [place.mdsmix, "convert", recipe, *ENGINES[engine]]
    log, began, used = work / f"ray-{engine}.log", time.perf_counter(), dict[int, int]()
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment(place), stdout=out, stderr=out)
        while process.poll() is None:
            for pid in (process.pid, *descendants(process.pid)):
                used[pid] = max(used.get(pid, 0), read_cpu_ticks(pid))
            time.sleep(PERIOD)
    if process.returncode:
        sys.exit(log.read_text("utf-8", "replace")[-2000:])
    return sum(used.values()) / os.sysconf("SC_CLK_TCK"), time.perf_counter() - began


def _different(compared: dircmp[str]) -> list[str]:
    """Names that are not the same in both folders, and all below."""
    found = [*compared.left_only, *compared.right_only, *compared.diff_files]
    return found + [name for below in compared.subdirs.values() for name in _different(below)]


if __name__ == "__main__":
    main()
