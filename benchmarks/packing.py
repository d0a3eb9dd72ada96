"""The padding that packing saves, and its cost: for conversations with realistic lengths, and for
the demo's documents.

    python -m benchmarks.packing [--size MB] [--rounds N] [--demo FOLDER] [--work FOLDER]

Conversations are cut from the corpus's prose to log-normal lengths, and converted with and without
`pack: true`, in turn. The quantiles of their lengths are printed. For the demo's documents,
LLM-Foundry's `packing_ratio` is replayed on the same stream with the packer of mdsmix.load, which
gives the same bins as Foundry (tests/foundry/test_batches.py). The share of padding is printed,
and the share of documents that are in a batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import corpus
from benchmarks.contenders import Setup
from benchmarks.measure import Run, measure
from benchmarks.rounds import environment
from mdsmix.kinds.assemble import pack_best_fit
from mdsmix.load.collate import Packer, find_best_ratio, list_ratios
from mdsmix.load.training_rows import TrainingRow
from mdsmix.shards.index import read_index
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.shard_samples import read_all_samples
from mdsmix.shards.token_ids import decode_tokens
from mdsmix.storage import locate

MB = 1_000_000
WIDTH = 4096
SPREADS = {"median 400": 400, "median 1,000": 1000}
"""99 % are below 4,000 tokens in both. The first was requested; the second has the mean from the
card of UltraChat 200k.
"""
LONGEST = 4000
NORMAL_99 = 2.326
CHARACTERS = 4.08
"Per token in this prose, approximately."
DEMO_WIDTH, DEMO_BATCH = 256, 8


def main() -> None:
    arguments = _arguments()
    work: Path = arguments.work.resolve()
    size = arguments.size * MB
    for name, middle in SPREADS.items():
        source = {"path": str(_chats(work, middle, size)), "messages": "messages"}
        chats = {"kind": "finetuning", "source": source}
        _compare(work, f"chats, {name}", chats, arguments.rounds)
    source = {"path": f"{corpus.source(work, 'documents', size)}/*.jsonl", "text": "text"}
    documents = {"kind": "pretraining", "layout": "document", "source": source}
    _compare(work, "documents", documents, arguments.rounds)
    _demo(work, arguments.demo.resolve())


def _chats(work: Path, middle: int, size: int) -> Path:
    """Return a file of conversations with one question and one answer. Write it if needed."""
    path = work / f"chats-{middle}-{size // MB}.jsonl"
    if path.exists():
        return path
    prose = _prose(work)
    rng = np.random.default_rng(middle)
    with path.open("wb") as file:
        while file.tell() < size:
            tokens = min(
                rng.lognormal(np.log(middle), np.log(LONGEST / middle) / NORMAL_99), 40_000
            )
            length = max(40, int((tokens - 15) * CHARACTERS))
            start = int(rng.integers(0, len(prose) - length))
            cut = start + min(length // 2, int(rng.integers(20, 400)))
            messages = [
                {"role": "user", "content": prose[start:cut]},
                {"role": "assistant", "content": prose[cut : start + length]},
            ]
            file.write(json.dumps({"messages": messages}).encode() + b"\n")
    return path


def _prose(work: Path) -> str:
    (source, *_) = sorted(corpus.source(work, "documents", 40 * MB).glob("*.jsonl"))
    return " ".join(json.loads(line)["text"] for line in source.open("rb"))


def _compare(work: Path, name: str, stream: Mapping[str, Any], rounds: int) -> None:
    """Convert a stream with and without packing, in turn, and print the results."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _, packs in itertools.product(range(rounds), (False, True)):
        streams = {"only": {**stream, "pack": True} if packs else stream}
        recipe = _recipe(work, streams, WIDTH, packs, corpus.tokenizer(work))
        seconds[packs].append(_convert(work, recipe).cpu)
    lengths, manifest = _lengths(work / "packed/only/train"), _manifest(work / "packed/only/train")
    quantiles = {f"{q:g} %": int(np.percentile(lengths, q)) for q in (10, 50, 90, 99)}
    print(f"\n{name}: {len(lengths):,}, mean {lengths.mean():.0f} tokens, {quantiles}")
    units, rows = len(manifest.parts), manifest.totals.samples
    print(f"  one conversation per row: {1 - lengths.sum() / (len(lengths) * WIDTH):.1%}")
    print(f"  pack: true: {_padding(manifest):.3%} padding, {rows:,} rows of {units} units")
    whole = len(pack_best_fit(lengths, WIDTH))
    print(f"  all units packed as one: {whole:,} rows, so the ends of units cost {rows - whole}")
    plain, packed = (median(seconds[packs]) for packs in (False, True))
    print(
        f"  CPU seconds: {plain:.2f} plain, {packed:.2f} packed ({packed / plain:.2f})", flush=True
    )


