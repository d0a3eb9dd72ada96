"""How many tokens a tool has written: a tool that is fast because it loses some must not
look fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson


def mdsmix(out: Path) -> int:
    """What the manifests say, those too that no sample holds: the rest of the last row."""
    totals = [json.loads(path.read_bytes())["totals"] for path in out.rglob("mdsmix.manifest")]
    return sum(each["tokens"] + each.get("lost_tokens", 0) for each in totals)


def mds_rows(out: Path) -> int:
    """Rows of one column whose length is in its encoding or, where it is not, stands in
    every row.
    """
    return sum(_row_tokens(path, shard) * shard["samples"] for path, shard in _shards(out))


def mds_turns(out: Path) -> int:
    """Rows of one json column that holds turns."""
    return sum(
        len(turn["input_ids"]) + len(turn["labels"])
        for path, _ in _shards(out)
        for sample in _samples(path.read_bytes())
        for turn in orjson.loads(sample[4:])  # behind its size
    )


def ids_of_two_bytes(out: Path) -> int:
    """Flat files of uint16."""
    paths = [path for ending in ("ds", "bin") for path in out.glob(f"*.{ending}")]
    return sum(path.stat().st_size for path in paths) // 2


def litdata(out: Path) -> int:
    return sum(chunk["dim"] for chunk in json.loads((out / "index.json").read_bytes())["chunks"])


def _shards(out: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    (index,) = [path for path in out.rglob("index.json") if path.parent.name != "logs"]
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
    sample = next(_samples(path.read_bytes()))  # size, one byte of shape, the length in two, ids
    return int.from_bytes(sample[5:7], "little")
