"""What packing saves, and what it costs: conversations whose lengths spread like real ones, and the
demo's documents.

    python -m benchmarks.packing [--size MB] [--rounds N] [--demo FOLDER] [--work FOLDER]

Conversations are cut from the corpus's prose to lengths of a log-normal spread, and converted with
and without `pack: true`, in turn; the quantiles that come out are printed. Of the demo's documents
LLM-Foundry's `packing_ratio` is replayed on the same stream by the packer of mdsmix.load, which
gives Foundry's own bins (tests/foundry/test_batches.py): what is padding, and which documents are
in a batch at all.
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
from benchmarks.contenders import Place
from benchmarks.measure import Run, measure
from benchmarks.rounds import environment
from mdsmix.kinds.assemble import best_fit
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
"""99 % are below 4,000 tokens in both. The first is what was asked for; the second has the mean
that UltraChat 200k's card gives.
"""
LONGEST = 4000
NORMAL_99 = 2.326
CHARACTERS = 4.08
"Of a token, about, in this prose."
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
    """One file of conversations of one question and one answer."""
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
            at = int(rng.integers(0, len(prose) - length))
            cut = at + min(length // 2, int(rng.integers(20, 400)))
            messages = [
                {"role": "user", "content": prose[at:cut]},
                {"role": "assistant", "content": prose[cut : at + length]},
            ]
            file.write(json.dumps({"messages": messages}).encode() + b"\n")
    return path


def _prose(work: Path) -> str:
    (source, *_) = sorted(corpus.source(work, "documents", 40 * MB).glob("*.jsonl"))
    return " ".join(json.loads(line)["text"] for line in source.open("rb"))


def _compare(work: Path, name: str, stream: Mapping[str, Any], rounds: int) -> None:
    """A stream converted with and without packing, in turn."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _, packs in itertools.product(range(rounds), (False, True)):
        streams = {"only": {**stream, "pack": True} if packs else stream}
        recipe = _recipe(work, streams, WIDTH, packs, corpus.tokenizer(work))
        seconds[packs].append(_converted(work, recipe).cpu)
    lengths, manifest = _lengths(work / "packed/only/train"), _manifest(work / "packed/only/train")
    quantiles = {f"{q:g} %": int(np.percentile(lengths, q)) for q in (10, 50, 90, 99)}
    print(f"\n{name}: {len(lengths):,}, mean {lengths.mean():.0f} tokens, {quantiles}")
    units, rows = len(manifest.parts), manifest.totals.samples
    print(f"  padded one by one: {1 - lengths.sum() / (len(lengths) * WIDTH):.1%}")
    print(f"  pack: true: {_padding(manifest):.3%} padding, {rows:,} rows of {units} units")
    whole = len(best_fit(lengths, WIDTH))
    print(f"  all units packed as one: {whole:,} rows, so the ends of units cost {rows - whole}")
    plain, packed = (median(seconds[packs]) for packs in (False, True))
    print(
        f"  CPU seconds: {plain:.2f} plain, {packed:.2f} packed ({packed / plain:.2f})", flush=True
    )


def _demo(work: Path, demo: Path) -> None:
    """The documents of `make demo`, under Foundry's packing and packed when converted."""
    source = demo / "corpus/docs.jsonl"
    base = {"kind": "pretraining", "layout": "document", "min_tokens": 8}
    stream = base | {"source": {"path": str(source), "text": "text"}}
    for packs in (False, True):
        streams = {"docs": stream | {"pack": True} if packs else stream}
        recipe = _recipe(work, streams, DEMO_WIDTH, packs, demo / "tokenizer")
        _converted(work, recipe)
    lengths = _lengths(work / "plain/docs/train")
    print(
        f"\ndemo documents: {len(lengths):,} of {lengths.mean():.0f} tokens, rows of {DEMO_WIDTH}"
    )
    order = np.random.default_rng(17).permutation(lengths)
    found = find_best_ratio(
        _rows(order), list_ratios(DEMO_WIDTH, DEMO_BATCH), DEMO_BATCH, DEMO_WIDTH
    )
    for label, ratio in [("none", 1.0), ("auto", found), ("2.0", 2.0), ("2.3", 2.3), ("3.0", 3.0)]:
        padding, seen = _packed_in_batches(order, ratio)
        print(
            f"  packing_ratio {label} ({ratio}): {padding:.1%} padding, {seen:.1%} of the documents seen"
        )
    manifest = _manifest(work / "packed/docs/train")
    print(f"  pack: true: {_padding(manifest):.2%} padding, all documents seen")


def _packed_in_batches(lengths: NDArray[np.int64], ratio: float) -> tuple[float, float]:
    """The share of padding in an epoch's batches, and of the documents that came in one."""
    packer = Packer(bins=DEMO_BATCH, max_seq_len=DEMO_WIDTH)
    drawn, tokens, documents, batches = int(ratio * DEMO_BATCH), 0, 0, 0
    for at in range(0, len(lengths) - drawn + 1, drawn):
        bins = packer.pack(_rows(lengths[at : at + drawn]))
        tokens += sum(row.input_ids.size for rows in bins for row in rows)
        documents += sum(map(len, bins))
        batches += 1
    return 1 - tokens / (batches * DEMO_BATCH * DEMO_WIDTH), documents / len(lengths)


def _rows(lengths: Sequence[int] | NDArray[np.int64]) -> list[TrainingRow]:
    return [TrainingRow(np.zeros(n, np.int64), np.zeros(n, np.int64)) for n in lengths]


def _recipe(
    work: Path, streams: Mapping[str, Any], width: int, packs: bool, tokenizer: Path
) -> Path:
    """A recipe that publishes anew, in a folder for packed or plain streams."""
    out = work / ("packed" if packs else "plain")
    for name in streams:
        shutil.rmtree(out / name, ignore_errors=True)
    tree = {"tokenizer": str(tokenizer), "max_seq_len": width, "local": str(out)}
    loader = {} if packs else {"train_loader": {"name": "finetuning"}}
    path = work / f"{out.name}.yaml"
    path.write_text(json.dumps(tree | loader | {"streams": streams, "target_responses": "all"}))
    return path


def _converted(work: Path, recipe: Path) -> Run:
    place = Place(work=work, foundry=work, others=work)
    command: list[str | Path] = [
        Path(sys.executable).with_name("mdsmix"),
        "convert",
        recipe,
        "--workers",
        "1",
    ]
    return measure(command, environment(place), work / "packing.log")


def _lengths(folder: Path) -> NDArray[np.int64]:
    """int64 [n]: the tokens of each sample, or of each document of packed rows."""
    return np.concatenate(list(_by_shard(folder)))


def _by_shard(folder: Path) -> Iterator[NDArray[np.int64]]:
    at = locate(folder)
    for shard in read_index(at).shards:
        tokens = decode_tokens(shard, read_all_samples(at, shard))
        assert tokens is not None
        yield tokens.ids.lengths if tokens.trained is None else tokens.responses


def _manifest(folder: Path) -> Manifest:
    found = read_manifest(locate(folder))
    assert found is not None
    return found


def _padding(manifest: Manifest) -> float:
    totals = manifest.totals
    return 1 - totals.tokens / (totals.samples * manifest.encoding.max_seq_len)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=300, metavar="MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--demo", type=Path, default=Path("demo"), help="what make demo has made")
    parser.add_argument("--work", type=Path, default=Path(".bench"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
