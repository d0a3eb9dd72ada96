"""A published stream of any number of samples and shards, in seconds: rows of four tokens, no two
shards alike.

What a start costs grows with samples and with shards, and with no token of them: order, shuffle and
index know samples, never their bytes. So 100 M samples need not be 200 billion tokens: here each
has four of two bytes, and all the rest is as it is always, files of their own named by the hash of
their bytes, an index of 20,000 entries. Nothing is sparse, linked or left out.
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


def stream(folder: Path, samples: int, shards: int) -> Path:
    """The folder of such a stream, made where it is not there yet."""
    if (folder / INDEX).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.linspace(0, samples, shards + 1).astype(np.int64)
    tokens = np.arange(int(np.diff(ends).max()) * WIDTH, dtype=np.uint32)
    found = [
        _shard(folder, number, (tokens[: size * WIDTH] + number) % 60_000)
        for number, size in enumerate(np.diff(ends).tolist())
    ]
    (folder / INDEX).write_bytes(make_index(found).content)
    return folder


def _shard(folder: Path, number: int, tokens: np.ndarray) -> Shard:
    """The first tokens are the shard's number: no two are alike."""
    tokens[:2] = number % 60_000, number // 60_000
    body = tokens.astype(np.uint16).view(np.uint8)
    rows = Ragged.from_lengths(body, np.full(len(tokens) // WIDTH, 2 * WIDTH))
    content = b"".join(make_shard_parts(LAYOUT, rows))
    name = f"{(digest := xxhash.xxh128_hexdigest(content))}.mds"
    (folder / name).write_bytes(content)
    file = StoredFile(basename=name, bytes=len(content), hashes={"xxh128": digest})
    return make_shard(LAYOUT, len(rows), file, None)
