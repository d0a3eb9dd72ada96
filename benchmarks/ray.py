"""The cost of a Ray cluster compared with processes on the same machine: the same documents, with
two workers or two processors.

    python -m benchmarks.ray [--size MB] [--rounds N] [--work FOLDER]

CPU seconds are read from /proc while the processes run, since nothing can wait for Ray's workers.
`--engine ray` starts and stops the cluster within the run. Its bytes are compared with those of the
local engine. Needs the extra `ray`.
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
from benchmarks.contenders import Setup
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
            runs[engine].append(_convert(work, arguments.size * MB, engine))
        if different := _different_names(dircmp(work / "ray-local", work / "ray-ray")):
            sys.exit(f"the bytes differ: {different}")
    for engine, costs in runs.items():
        cpu, wall = map(median, zip(*costs, strict=True))
        print(f"{engine}: {cpu:.1f} CPU seconds, {wall:.1f} s")


def _convert(work: Path, size: int, engine: str) -> tuple[float, float]:
    """Run a first conversion. Return its CPU seconds and its seconds."""
    shutil.rmtree(work / f"ray-{engine}", ignore_errors=True)
    source = corpus.source(work, "documents", size)
    stream = {"kind": "pretraining", "source": {"path": f"{source}/*.jsonl", "text": "text"}}
    tree = {"tokenizer": str(corpus.tokenizer(work)), "max_seq_len": 2048}
    recipe = work / f"ray-{engine}.yaml"
    recipe.write_text(json.dumps(tree | {"local": f"ray-{engine}", "streams": {"web": stream}}))
    setup = Setup(work=work, foundry=work, peers=work)
    command = [setup.mdsmix, "convert", recipe, *ENGINES[engine]]
    log = work / f"ray-{engine}.log"
    began = time.perf_counter()
    used = dict[int, int]()
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment(setup), stdout=file, stderr=file)
        while process.poll() is None:
            for pid in (process.pid, *descendants(process.pid)):
                used[pid] = max(used.get(pid, 0), read_cpu_ticks(pid))
            time.sleep(PERIOD)
    if process.returncode:
        sys.exit(log.read_text("utf-8", "replace")[-2000:])
    return sum(used.values()) / os.sysconf("SC_CLK_TCK"), time.perf_counter() - began


def _different_names(compared: dircmp[str]) -> list[str]:
    """Return the names of files that differ between the two folders, subfolders included."""
    names = [*compared.left_only, *compared.right_only, *compared.diff_files]
    for subfolder in compared.subdirs.values():
        names += _different_names(subfolder)
    return names


if __name__ == "__main__":
    main()
