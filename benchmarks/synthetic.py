"""Writes a published stream of any number of samples and shards in seconds: rows of four tokens, no
two shards alike.

The cost of a start grows with samples and shards but not with tokens: order, shuffle and index use
samples, never their bytes. So 100 M samples need not be 200 billion tokens. Here each sample has
four tokens of two bytes. The files are normal otherwise: separate shards named by the hash of their
bytes, and an index of 20,000 entries. Nothing is sparse, linked or left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from mdsmix.ragged import Ragged
from mdsmix.shards.index import INDEX, Shard, StoredFile, make_index
from mdsmix.shards.shard_files import ShardLayout, make_shard, make_shard_parts

WIDTH = 4
LAYOUT = ShardLayout({"tokens": f"ndarray:uint16:{WIDTH}"})


def write_stream(folder: Path, samples: int, shards: int) -> Path:
    """Write such a stream unless the folder has one. Return the folder."""
    if (folder / INDEX).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.linspace(0, samples, shards + 1).astype(np.int64)
    tokens = np.arange(int(np.diff(ends).max()) * WIDTH, dtype=np.uint32)
    written = [
        _write_shard(folder, number, (tokens[: size * WIDTH] + number) % 60_000)
        for number, size in enumerate(np.diff(ends).tolist())
    ]
    (folder / INDEX).write_bytes(make_index(written).content)
    return folder


def _write_shard(folder: Path, number: int, tokens: np.ndarray) -> Shard:
    """Write a shard. Its first tokens are its number, so no two shards are alike."""
    tokens[:2] = number % 60_000, number // 60_000
    body = tokens.astype(np.uint16).view(np.uint8)
    rows = Ragged.from_lengths(body, np.full(len(tokens) // WIDTH, 2 * WIDTH))
    content = b"".join(make_shard_parts(LAYOUT, rows))
    digest = xxhash.xxh128_hexdigest(content)
    name = f"{digest}.mds"
    (folder / name).write_bytes(content)
    file = StoredFile(basename=name, bytes=len(content), hashes={"xxh128": digest})
    return make_shard(LAYOUT, len(rows), file, None)
