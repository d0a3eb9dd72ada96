"""Writes small streams in every column layout with Streaming's own MDSWriter, and makes the config
that loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np

from mdsmix.load import MixLoader, TokenIds, build_loader
from tests.minio import free_port
from tests.preloaded import SECONDS_TOGETHER, PreloadedPython, wait_together

EOS, PAD = 0, 1
IDS = TokenIds(eos=EOS, pad=PAD)
Mixed = Mapping[str, Mapping[str, Any]]
PAIR = {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"}


def write_stream(folder: Path, columns: dict[str, str], samples: Any, **settings: Any) -> Path:
    """Write a stream and return its folder.

    Args:
        settings: of MDSWriter; by default it hashes by sha1.
    """
    from streaming import MDSWriter

    settings = {"hashes": ["sha1"], **settings}
    with MDSWriter(out=str(folder), columns=columns, **settings) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return folder


def write_tokens(folder: Path, count: int, length: int = 8, **settings: Any) -> Path:
    """Write a concat stream as mdsmix does for the text loader. All tokens are different: row i
    starts with 10 + i * length.
    """
    rows = np.arange(10, 10 + count * length, dtype=np.uint16).reshape(count, length)
    samples = [{"tokens": row} for row in rows]
    return write_stream(folder, {"tokens": f"ndarray:uint16:{length}"}, samples, **settings)


def pair(i: int) -> dict[str, Any]:
    """Return a prompt of 1 to 4 tokens and a response of 1 to 7."""
    ids = np.arange(10, 11 + i % 4, dtype=np.uint16)
    return {"input_ids": ids, "labels": np.arange(20, 21 + i % 7, dtype=np.uint16)}


def first_tokens(batches: Iterable[Any]) -> list[int]:
    """Return the first token of each row."""
    return [token for batch in batches for token in batch["input_ids"][:, 0].tolist()]


def loaded(mixed: Mixed, batch: int = 2, name: str = "text", **dataset: Any) -> MixLoader:
    return build_loader(config(mixed, name, **dataset), batch, ids=IDS)


def config(mixed: Mixed, name: str = "finetuning", **dataset: Any) -> dict[str, Any]:
    """Make a config for rows of 8 tokens.

    Args:
        dataset: keys of `dataset`, and the keys of the loader itself.
    """
    keys = ("num_workers", "drop_last", "prefetch_factor", "persistent_workers", "timeout")
    loader = {key: dataset.pop(key) for key in keys if key in dataset}
    targets = {"decoder_only_format": True} if name == "finetuning" else {}
    dataset = {"streams": dict(mixed), "max_seq_len": "${max_seq_len}"} | targets | dataset
    return {"max_seq_len": 8, "train_loader": {"name": name, "dataset": dataset} | loader}


def run_ranks(
    programs: PreloadedPython,
    *program: object,
    seconds: float = SECONDS_TOGETHER,
    **environment: str,
) -> list[CompletedProcess[str]]:
    """Run a program in two processes, as two ranks of a training run on this machine. Return what
    they have printed. If one fails, the other one is ended and the test fails.

    Args:
        seconds: after which ranks that still run hang.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **environment}
    started = [programs.start(*program, **common, RANK=n, LOCAL_RANK=n) for n in "01"]
    return wait_together(started, seconds)
