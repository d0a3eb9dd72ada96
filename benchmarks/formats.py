"""The same documents from files of every format, read by mdsmix and by the other tools that are
installed.

    python -m benchmarks.formats [--size MB] [--rounds N] [--only NAME ...] [--big MB]

The formats are read in turn, and the CPU seconds of the whole process tree are measured. There is
one process, since some formats cannot be split and others can. `--big` writes a parquet file with
one row group of that size, and measures the memory of two workers that read it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import median

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import corpus, outputs
from benchmarks.contenders import HERE, ROW, Setup
from benchmarks.measure import Run, measure
from benchmarks.rounds import environment

MB = 1_000_000
SCHEMA = pa.schema([("text", pa.string()), ("url", pa.string())])
"The second column, with a tenth of the bytes, is never read."


def batches(source: Path, rows: int = 1000) -> Iterator[pa.RecordBatch]:
    """Yield the documents of a corpus as Arrow batches."""
    texts = list[str]()
    for path in sorted(source.glob("*.jsonl")):
        for line in path.open("rb"):
            texts.append(orjson.loads(line)["text"])
            if len(texts) == rows:
                yield _batch(texts)
                texts = []
    yield _batch(texts)


def _batch(texts: list[str]) -> pa.RecordBatch:
    urls = [text[: len(text) // 10] for text in texts]
    return pa.record_batch([texts, urls], schema=SCHEMA)


def write_parquet(source: Path, path: Path, group: int = 100_000) -> None:
    with pq.ParquetWriter(path, SCHEMA) as writer:
        writer.write_table(pa.Table.from_batches(batches(source)), row_group_size=group)


def write_arrow(source: Path, path: Path) -> None:
    with pa.ipc.new_stream(str(path), SCHEMA) as writer:
        for batch in batches(source):
            writer.write_batch(batch)


def write_csv(source: Path, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        for batch in batches(source):
            writer.writerows([text] for text in batch["text"].to_pylist())


def write_json(source: Path, path: Path) -> None:
    with path.open("wb") as file:
        for number, batch in enumerate(batches(source)):
            texts = [orjson.dumps({"text": text}) for text in batch["text"].to_pylist()]
            file.write((b",\n" if number else b"[") + b",\n".join(texts))
        file.write(b"]\n")


def write_tar(source: Path, path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, batch in enumerate(batches(source)):
            for row, text in enumerate(batch["text"].to_pylist()):
                info, data = tarfile.TarInfo(f"{number:06}{row:03}.text"), text.encode()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def write_gzip(source: Path, path: Path) -> None:
    with gzip.open(path, "wb", 6) as file:
        for source_file in sorted(source.glob("*.jsonl")):
            with source_file.open("rb") as lines:
                shutil.copyfileobj(lines, file)


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "csv": write_csv,
    "json": write_json,
    "tar": write_tar,
    "jsonl.gz": write_gzip,
}


@dataclass(slots=True)
class Entry:
    """A tool that reads a file of one format."""

    name: str
    command: Callable[[], Sequence[str | Path]]
    count: Callable[[Path], int]
    bytes: int
    "The size of the texts as JSON Lines."
    runs: list[Run] = field(default_factory=list)
    peak: int = 0
    tokens: int = 0

    @property
    def cost(self) -> float:
        """CPU seconds per GB of JSON Lines."""
        return median(run.cpu for run in self.runs) * 1000 * MB / self.bytes if self.runs else nan


def main() -> None:
    arguments = _arguments()
    setup = Setup(work=arguments.work, foundry=arguments.foundry, peers=arguments.others)
    corpus.tokenizer(setup.work)
    entries = [
        e for e in _entries(setup, arguments) if not arguments.only or e.name in arguments.only
    ]
    for number in range(-1, arguments.rounds):
        for entry in entries:
            run = _run(setup, entry, memory=number < 0)
            entry.peak = run.peak or entry.peak
            if number >= 0:
                entry.runs.append(run)
            print(f"{entry.name}: {run.wall:.1f} s, {run.cpu:.1f} s of CPU", flush=True)
    _print_table(entries)


def _print_table(entries: list[Entry]) -> None:
    baseline = next((entry for entry in entries if entry.name == "jsonl"), entries[0])
    print("\n| format | MB | CPU s/GB | speed relative to JSON Lines | peak MB | tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    for entry in entries:
        speed = baseline.cost / entry.cost
        print(
            f"| {entry.name} | {entry.bytes / MB:,.0f} | {entry.cost:.1f} | {speed:.2f} "
            f"| {entry.peak / MB:,.0f} | {entry.tokens:,} |"
        )


def _entries(setup: Setup, arguments: argparse.Namespace) -> Iterator[Entry]:
    if arguments.big:
        yield _mdsmix_entry(setup, "parquet, one row group", arguments.big * MB, 2)
        return
    yield _mdsmix_entry(setup, "jsonl", arguments.size * MB)
    for name in WRITERS:
        yield _mdsmix_entry(setup, name, arguments.size * MB)
    small = arguments.slow * MB
    yield _mdsmix_entry(setup, "parquet, small", small)
    for name, python, script, last, count in (
        ("datatrove", setup.peers, "run_datatrove.py", 1, outputs.ids_of_two_bytes),
        ("foundry", setup.foundry, "run_foundry_parquet.py", ROW, outputs.mds_rows),
    ):
        if (python / "bin/python").exists():
            path = _write_source(setup, "parquet", small)
            command = [
                python / "bin/python",
                HERE / "others" / script,
                path.parent,
                setup.tokenizer,
                setup.work / "out",
                str(last),
            ]
            yield Entry(
                f"{name}, parquet", lambda command=command: command, count, _size(setup, small)
            )  # type: ignore[misc]


def _mdsmix_entry(setup: Setup, name: str, size: int, workers: int = 1) -> Entry:
    path = _write_source(setup, name.partition(",")[0], size, is_one_group=name.endswith("group"))
    stream = f"  documents: {{kind: pretraining, source: {{path: '{path}', text: text}}}}"
    settings = [
        f"tokenizer: {setup.tokenizer}",
        f"max_seq_len: {ROW}",
        f"local: {setup.work / 'out'}",
    ]

    def command() -> Sequence[str | Path]:
        recipe = setup.work / "out.yaml"
        recipe.write_text("\n".join([*settings, "streams:", stream]) + "\n")
        return [setup.mdsmix, "convert", recipe, "--workers", str(workers)]

    return Entry(name, command, outputs.mdsmix, _size(setup, size))


def _size(setup: Setup, size: int) -> int:
    source = corpus.source(setup.work, "documents", size)
    return sum(path.stat().st_size for path in source.glob("*.jsonl"))


def _write_source(setup: Setup, name: str, size: int, is_one_group: bool = False) -> Path:
    source = corpus.source(setup.work, "documents", size)
    if name == "jsonl":
        return source / "0.jsonl"
    suffix = "-one" if is_one_group else ""
    folder = setup.work / "sources" / f"{source.name}-{name}{suffix}"
    path = folder / f"0.{name}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder.parent / f"part.{name}"
        if is_one_group:
            write_parquet(source, unfinished, group=1 << 40)
        else:
            WRITERS[name](source, unfinished)
        unfinished.rename(path)
    return path


def _run(setup: Setup, entry: Entry, memory: bool) -> Run:
    output = setup.work / "out"
    shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(setup.work / "hf", ignore_errors=True)
    output.mkdir()
    run = measure(entry.command(), environment(setup), setup.work / "log", memory)
    entry.tokens = entry.count(output)
    return run


def _arguments() -> argparse.Namespace:
    root = HERE.parent
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.add_argument("--size", type=int, default=500, help="MB of JSON Lines")
    parser.add_argument("--slow", type=int, default=25, help="the same for the other tools")
    parser.add_argument("--big", type=int, help="MB of a parquet of one row group")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--work", type=Path, default=root / ".bench")
    parser.add_argument("--foundry", type=Path, default=root / ".venv-foundry")
    parser.add_argument("--others", type=Path, default=root / ".venv-bench")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
