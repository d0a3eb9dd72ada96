"""Counts the tokens that a tool has written: a tool that loses tokens must not look fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson


def mdsmix(output: Path) -> int:
    """Add up the tokens of the manifests, with the ones dropped after the last full row."""
    totals = [json.loads(path.read_bytes())["totals"] for path in output.rglob("mdsmix.manifest")]
    return sum(total["tokens"] + total.get("lost_tokens", 0) for total in totals)


def mds_rows(output: Path) -> int:
    """Count tokens in rows of one column. The length is in its encoding or in every row."""
    return sum(_row_tokens(path, shard) * shard["samples"] for path, shard in _shards(output))


def mds_turns(output: Path) -> int:
    """Count tokens in rows of one json column that contains turns."""
    return sum(
        len(turn["input_ids"]) + len(turn["labels"])
        for path, _ in _shards(output)
        for sample in _samples(path.read_bytes())
        for turn in orjson.loads(sample[4:])  # after its size
    )


def ids_of_two_bytes(output: Path) -> int:
    """Count tokens in flat files of uint16."""
    paths = [path for ending in ("ds", "bin") for path in output.glob(f"*.{ending}")]
    return sum(path.stat().st_size for path in paths) // 2


def litdata(output: Path) -> int:
    return sum(chunk["dim"] for chunk in json.loads((output / "index.json").read_bytes())["chunks"])


def _shards(output: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    (index,) = [path for path in output.rglob("index.json") if path.parent.name != "logs"]
    for shard in json.loads(index.read_bytes())["shards"]:
        yield index.parent / shard["raw_data"]["basename"], shard


def _samples(data: bytes) -> Iterator[bytes]:
    count = int.from_bytes(data[:4], "little")
    offsets = np.frombuffer(data, "<u4", count + 1, 4).tolist()
    return (data[start:stop] for start, stop in pairwise(offsets))


def _row_tokens(path: Path, shard: dict[str, Any]) -> int:
    (encoding,) = shard["column_encodings"]
    if encoding.count(":") == 2:
        return int(encoding.rsplit(":", 1)[1])
    sample = next(_samples(path.read_bytes()))  # size, one byte of shape, two of length, ids
    return int.from_bytes(sample[5:7], "little")
