"""Small streams in every column layout, written by Streaming's own MDSWriter, and the config that loads them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdsmix.load import MixLoader, TokenIds, build_loader

EOS, PAD = 0, 1
IDS = TokenIds(eos=EOS, pad=PAD)
PAIR = {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"}


def write_stream(
    folder: Path,
    columns: Mapping[str, str],
    samples: Iterable[Mapping[str, Any]],
    *,
    shard_bytes: int = 1 << 26,
    hashes: Sequence[str] = ("sha1",),
    compression: str | None = None,
) -> Path:
    from streaming import MDSWriter

    how = {"hashes": list(hashes), "compression": compression, "size_limit": shard_bytes}
    with MDSWriter(out=str(folder), columns=dict(columns), **how) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return folder


def rows_of(count: int, length: int, first: int = 10) -> list[np.ndarray[Any, Any]]:
    """Rows that differ in every token: row i is first + i * length and so on."""
    ids = np.arange(first, first + count * length, dtype=np.uint16)
    return list(ids.reshape(count, length))


def write_tokens(folder: Path, count: int, length: int = 8, **settings: Any) -> Path:
    """A concat stream as mdsmix writes it for the text loader; row i starts with 10 + i * length."""
    samples = [{"tokens": row} for row in rows_of(count, length)]
    return write_stream(folder, {"tokens": f"ndarray:uint16:{length}"}, samples, **settings)


def pair(i: int) -> dict[str, Any]:
    """A prompt of 1 to 4 tokens and a response of 1 to 7."""
    ids = np.arange(10, 11 + i % 4, dtype=np.uint16)
    return {"input_ids": ids, "labels": np.arange(20, 21 + i % 7, dtype=np.uint16)}


def first_tokens(batches: Iterable[Any]) -> list[int]:
    """Of every row."""
    return [token for batch in batches for token in batch["input_ids"][:, 0].tolist()]


def loaded(
    mixed: Mapping[str, Mapping[str, Any]], batch: int = 2, name: str = "text", **dataset: Any
) -> MixLoader:
    return build_loader(config(mixed, name, **dataset), batch, ids=IDS)


def config(
    mixed: Mapping[str, Mapping[str, Any]], name: str = "finetuning", **dataset: Any
) -> dict[str, Any]:
    """A config for rows of 8 tokens; keywords of the loader are those that LLM-Foundry has there."""
    keys = ("num_workers", "drop_last", "prefetch_factor", "persistent_workers", "timeout")
    loader = {key: dataset.pop(key) for key in keys if key in dataset}
    targets = {"decoder_only_format": True} if name == "finetuning" else {}
    dataset = {"streams": dict(mixed), "max_seq_len": "${max_seq_len}"} | targets | dataset
    return {"max_seq_len": 8, "train_loader": {"name": name, "dataset": dataset} | loader}
