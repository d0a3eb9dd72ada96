"""The shuffle: samples are dealt into buckets by their random keys, and each bucket is sorted by them in memory.

A bucket holds the keys of one range, so the buckets one behind the other are all samples in the order of their keys: a
true shuffle, with one bucket in memory. The price is that the samples are written and read once more, on a local disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.mix.offline.draw import Keys, random_keys
from mdsmix.shards.mds import Rows
from mdsmix.shards.whole import Samples

CHUNK = 1 << 16
"Samples whose bytes are joined at a time, so that small ones cost an object each, but not all at once."
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Block:
    """Samples of one bucket as they were dealt: a file holds blocks one behind the other."""

    keys: Keys
    sizes: NDArray[np.uint32]
    body: memoryview

    def to_bytes(self) -> list[bytes | memoryview]:
        """Number of samples (uint64), keys (uint64 each), sizes (uint32 each), samples."""
        head = len(self.keys).to_bytes(8, "little")
        return [head, self.keys.astype("<u8").tobytes(), self.sizes.tobytes(), self.body]


class Buckets:
    """`number` files in `folder`; deals are numbered on, so what comes first matters."""

    def __init__(self, folder: Path, number: int, seed: int) -> None:
        self._folder, self._number, self._seed = folder, number, seed
        self._dealt = 0

    def deal(self, samples: Samples, rows: NDArray[np.int64]) -> None:
        """Deals out these rows of a shard; one that is there twice is two samples."""
        keys = random_keys(self._seed, self._dealt, self._dealt + len(rows))
        self._dealt += len(rows)
        # The upper half of (upper half of the key times the number): ranges of equal width.
        buckets = ((keys >> _HALF) * np.uint64(self._number)) >> _HALF
        order = np.argsort(buckets, kind="stable")
        ends = np.flatnonzero(np.diff(buckets[order])) + 1
        for start, stop in pairwise([0, *ends.tolist(), len(order)]):
            for at in range(start, stop, CHUNK):
                chosen = order[at : min(stop, at + CHUNK)]
                self._append(int(buckets[chosen[0]]), _block(samples, rows[chosen], keys[chosen]))

    def _append(self, bucket: int, block: Block) -> None:
        # Opened for each block, since a process may not hold ten thousand buckets open.
        with _explained(self._folder), (self._folder / str(bucket)).open("ab") as file:
            file.writelines(block.to_bytes())

    def shuffled(self) -> Iterator[Rows]:
        """The rows of each bucket, in their order, its file deleted. MdsmixError where a sample is not there any more."""
        found = 0
        for bucket in range(self._number):
            blocks = self._blocks(bucket)
            found += sum(len(block.keys) for block in blocks)
            yield _sorted(blocks)
        if found != self._dealt:
            raise MdsmixError(
                f"{self._dealt} samples were written into {self._folder}, and {found} are there; nothing is published. "
                "Let no other program write or delete there, and run the same command again."
            )

    def _blocks(self, bucket: int) -> list[Block]:
        path = self._folder / str(bucket)
        if not path.exists():
            return []
        with _explained(self._folder):
            data = memoryview(path.read_bytes())
            path.unlink()
        return list(_parsed(data))


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreachable(
            f"the temporary folder {folder} cannot be used: {error.strerror}; nothing is published. Name another "
            "place with --tmp."
        ) from None


def _block(samples: Samples, rows: NDArray[np.int64], keys: Keys) -> Block:
    starts, stops = samples.offsets[rows], samples.offsets[rows + 1]
    body = _joined(memoryview(samples.data), starts, stops)
    return Block(keys, (stops - starts).astype("<u4"), memoryview(body))


def _joined(data: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bytes:
    bounds = zip(starts.tolist(), stops.tolist(), strict=True)
    return b"".join([data[start:stop] for start, stop in bounds])


def _parsed(data: memoryview) -> Iterator[Block]:
    at = 0
    while at < len(data):
        count = int.from_bytes(data[at : at + 8], "little")
        keys = np.frombuffer(data, "<u8", count, at + 8)
        sizes = np.frombuffer(data, "<u4", count, at + 8 + 8 * count)
        at += 8 + 12 * count
        stop = at + int(sizes.sum())
        yield Block(keys, sizes, data[at:stop])
        at = stop


def _sorted(blocks: list[Block]) -> Rows:
    """All samples of the blocks in the order of their keys."""
    if not blocks:
        return Rows(np.empty(0, np.uint8), np.empty(0, np.int64))
    sizes = np.concatenate([block.sizes for block in blocks]).astype(np.int64)
    order = np.argsort(np.concatenate([block.keys for block in blocks]))
    data = memoryview(b"".join([block.body for block in blocks]))
    stops = np.cumsum(sizes)
    starts = stops - sizes
    body = bytearray()
    for at in range(0, len(order), CHUNK):
        chosen = order[at : at + CHUNK]
        body += _joined(data, starts[chosen], stops[chosen])
    return Rows(np.frombuffer(body, np.uint8), sizes[order])
