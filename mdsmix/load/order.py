"""The order of a large epoch, kept on the disk of the node: a start that has seen it reads it, where Streaming works it out again.

Streaming draws, divides and shuffles all samples of an epoch at its first batch, at every start: 20 s and 6 GB for 100 M samples
(`benchmarks/starting.py`), most of it a sort. Read from a file of 4 bytes a sample it takes a tenth of that. The file is named by a hash of
all that decides the order, and begins with a hash of what it holds: a changed stream, weight, seed, batch or number of ranks has
another order, and a damaged file is no order at all. It only saves work and may be deleted. Small epochs, which take less than a
second, are left alone.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.encode.tokenizer import cache_folder

log = logging.getLogger(__name__)
KEPT_FROM = 4_000_000
"Samples of an epoch: the order of fewer takes less than a second."
KEPT = 4
"Orders of this node's runs, the last used ones: 400 MB each for 100 M samples."
DECIDE = (
    *(
        "epoch_size",
        "batching_method",
        "sampling_method",
        "sampling_granularity",
        "epoch_seed_change",
    ),
    *("partition_algo", "num_canonical_nodes", "initial_physical_nodes", "batch_size"),
    *("shuffle", "shuffle_algo", "shuffle_seed", "shuffle_block_size"),
)
"Attributes of a StreamingDataset that its batching methods read, but for the streams."
Order = NDArray[np.int64] | NDArray[np.int32]


def order_of(dataset: StreamingDataset, world: World, epoch: int, start: int) -> Order:
    """int64 [nodes, ranks, workers, batches, batch size], int32 where it was kept: sample ids of the epoch from sample `start` on, -1
    for none."""

    def work_out() -> Order:
        found: Order = generate_work(dataset.batching_method, dataset, world, epoch, start)
        return found

    if dataset.epoch_size < KEPT_FROM:
        return work_out()
    key = _key(_what_decides(dataset, world, epoch, start))
    return _kept(cache_folder() / "orders" / f"{key}.npy", work_out)


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


def _kept(path: Path, work_out: Callable[[], Order]) -> Order:
    found = _read(path)
    if found is None:
        found = work_out()
        try:
            _keep(path, found)
        except OSError as error:
            log.warning("The order of this epoch is not kept for the next start: %s", error)
    return found


def _read(path: Path) -> Order | None:
    """The array in the file, which is mapped and not copied."""
    try:
        stored: Order = np.lib.format.open_memmap(path, mode="r")  # type: ignore[no-untyped-call]
        with path.open("rb") as file:
            file.seek(-16, os.SEEK_END)
            digest = file.read()
        if xxhash.xxh3_128_digest(stored) != digest:
            return None
        path.touch()
    except (OSError, ValueError, EOFError):  # none there, or half of one
        return None
    return stored


def _keep(path: Path, order: Order) -> None:
    """Writes it by a rename, and deletes those that have not been used for longest."""
    fits = order.size and order.max() < 1 << 31
    small = np.ascontiguousarray(order, np.int32 if fits else np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < 2 * small.nbytes:
        raise OSError(f"{path.parent} has no room for {small.nbytes:,} bytes")
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.save(file, small)
        file.write(xxhash.xxh3_128_digest(small))
    temporary.replace(path)
    by_use = sorted(path.parent.glob("*.npy"), key=lambda p: p.stat().st_mtime)
    for old in by_use[:-KEPT]:
        old.unlink(missing_ok=True)
