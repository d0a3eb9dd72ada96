"""A budget of a mixture out of a crawl that is far larger: what mdsmix holds while the source
grows, and beside it the way that needs 250 GB for 2 B tokens.

    python -m benchmarks.mixtures [--sizes MB ...] [--budget TOKENS] [--work FOLDER]

The config is the published one, CommonCrawl 52.2 % and six others. CommonCrawl has each of the
sizes in turn, the others a tenth of the smallest. In one stage, and in two, the published bytes
must be the same, and the peak must not grow by a tenth; else the exit code is 1. The other way is
replayed at three smaller budgets: how its memory grows with a token is measured, what 2 B tokens
take by that is extrapolated, and marked so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import corpus, outputs
from benchmarks.contenders import HERE, Place
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
"Tokens of the run that is known to have failed."
REPLAYED = 60
"""MB of CommonCrawl for the other way, and a little less of each other source: it tokenizes a fifth
of all.
"""
GROWTH = 1.1
"The peak on the largest source beside that on the smallest."


def main() -> int:
    arguments = _arguments()
    place = Place(work=arguments.work, foundry=arguments.foundry, others=arguments.foundry)
    corpus.tokenizer(place.work)
    sizes, peaks, same = sorted(arguments.sizes), list[int](), True
    print(f"load of the machine: {os.getloadavg()[0]:.1f} of {os.cpu_count()} processors")
    print(
        "\n| CommonCrawl MB | tokens | CPU s | s | peak MB | in two stages |\n| ---: | ---: | ---: | ---: | ---: | --- |"
    )
    for size in sizes:
        folder = _sources(place, size, sizes[0])
        run, tokens = _converted(place, folder, arguments.budget)
        is_same = _stages(place) == _files(place.work / "out")
        peaks, same = [*peaks, run.peak], same and is_same
        print(
            f"| {size:,} | {tokens:,} | {run.cpu:.1f} | {run.wall:.1f} | {run.peak / MB:.0f} | {'the same bytes' if is_same else 'OTHER BYTES'} |",
            flush=True,
        )
    if arguments.foundry.exists():
        _replay(place, _sources(place, REPLAYED, 4 * REPLAYED), arguments.budget // 2)
    is_flat = peaks[-1] <= GROWTH * peaks[0]
    print(f"\npeak of the largest beside the smallest source: {peaks[-1] / peaks[0]:.2f}")
    return 0 if same and is_flat else 1


def _sources(place: Place, size: int, smallest: int) -> Path:
    """A folder with a file for each source of the mixture."""
    folder = place.work / "sources" / f"mixture-{size}-{smallest}"
    for seed, name in enumerate(PERCENTS):
        path = folder / f"{name}.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / "part.jsonl"
            corpus.documents(part, (size if name == "commoncrawl" else smallest // 10) * MB, seed)
            part.rename(path)
    return folder


def _converted(place: Place, folder: Path, budget: int) -> tuple[Run, int]:
    """The mixture as init writes it, converted twice: for seconds, and for the peak."""
    mixture, recipe = place.work / "mixture.json", place.work / "mixture.yaml"
    mixture.write_text(json.dumps({"mixture": PERCENTS}))
    out = place.work / "out"
    _run(
        place,
        [
            place.mdsmix,
            "init",
            "--mixture",
            mixture,
            folder,
            "--budget",
            f"{ROW}:{budget}",
            "--tokenizer",
            place.tokenizer,
            "-o",
            recipe,
            "--to",
            out,
            "--replace",
        ],
    )
    command = [place.mdsmix, "convert", recipe, "--workers", "2"]
    shutil.rmtree(out, ignore_errors=True)
    timed = _run(place, command)
    shutil.rmtree(out, ignore_errors=True)
    peak = _run(place, command, memory=True).peak
    return Run(wall=timed.wall, cpu=timed.cpu, peak=peak, others=timed.others), outputs.mdsmix(out)


def _stages(place: Place) -> dict[str, bytes]:
    """What lies there after CommonCrawl first, and then the others."""
    out = place.work / "stages"
    shutil.rmtree(out, ignore_errors=True)
    command = [place.mdsmix, "convert", place.work / "mixture.yaml", f"local={out}"]
    _run(place, [*command, "--only", "commoncrawl"])
    _run(place, command)
    return _files(out)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _replay(place: Place, folder: Path, budget: int) -> None:
    """The other way at all of the budget, a half and a quarter: bytes for each further token.
    `datasets` keeps what it has tokenized, so the first run is for its seconds, and what tokenizing
    takes is in none of the peaks.
    """
    shutil.rmtree(place.work / "hf", ignore_errors=True)
    found, cpu = list[tuple[int, int]](), 0.0
    for asked in (budget, budget, budget // 2, budget // 4):
        out = place.work / "beacon.jsonl"
        command = [
            *(
                place.foundry / "bin/python",
                HERE / "others/run_beacon.py",
                place.work / "mixture.json",
            ),
            *(folder, place.tokenizer, out, str(ROW), str(asked)),
        ]
        run = _run(place, command, memory=bool(cpu))
        tokens = int((place.work / "log").read_text("utf-8", "replace").split()[-1])
        found += [(tokens, run.peak)] if cpu else []
        cpu = cpu or run.cpu
    print(
        f"\nlists in Python: {cpu:.0f} s of CPU for {found[0][0]:,} tokens\n\n| tokens | peak MB |\n| ---: | ---: |"
    )
    print("\n".join(f"| {tokens:,} | {peak / MB:.0f} |" for tokens, peak in found))
    (many, large), *_, (few, small) = found
    each = (large - small) / (many - few)
    print(
        f"\n{each:.0f} bytes for each further token; EXTRAPOLATED to {FULL:,} tokens: {(small + each * (FULL - few)) / 1e9:.0f} GB"
    )


def _run(place: Place, command: Sequence[str | Path], memory: bool = False) -> Run:
    return measure(command, environment(place), place.work / "log", memory)


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
