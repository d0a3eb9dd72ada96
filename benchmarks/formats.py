"""The same documents from files of every format, each read by mdsmix and, where they are installed,
by its peers.

    python -m benchmarks.formats [--size MB] [--rounds N] [--only NAME ...] [--big MB]

What counts are CPU seconds of the whole process tree, in turn: one process, so that a format which
is one split is not compared with one that is many. `--big` writes a parquet of one row group of
that size and says what two workers hold when they read it.
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
from benchmarks.contenders import HERE, ROW, Place
from benchmarks.measure import Run, measure
from benchmarks.rounds import environment

MB = 1_000_000
SCHEMA = pa.schema([("text", pa.string()), ("url", pa.string())])
"A second column of a tenth of the bytes, which nothing reads."


def batches(source: Path, rows: int = 1000) -> Iterator[pa.RecordBatch]:
    """The documents of a corpus as Arrow holds them."""
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
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["text"])
        for batch in batches(source):
            writer.writerows([text] for text in batch["text"].to_pylist())


def write_json(source: Path, path: Path) -> None:
    with path.open("wb") as out:
        for number, batch in enumerate(batches(source)):
            texts = [orjson.dumps({"text": text}) for text in batch["text"].to_pylist()]
            out.write((b",\n" if number else b"[") + b",\n".join(texts))
        out.write(b"]\n")


def write_tar(source: Path, path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, batch in enumerate(batches(source)):
            for row, text in enumerate(batch["text"].to_pylist()):
                info, data = tarfile.TarInfo(f"{number:06}{row:03}.text"), text.encode()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def write_gzip(source: Path, path: Path) -> None:
    with gzip.open(path, "wb", 6) as out:
        for file in sorted(source.glob("*.jsonl")):
            with file.open("rb") as lines:
                shutil.copyfileobj(lines, out)


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
    """One way to read one file."""

    name: str
    command: Callable[[], Sequence[str | Path]]
    count: Callable[[Path], int]
    bytes: int
    "Of the texts as JSON Lines."
    runs: list[Run] = field(default_factory=list)
    peak: int = 0
    tokens: int = 0

    @property
    def cost(self) -> float:
        """CPU seconds for a GB of JSON Lines."""
        return median(run.cpu for run in self.runs) * 1000 * MB / self.bytes if self.runs else nan


def main() -> None:
    arguments = _arguments()
    place = Place(work=arguments.work, foundry=arguments.foundry, others=arguments.others)
    corpus.tokenizer(place.work)
    found = [
        e for e in _entries(place, arguments) if not arguments.only or e.name in arguments.only
    ]
    for number in range(-1, arguments.rounds):
        for entry in found:
            run = _run(place, entry, memory=number < 0)
            entry.peak = run.peak or entry.peak
            entry.runs += [run] if number >= 0 else []
            print(f"{entry.name}: {run.wall:.1f} s, {run.cpu:.1f} s of CPU", flush=True)
    _say(found)


def _say(found: list[Entry]) -> None:
    best = next((entry for entry in found if entry.name == "jsonl"), found[0])
    print(
        "\n| read from | MB | CPU s/GB | speed beside JSON Lines | peak MB | tokens |\n| --- | --- | --- | --- | --- | --- |"
    )
    for entry in found:
        share = best.cost / entry.cost
        print(
            f"| {entry.name} | {entry.bytes / MB:,.0f} | {entry.cost:.1f} | {share:.2f} | {entry.peak / MB:,.0f} | {entry.tokens:,} |"
        )


def _entries(place: Place, arguments: argparse.Namespace) -> Iterator[Entry]:
    if arguments.big:
        yield _of_mdsmix(place, "parquet, one row group", arguments.big * MB, 2)
        return
    yield _of_mdsmix(place, "jsonl", arguments.size * MB)
    for name in WRITERS:
        yield _of_mdsmix(place, name, arguments.size * MB)
    small = arguments.slow * MB
    yield _of_mdsmix(place, "parquet, small", small)
    for name, python, script, last, count in (
        ("datatrove", place.others, "run_datatrove.py", 1, outputs.ids_of_two_bytes),
        ("foundry", place.foundry, "run_foundry_parquet.py", ROW, outputs.mds_rows),
    ):
        if (python / "bin/python").exists():
            path = _written(place, "parquet", small)
            command = [
                python / "bin/python",
                HERE / "others" / script,
                path.parent,
                place.tokenizer,
                place.work / "out",
                str(last),
            ]
            yield Entry(
                f"{name}, parquet", lambda command=command: command, count, _size(place, small)
            )  # type: ignore[misc]


def _of_mdsmix(place: Place, name: str, size: int, workers: int = 1) -> Entry:
    path = _written(place, name.partition(",")[0], size, one=name.endswith("group"))
    stream = f"  documents: {{kind: pretraining, source: {{path: '{path}', text: text}}}}"
    settings = [
        f"tokenizer: {place.tokenizer}",
        f"max_seq_len: {ROW}",
        f"local: {place.work / 'out'}",
    ]

    def command() -> Sequence[str | Path]:
        recipe = place.work / "out.yaml"
        recipe.write_text("\n".join([*settings, "streams:", stream]) + "\n")
        return [place.mdsmix, "convert", recipe, "--workers", str(workers)]

    return Entry(name, command, outputs.mdsmix, _size(place, size))


def _size(place: Place, size: int) -> int:
    source = corpus.source(place.work, "documents", size)
    return sum(path.stat().st_size for path in source.glob("*.jsonl"))


def _written(place: Place, name: str, size: int, one: bool = False) -> Path:
    source = corpus.source(place.work, "documents", size)
    if name == "jsonl":
        return source / "0.jsonl"
    folder = place.work / "sources" / f"{source.name}-{name}{'-one' * one}"
    path = folder / f"0.{name}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder.parent / f"part.{name}"
        if one:
            write_parquet(source, part, group=1 << 40)
        else:
            WRITERS[name](source, part)
        part.rename(path)
    return path


def _run(place: Place, entry: Entry, memory: bool) -> Run:
    out = place.work / "out"
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(place.work / "hf", ignore_errors=True)
    out.mkdir()
    run = measure(entry.command(), environment(place), place.work / "log", memory)
    entry.tokens = entry.count(out)
    return run


def _arguments() -> argparse.Namespace:
    root = HERE.parent
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.add_argument("--size", type=int, default=500, help="MB of JSON Lines")
    parser.add_argument("--slow", type=int, default=25, help="the same for the peers")
    parser.add_argument("--big", type=int, help="MB of a parquet of one row group")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--work", type=Path, default=root / ".bench")
    parser.add_argument("--foundry", type=Path, default=root / ".venv-foundry")
    parser.add_argument("--others", type=Path, default=root / ".venv-bench")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
