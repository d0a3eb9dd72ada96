"""mdsmix.load compared with bare loaders and with litData, epoch by epoch in turn.

There are three bare loaders, each a StreamingDataset in torch's DataLoader, in one process with
mdsmix:

- `samples` makes no batches and returns the decoded samples;
- `script` is as short as scripts that people write: it makes the tensors of mdsmix's batches and
  checks nothing;
- `same` makes mdsmix's rows one by one and collates them by mdsmix's collator.

Each reads its own copy of the streams, which is in the page cache. The epoch before the first round
warms up. Its batches must be equal in `script`, `same` and mdsmix.

litData (`.venv-bench`, without workers) reads full rows in a process of its own, whatever the
layout: its batches have int64 ids, labels and mask, as those of mdsmix. For each layout the rows
that a CPU second gives are divided by litData's rate for full rows.

    .venv/bin/python -m benchmarks.loading [--rounds 5] [--workers 0 2] [--only pairs] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

from benchmarks.contenders import HERE
from benchmarks.measure import descendants
from mdsmix.load import MixLoader, TokenIds, build_loader
from mdsmix.load.training_rows import make_training_row

LENGTH = 2048
BATCH = 8
EOS, PAD, IGNORED = 0, 1, -100
PAIR = {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"}
PACKED = {
    "input_ids": "ndarray:uint16",
    "starts": "ndarray:int32",
    "loss_mask": "ndarray:uint8",
}
Sample = Mapping[str, Any]
Rows = Iterator[dict[str, Any]]
LITDATA = "litdata"
MOST_SECONDS = 300
"litData makes its stream in 15 s, and reads an epoch in less than 1 s."


def main() -> None:
    arguments = _arguments()
    print(f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores")
    rates: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, _litdata(Path(folder), arguments) as litdata:
        for workers in arguments.workers:
            print(f"\n{workers} workers: rows/s; rows per CPU second, and mdsmix's share of them")
            for name, (loader, columns, rows) in LAYOUTS.items():
                if name in (arguments.only or LAYOUTS):
                    streams = Path(folder, f"{name}, {workers}")
                    _write(streams, columns, rows(arguments.samples))
                    loaders = _loaders(streams, loader, workers) | litdata
                    rates[f"{name}, {workers} workers"] = _compare(name, loaders, arguments.rounds)
                    del loaders
                    shutil.rmtree(streams)
    if arguments.json:
        arguments.json.write_text(json.dumps(rates))


@contextmanager
def _litdata(folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Give a `with` block a function that reads an epoch of full rows by litData and returns its
    wall and CPU seconds, under the key LITDATA. With `--without-litdata` the mapping is empty.
    """
    if arguments.without_litdata:
        yield {}
        return
    python = HERE.parent / ".venv-bench" / "bin" / "python"
    sizes = (arguments.samples, LENGTH, BATCH)
    script = HERE / "others" / "run_litdata_rows.py"
    command = [str(word) for word in (python, script, folder / LITDATA, *sizes)]
    with (folder / "litdata.log").open("wb") as log:
        process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    assert process.stdin is not None
    assert process.stdout is not None
    questions = process.stdin
    answers = process.stdout

    def read_epoch() -> tuple[float, float]:
        questions.write("epoch\n")
        questions.flush()
        answer = answers.readline()
        if not answer:
            raise SystemExit(f"litData failed: {(folder / 'litdata.log').read_text()[-2000:]}")
        wall, cpu = json.loads(answer)
        return wall, cpu

    try:
        yield {LITDATA: read_epoch}
    finally:
        questions.close()
        process.wait(MOST_SECONDS)


