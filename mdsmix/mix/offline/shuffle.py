"""Which samples are drawn, and the shuffle of them: a random number a sample, worked out and never stored.

The numbers are SplitMix64's. Its n-th number follows from n alone, so any part of the sequence is made again where it is
needed, at 100 M numbers a second, and no permutation of a stream is ever held in memory. All numbers of one seed differ, so
sorting by them is a shuffle without ties. numpy's own generators promise neither, nor the same numbers in every version.
Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.

Drawn samples are dealt into buckets, files on a local disk, by ranges of their numbers. Each bucket is sorted in memory, so the buckets
one behind the other are all samples in the order of their numbers, and memory holds one bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.shards.shard_layout import Rows
from mdsmix.shards.shard_samples import Samples

BLOCK = 1 << 20
"Numbers made at a time: 8 MB."
_TOP_BITS = 16

Keys = NDArray[np.uint64]


def seed_of(*parts: object) -> int:
    """64 bits from what a sequence is for, so that no two purposes share numbers."""
    return xxhash.xxh64_intdigest("\0".join(map(str, parts)))


def random_keys(seed: int, start: int, stop: int) -> Keys:
    """uint64 [stop - start]: the numbers `start` to `stop` of the seed's sequence, all different."""
    z = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Draw:
    """How often each sample of one stream is drawn: as often as all the others, and some of them once more.

    Those some are the samples with the smallest random keys: a choice without replacement, each sample as likely.
    """

    def __init__(self, samples: int, drawn: int, seed: int) -> None:
        self._copies, more = divmod(drawn, samples)
        self._seed = seed
        self._last = _kth_smallest(seed, samples, more) if more else None

    def copies(self, start: int, stop: int) -> NDArray[np.int64]:
        """int64 [stop - start]: of the samples `start` to `stop`, how often each is drawn."""
        copies = np.full(stop - start, self._copies, np.int64)
        if self._last is not None:
            copies += random_keys(self._seed, start, stop) <= self._last
        return copies


def _kth_smallest(seed: int, n: int, k: int) -> np.uint64:
    """The k-th smallest (from 1) of the first n keys, in memory for a 65,536th of them."""
    shift = np.uint64(64 - _TOP_BITS)
    counts = np.zeros(1 << _TOP_BITS, np.int64)
    for keys in _blocks(seed, n):
        counts += np.bincount((keys >> shift).astype(np.int64), minlength=len(counts))
    ends = np.cumsum(counts)
    top = int(np.searchsorted(ends, k))
    near = [keys[keys >> shift == np.uint64(top)] for keys in _blocks(seed, n)]
    within = k - 1 - int(ends[top] - counts[top])
    return np.uint64(np.sort(np.concatenate(near))[within])


def _blocks(seed: int, n: int) -> Iterator[Keys]:
    for start in range(0, n, BLOCK):
        yield random_keys(seed, start, min(n, start + BLOCK))


CHUNK = 1 << 12
"4,096 samples are joined at a time: their copy is a few MB, and the objects that slicing makes are few."
_HALF = np.uint64(32)


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

    def _append(self, bucket: int, block: list[bytes]) -> None:
        # Opened for each block, since a process may not hold ten thousand buckets open.
        with _explained(self._folder), (self._folder / str(bucket)).open("ab") as file:
            file.writelines(block)

    def shuffled(self) -> Iterator[Rows]:
        """The rows of each bucket, in their order, its file deleted. MdsmixError where a sample is not there any more."""
        found = 0
        for bucket in range(self._number):
            try:
                rows = _sorted(self._read(bucket))
            except ValueError:  # it is shorter than it says
                break
            found += len(rows)
            yield rows
            del rows  # or the next bucket is read while this one is still held
        if found != self._dealt:
            raise MdsmixError(
                f"{self._dealt} samples were written into {self._folder}, and {found} are there; nothing is published. "
                "Let no other program write or delete there, and run the same command again."
            )

    def _read(self, bucket: int) -> bytes:
        path = self._folder / str(bucket)
        if not path.exists():
            return b""
        with _explained(self._folder):
            data = path.read_bytes()
            path.unlink()
        return data


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreachable(
            f"the temporary folder {folder} cannot be used: {error.strerror}; nothing is published. Name another "
            "place with --tmp."
        ) from None


def _block(samples: Samples, rows: NDArray[np.int64], keys: Keys) -> list[bytes]:
    """Samples of one bucket: their number (uint64), keys (uint64 each), sizes (uint32 each), bytes."""
    starts, stops = samples.offsets[rows], samples.offsets[rows + 1]
    head = len(rows).to_bytes(8, "little")
    sizes = (stops - starts).astype("<u4").tobytes()
    return [
        head,
        keys.astype("<u8").tobytes(),
        sizes,
        _joined(memoryview(samples.data), starts, stops),
    ]


def _joined(data: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bytes:
    bounds = zip(starts.tolist(), stops.tolist(), strict=True)
    return b"".join([data[start:stop] for start, stop in bounds])


def _sorted(data: bytes) -> Rows:
    """The samples of a bucket's file in the order of their keys."""
    blocks = list(_places(data))
    if not blocks:
        return Rows(np.empty(0, np.uint8), np.empty(0, np.int64))
    keys, starts, sizes = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    order = np.argsort(keys)
    starts, sizes = starts[order], sizes[order]
    body = np.empty(int(sizes.sum()), np.uint8)
    ends = np.cumsum(sizes)
    for at in range(0, len(order), CHUNK):
        some = slice(at, at + CHUNK)
        chunk = _joined(memoryview(data), starts[some], (starts + sizes)[some])
        body[ends[at] - sizes[at] :][: len(chunk)] = np.frombuffer(chunk, np.uint8)
    return Rows(body, sizes)


def _places(data: bytes) -> Iterator[tuple[Keys, NDArray[np.int64], NDArray[np.int64]]]:
    """The keys, starts and sizes of the samples of each block; ValueError where blocks are not whole."""
    at = 0
    while at < len(data):
        count = int.from_bytes(data[at : at + 8], "little")
        keys = np.frombuffer(data, "<u8", count, at + 8)
        sizes = np.frombuffer(data, "<u4", count, at + 8 + 8 * count).astype(np.int64)
        ends = at + 8 + 12 * count + np.cumsum(sizes)
        yield keys, ends - sizes, sizes
        at = int(ends[-1])
    if at != len(data):
        raise ValueError("the last block is cut")
