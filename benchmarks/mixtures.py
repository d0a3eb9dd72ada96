"""A budget of a mixture from a far larger crawl: mdsmix's memory while the source grows, compared
with the method that needs 250 GB for 2 B tokens.

    python -m benchmarks.mixtures [--sizes MB ...] [--budget TOKENS] [--work FOLDER]

The config is the published one: CommonCrawl 52.2 % and six other sources. CommonCrawl gets each of
the sizes in turn, the other sources a tenth of the smallest size. The published bytes must be the
same in one stage and in two, and the peak must not grow by more than a tenth; otherwise the exit
code is 1. The other method is replayed with three smaller budgets, to measure the growth of its
memory per token. The memory for 2 B tokens is extrapolated from that, and marked so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import corpus, outputs
from benchmarks.contenders import HERE, Setup
from benchmarks.measure import Run, measure
from benchmarks.rounds import environment

MB = 1_000_000
ROW = 8192
PERCENTS = {
    "commoncrawl": 52.2,
    "c4": 26.7,
    "github": 5.2,
    "book": 4.2,
    "arxiv": 4.6,
    "wiki": 3.8,
    "stackexchange": 3.3,
}
FULL = 2_000_000_000
"Tokens of the run that failed in the published report."
REPLAYED = 60
"""MB of CommonCrawl for the other method, and a little less of each other source. It tokenizes a
fifth of each.
"""
GROWTH = 1.1
"The largest allowed peak on the largest source, divided by that on the smallest."


def main() -> int:
    arguments = _arguments()
    setup = Setup(work=arguments.work, foundry=arguments.foundry, peers=arguments.foundry)
    corpus.tokenizer(setup.work)
    sizes = sorted(arguments.sizes)
    peaks = list[int]()
    same = True
    print(f"load of the machine: {os.getloadavg()[0]:.1f} of {os.cpu_count()} processors")
    print("\n| CommonCrawl MB | tokens | CPU s | s | peak MB | in two stages |")
    print("| ---: | ---: | ---: | ---: | ---: | --- |")
    for size in sizes:
        folder = _sources(setup, size, sizes[0])
        run, tokens = _convert(setup, folder, arguments.budget)
        is_same = _convert_in_stages(setup) == _files(setup.work / "out")
        peaks.append(run.peak)
        same = same and is_same
        verdict = "the same bytes" if is_same else "OTHER BYTES"
        print(
            f"| {size:,} | {tokens:,} | {run.cpu:.1f} | {run.wall:.1f} | {run.peak / MB:.0f} "
            f"| {verdict} |",
            flush=True,
        )
    if arguments.foundry.exists():
        _replay(setup, _sources(setup, REPLAYED, 4 * REPLAYED), arguments.budget // 2)
    is_flat = peaks[-1] <= GROWTH * peaks[0]
    print(f"\npeak of the largest source over that of the smallest: {peaks[-1] / peaks[0]:.2f}")
    return 0 if same and is_flat else 1


def _sources(setup: Setup, size: int, smallest: int) -> Path:
    """Return a folder with a file for each source of the mixture. Write the files if needed."""
    folder = setup.work / "sources" / f"mixture-{size}-{smallest}"
    for seed, name in enumerate(PERCENTS):
        path = folder / f"{name}.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / "part.jsonl"
            megabytes = size if name == "commoncrawl" else smallest // 10
            corpus.documents(unfinished, megabytes * MB, seed)
            unfinished.rename(path)
    return folder


def _convert(setup: Setup, folder: Path, budget: int) -> tuple[Run, int]:
    """Convert the mixture that init writes, once for the seconds and once for the peak.

    Return the costs and the number of tokens.
    """
    mixture, recipe = setup.work / "mixture.json", setup.work / "mixture.yaml"
    mixture.write_text(json.dumps({"mixture": PERCENTS}))
    output = setup.work / "out"
    init = [setup.mdsmix, "init", "--mixture", mixture, folder, "--budget", f"{ROW}:{budget}"]
    init += ["--tokenizer", setup.tokenizer, "-o", recipe, "--to", output, "--replace"]
    _run(setup, init)
    command = [setup.mdsmix, "convert", recipe, "--workers", "2"]
    shutil.rmtree(output, ignore_errors=True)
    timed = _run(setup, command)
    shutil.rmtree(output, ignore_errors=True)
    peak = _run(setup, command, memory=True).peak
    return replace(timed, peak=peak), outputs.mdsmix(output)


def _convert_in_stages(setup: Setup) -> dict[str, bytes]:
    """Convert CommonCrawl first and then the other sources. Return the files."""
    output = setup.work / "stages"
    shutil.rmtree(output, ignore_errors=True)
    command = [setup.mdsmix, "convert", setup.work / "mixture.yaml", f"local={output}"]
    _run(setup, [*command, "--only", "commoncrawl"])
    _run(setup, command)
    return _files(output)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _replay(setup: Setup, folder: Path, budget: int) -> None:
    """Run the other method with the whole budget, a half and a quarter, and print the bytes for
    each additional token. `datasets` caches tokenized text. So the first run measures seconds, and
    the peaks do not include tokenizing.
    """
    shutil.rmtree(setup.work / "hf", ignore_errors=True)
    peaks = list[tuple[int, int]]()
    cpu = 0.0
    for tokens_wanted in (budget, budget, budget // 2, budget // 4):
        script = HERE / "others/run_beacon.py"
        output = setup.work / "beacon.jsonl"
        command = [setup.foundry / "bin/python", script, setup.work / "mixture.json", folder]
        command += [setup.tokenizer, output, str(ROW), str(tokens_wanted)]
        run = _run(setup, command, memory=bool(cpu))
        tokens = int((setup.work / "log").read_text("utf-8", "replace").split()[-1])
        if cpu:
            peaks.append((tokens, run.peak))
        else:
            cpu = run.cpu
    print(f"\nlists in Python: {cpu:.0f} s of CPU for {peaks[0][0]:,} tokens")
    print("\n| tokens | peak MB |\n| ---: | ---: |")
    print("\n".join(f"| {tokens:,} | {peak / MB:.0f} |" for tokens, peak in peaks))
    (many, large), *_, (few, small) = peaks
    bytes_per_token = (large - small) / (many - few)
    full = small + bytes_per_token * (FULL - few)
    print(
        f"\n{bytes_per_token:.0f} bytes for each additional token; "
        f"EXTRAPOLATED to {FULL:,} tokens: {full / 1e9:.0f} GB"
    )


def _run(setup: Setup, command: Sequence[str | Path], memory: bool = False) -> Run:
    return measure(command, environment(setup), setup.work / "log", memory)


def _arguments() -> argparse.Namespace:
    root = HERE.parent
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixtures", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[250, 1000, 2000], help="MB")
    parser.add_argument("--budget", type=int, default=4_000_000, help="tokens")
    parser.add_argument("--work", type=Path, default=root / ".bench")
    parser.add_argument("--foundry", type=Path, default=root / ".venv-foundry")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