def _random(count: int, low: int, high: int) -> Iterator[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(7)
    for length in draw.integers(low, high, count, endpoint=True):
        yield draw.integers(2, 30_000, length).astype(np.uint16)


def _tokens(low: int, high: int, count: int) -> Rows:
    return ({"tokens": row} for row in _random(count, low, high))


def _columns(low: int, high: int, cut: int, count: int) -> Rows:
    """Yield rows cut in two; the last token of each is EOS."""
    for row in _random(count, low, high):
        row[-1] = EOS
        yield {"input_ids": row[: len(row) // cut or 1], "labels": row[len(row) // cut or 1 :]}


def _turns(count: int) -> Rows:
    parts = [row.tolist() for row in _random(8 * count, 10, 60)]
    for start in range(0, len(parts), 8):
        parts[start + 7].append(EOS)
        pairs = zip(parts[start : start + 8 : 2], parts[start + 1 : start + 8 : 2], strict=True)
        yield {"turns": [{"input_ids": prompt, "labels": answer} for prompt, answer in pairs]}


def _packed(count: int) -> Rows:
    """Yield full rows of 8 documents each. Two thirds of a document's tokens are trained."""
    draw = np.random.default_rng(8)
    for row in _random(count, LENGTH, LENGTH):
        starts = np.sort(draw.choice(np.arange(1, LENGTH), 7, replace=False))
        starts = np.concatenate([[0], starts]).astype(np.int32)
        positions = np.arange(LENGTH) - np.repeat(starts, np.diff(np.append(starts, LENGTH)))
        lengths = np.repeat(np.diff(np.append(starts, LENGTH)), np.diff(np.append(starts, LENGTH)))
        is_trained = positions >= lengths // 3
        yield {"input_ids": row, "starts": starts, "loss_mask": is_trained.astype(np.uint8)}


FULL = {"input_ids": "ndarray:uint16:1", "labels": f"ndarray:uint16:{LENGTH - 1}"}
LAYOUTS: dict[str, tuple[str, dict[str, str], Callable[[int], Rows]]] = {
    "rows": ("text", {"tokens": f"ndarray:uint16:{LENGTH}"}, partial(_tokens, LENGTH, LENGTH)),
    "rows, finetuning": ("finetuning", FULL, partial(_columns, LENGTH, LENGTH, LENGTH)),
    "documents": ("text", {"tokens": "ndarray:uint16"}, partial(_tokens, 40, 1000)),
    "documents, finetuning": ("finetuning", PAIR, partial(_columns, 40, 1000, 1000)),
    "pairs": ("finetuning", PAIR, partial(_columns, 20, 200, 2)),
    "packed rows": ("mdsmix", PACKED, _packed),
    "conversations": ("finetuning", {"turns": "json"}, _turns),
}
"Name -> loader, columns, samples. Every row ends with EOS, so no loader has to add one."


def _write(folder: Path, columns: dict[str, str], rows: Rows) -> None:
    with MDSWriter(out=str(folder / "mdsmix"), columns=columns, hashes=["xxh3_64"]) as writer:
        for row in rows:
            writer.write(row)
    for copy in ("samples", "script", "same"):
        shutil.copytree(folder / "mdsmix", folder / copy)


def _loaders(folder: Path, name: str, workers: int) -> dict[str, Any]:
    workings = {"num_workers": workers, "prefetch_factor": 2 if workers else None}
    workings["persistent_workers"] = workers > 0
    return {
        "samples": _bare(folder / "samples", list, workings),
        "script": _bare(folder / "script", partial(_batch, name != "text"), workings),
        "same": _same(folder, name, workings),
        "mdsmix": _ours(folder / "mdsmix", name, workings),
    }


def _bare(folder: Path, collate: Callable[[Any], Any], workings: dict[str, Any]) -> Any:
    dataset = StreamingDataset(local=str(folder), batch_size=BATCH, shuffle=True)
    return DataLoader(dataset, batch_size=BATCH, collate_fn=collate, **workings)


def _ours(folder: Path, name: str, workings: dict[str, Any]) -> MixLoader:
    dataset: dict[str, Any] = {"streams": {"s": {"local": str(folder)}}, "max_seq_len": LENGTH}
    dataset |= {"shuffle": True} | ({"decoder_only_format": True} if name == "finetuning" else {})
    config = {"train_loader": {"name": name, "dataset": dataset, **workings}}
    return build_loader(config, BATCH, ids=TokenIds(eos=EOS, pad=PAD))


def _same(folder: Path, name: str, workings: dict[str, Any]) -> Any:
    """Return StreamingDataset with the rows and the collation of mdsmix. The difference to mdsmix
    is the cost of its dataset and streams.
    """
    collate = _ours(folder / "mdsmix", name, workings).collate_fn
    return _bare(folder / "same", partial(_collated, collate), workings)


def _collated(collate: Any, samples: Sequence[Sample]) -> Any:
    return collate([make_training_row(sample, collate.rules) for sample in samples])


def _batch(has_sequence_id: bool, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return the batch that mdsmix gives for these samples, without any checks."""
    ids = np.full((len(samples), LENGTH), PAD, np.int64)
    labels = np.full((len(samples), LENGTH), IGNORED, np.int64)
    mask = np.zeros((len(samples), LENGTH), np.int64)
    documents = np.full((len(samples), LENGTH), -1, np.int64)
    for i, sample in enumerate(samples):
        if "starts" in sample:
            row = sample["input_ids"].astype(np.int64)
            edges = np.append(sample["starts"], len(row))
            ids[i, : len(row)] = row
            labels[i, : len(row)] = np.where(sample["loss_mask"], row, IGNORED)
            labels[i, edges[:-1]] = IGNORED
            mask[i, : len(row)] = 1
            documents[i, : len(row)] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
            continue
        row, begin = _row(sample)
        documents[i, : len(row)] = 0
        ids[i, : len(row)] = row
        labels[i, begin : len(row)] = row[begin:]
        mask[i, : len(row)] = 1
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if has_sequence_id:
        batch["sequence_id"] = documents
    return {key: torch.from_numpy(value) for key, value in batch.items()}


def _row(sample: Sample) -> tuple[Any, int]:
    """Return the tokens, and the position of the first trained one."""
    if "tokens" in sample:
        return sample["tokens"], 0
    if "turns" in sample:
        row = list[int]()
        for turn in sample["turns"]:
            row += turn["input_ids"]
            row += turn["labels"]
        return row, len(row) - len(sample["turns"][-1]["labels"])
    return np.concatenate([sample["input_ids"], sample["labels"]]), len(sample["input_ids"])


def _compare(name: str, loaders: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Print a line. Return the rows that each loader gives per CPU second."""
    _warm_up_and_compare(loaders)
    runs: dict[str, list[tuple[float, float]]] = {key: [] for key in loaders}
    for _ in range(rounds):
        for key, loader in loaders.items():
            runs[key].append(loader() if key == LITDATA else _epoch(loader))
    size = len(loaders["mdsmix"].dataset)
    speed = size / statistics.median(wall for wall, _ in runs["mdsmix"])
    rates = {key: size / statistics.median(cpu for _, cpu in runs[key]) for key in runs}
    summary = ", ".join(f"{key} {rate:,.0f}" for key, rate in rates.items())
    shares = ", ".join(
        f"{rates['mdsmix'] / rate:.2f} of {key}" for key, rate in rates.items() if key != "mdsmix"
    )
    print(f"  {name:<22} {speed:,.0f}; {summary}: {shares}", flush=True)
    return rates


def _warm_up_and_compare(loaders: Mapping[str, Any]) -> None:
    """Run an epoch of each loader, and compare the batches of those that make some."""
    for _ in loaders["samples"]:
        pass
    if LITDATA in loaders:
        loaders[LITDATA]()
    for ours, *theirs in zip(*(loaders[k] for k in ("mdsmix", "script", "same")), strict=True):
        for batch in theirs:
            if ours.keys() != batch.keys() or not all(ours[k].equal(batch[k]) for k in ours):
                raise SystemExit("mdsmix and the bare loaders give different batches")


def _epoch(loader: Any) -> tuple[float, float]:
    """Return the wall and CPU seconds of one pass, workers included."""
    began, before = time.perf_counter(), _cpu_seconds()
    for _ in loader:
        pass
    return time.perf_counter() - began, _cpu_seconds() - before


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and its living workers."""
    return time.process_time() + sum(map(_cpu_seconds_of, descendants(os.getpid())))


def _cpu_seconds_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process ended just now
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed epochs of each loader")
    parser.add_argument("--samples", type=int, default=8000, help="samples of each stream")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--json", type=Path, help="write the rows per CPU second of each loader")
    parser.add_argument("--without-litdata", action="store_true", help="compare without litData")
    parser.add_argument("--only", nargs="+", metavar="LAYOUT", choices=list(LAYOUTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
