"""The order of a large epoch, kept on the disk of the node: a start that has seen it reads it, where Streaming works it out again.

Streaming draws, divides and shuffles all samples of an epoch at its first batch, at every start: 20 s and 6 GB for 100 M samples
(`benchmarks/starting.py`), most of it a sort. Read from a file of 4 bytes a sample it takes a tenth of that. The file is named by a hash of
all that decides the order, and ends with a hash of all before it: a changed stream, weight, seed, batch or number of ranks has
another order, and a damaged file is no order at all. It only saves work and may be deleted. Small epochs, which take less than a
second, are left alone.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any
from uuid import uuid4

import numpy as np
import xxhash
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.encode.pretrained import cache_folder

log = logging.getLogger(__name__)
KEPT_FROM = 4_000_000
"Samples of an epoch: the order of fewer takes less than a second."
KEPT = 4
"Orders of this node's runs, the last used ones: 400 MB each for 100 M samples."
SHAPE, DIGEST = 40, 16
"Bytes of the five lengths of an order that a file begins with, and of the hash that it ends with."
ABANDONED = 3600
"Seconds since the last byte of a file that nobody writes any more."
DECIDE = (
    "epoch_size",
    "batching_method",
    "sampling_method",
    "sampling_granularity",
    "epoch_seed_change",
    "partition_algo",
    "num_canonical_nodes",
    "initial_physical_nodes",
    "batch_size",
    "shuffle",
    "shuffle_algo",
    "shuffle_seed",
    "shuffle_block_size",
)
"Attributes of a StreamingDataset that its batching methods read, but for the streams."
Ids = NDArray[np.int64]


def order_of(dataset: StreamingDataset, world: World, epoch: int, start: int) -> Ids:
    """int64 [nodes, ranks, workers, batches, batch size]: sample ids of the epoch from sample `start` on, -1 for none."""
    key = _key(_what_decides(dataset, world, epoch, start))
    work_out = partial(generate_work, dataset.batching_method, dataset, world, epoch, start)
    return _kept(cache_folder() / "orders" / key, work_out)


def _what_decides(dataset: Any, world: World, epoch: int, start: int) -> Iterator[Any]:
    yield version("mosaicml-streaming"), np.__version__
    yield [(name, getattr(dataset, name)) for name in DECIDE]
    yield [(s.choose, s.repeat, s.proportion) for s in dataset.streams]
    yield dataset.shards_per_stream.tolist()
    yield dataset.samples_per_shard.tobytes()
    yield world.num_nodes, world.ranks_per_node, world.workers_per_rank, epoch, start


def _key(parts: Iterator[Any]) -> str:
    digest = xxhash.xxh128()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode() + b"\0")
    return digest.hexdigest()


def _kept(path: Path, work_out: Callable[[], Ids]) -> Ids:
    if (ids := _read(path)) is None:
        ids = work_out()
        try:
            _keep(path, ids)
        except OSError as error:
            log.warning("The order of this epoch is not kept for the next start: %s", error)
    return ids


def _read(path: Path) -> Ids | None:
    """The ids in the file; None where there is none, or a damaged one."""
    try:
        whole = np.memmap(path, np.uint8, "r")
        if xxhash.xxh3_128_digest(whole[:-DIGEST]) != whole[-DIGEST:].tobytes():
            return None
        with suppress(OSError):  # of another user, or where nothing may be written
            path.touch()
    except (OSError, ValueError):  # none there, or an empty one
        return None
    shape, body = whole[:SHAPE].view(np.int64), whole[SHAPE:-DIGEST]
    is_small = body.size == 4 * shape.prod()
    return body.view(np.int32 if is_small else np.int64).reshape(shape).astype(np.int64)


def _keep(path: Path, ids: Ids) -> None:
    """Writes it by a rename, and deletes those that have not been used for longest."""
    is_small = ids.size and ids.max() < 1 << 31
    small = np.ascontiguousarray(ids, np.int32 if is_small else np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < 2 * small.nbytes:
        raise OSError(f"{path.parent} has no room for {small.nbytes:,} bytes")
    shape = np.array(ids.shape, np.int64).tobytes()
    digest = xxhash.xxh3_128(shape)
    digest.update(small.data)
    # Nodes that share the folder may have processes of one number.
    temporary = path.with_suffix(f".{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in (shape, small.data, digest.digest()):
                file.write(part)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _tidy(path.parent)


def _tidy(folder: Path) -> None:
    """Deletes the orders that have not been used for longest, and what killed starts had begun to write."""
    with suppress(OSError):  # another start does the same
        partly = set(folder.glob("*.tmp"))
        by_use = sorted(set(folder.iterdir()) - partly, key=lambda p: p.stat().st_mtime)
        killed = [p for p in partly if p.stat().st_mtime < time() - ABANDONED]
        for old in (*by_use[:-KEPT], *killed):
            old.unlink(missing_ok=True)