def _demo(work: Path, demo: Path) -> None:
    """Compare Foundry's packing of the documents of `make demo` with packing when converting."""
    source = demo / "corpus/docs.jsonl"
    base = {"kind": "pretraining", "layout": "document", "min_tokens": 8}
    stream = base | {"source": {"path": str(source), "text": "text"}}
    for packs in (False, True):
        streams = {"docs": stream | {"pack": True} if packs else stream}
        recipe = _recipe(work, streams, DEMO_WIDTH, packs, demo / "tokenizer")
        _convert(work, recipe)
    lengths = _lengths(work / "plain/docs/train")
    print(
        f"\ndemo documents: {len(lengths):,} of {lengths.mean():.0f} tokens, rows of {DEMO_WIDTH}"
    )
    order = np.random.default_rng(17).permutation(lengths)
    best = find_best_ratio(
        _rows(order), list_ratios(DEMO_WIDTH, DEMO_BATCH), DEMO_BATCH, DEMO_WIDTH
    )
    for label, ratio in [("none", 1.0), ("auto", best), ("2.0", 2.0), ("2.3", 2.3), ("3.0", 3.0)]:
        padding, used = _packed_in_batches(order, ratio)
        print(
            f"  packing_ratio {label} ({ratio}): {padding:.1%} padding, "
            f"{used:.1%} of the documents used"
        )
    manifest = _manifest(work / "packed/docs/train")
    print(f"  pack: true: {_padding(manifest):.2%} padding, all documents used")


def _packed_in_batches(lengths: NDArray[np.int64], ratio: float) -> tuple[float, float]:
    """Return the share of padding in an epoch's batches, and of the documents that are in one."""
    packer = Packer(bins=DEMO_BATCH, max_seq_len=DEMO_WIDTH)
    drawn, tokens, documents, batches = int(ratio * DEMO_BATCH), 0, 0, 0
    for start in range(0, len(lengths) - drawn + 1, drawn):
        bins = packer.pack(_rows(lengths[start : start + drawn]))
        tokens += sum(row.input_ids.size for rows in bins for row in rows)
        documents += sum(map(len, bins))
        batches += 1
    return 1 - tokens / (batches * DEMO_BATCH * DEMO_WIDTH), documents / len(lengths)


def _rows(lengths: Sequence[int] | NDArray[np.int64]) -> list[TrainingRow]:
    return [TrainingRow(np.zeros(n, np.int64), np.zeros(n, np.int64)) for n in lengths]


def _recipe(
    work: Path, streams: Mapping[str, Any], width: int, packs: bool, tokenizer: Path
) -> Path:
    """Write a recipe that publishes again, in a folder for packed or plain streams."""
    output = work / ("packed" if packs else "plain")
    for name in streams:
        shutil.rmtree(output / name, ignore_errors=True)
    tree = {"tokenizer": str(tokenizer), "max_seq_len": width, "local": str(output)}
    loader = {} if packs else {"train_loader": {"name": "finetuning"}}
    path = work / f"{output.name}.yaml"
    path.write_text(json.dumps(tree | loader | {"streams": streams, "target_responses": "all"}))
    return path


def _convert(work: Path, recipe: Path) -> Run:
    setup = Setup(work=work, foundry=work, peers=work)
    command: list[str | Path] = [
        Path(sys.executable).with_name("mdsmix"),
        "convert",
        recipe,
        "--workers",
        "1",
    ]
    return measure(command, environment(setup), work / "packing.log")


def _lengths(folder: Path) -> NDArray[np.int64]:
    """Return int64 [n]: the tokens of each sample, or of each document of packed rows."""
    return np.concatenate(list(_by_shard(folder)))


def _by_shard(folder: Path) -> Iterator[NDArray[np.int64]]:
    location = locate(folder)
    for shard in read_index(location).shards:
        tokens = decode_tokens(shard, read_all_samples(location, shard))
        assert tokens is not None
        yield tokens.ids.lengths if tokens.trained is None else tokens.responses


def _manifest(folder: Path) -> Manifest:
    manifest = read_manifest(locate(folder))
    assert manifest is not None
    return manifest


def _padding(manifest: Manifest) -> float:
    totals = manifest.totals
    return 1 - totals.tokens / (totals.samples * manifest.encoding.max_seq_len)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=300, metavar="MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--demo", type=Path, default=Path("demo"), help="the folder that make demo wrote"
    )
    parser.add_argument("--work", type=Path, default=Path(".bench"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
