"""A stored shard, whole: read at once, held against the index's size and hash, decompressed, cut into its samples.

Whoever copies samples into another stream must not copy damage, so nothing is handed out before the hash is right. The
price is a whole shard in memory, 64 MiB as a rule and less than 4 GB whoever wrote it.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.shards.index import Shard, StoredFile
from mdsmix.shards.sample import DECOMPRESSED, can_unpack, decompressed
from mdsmix.storage import Location


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one shard: sample i is `data[offsets[i]:offsets[i + 1]]`."""

    data: bytes
    "The raw shard."
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


def read_whole(folder: Location, shard: Shard) -> Samples:
    """The shard's samples; Unreachable names a shard that is not what its index says."""
    file = folder / shard.stored.basename
    data = file.read()
    try:
        return samples_of(shard, data)
    except Exception as error:  # whatever a decompressor makes of damaged bytes
        raise Unreachable(
            f"the shard {file} is damaged: {str(error).rstrip('.')}; publish that stream again."
        ) from None


def samples_of(shard: Shard, data: bytes) -> Samples:
    """The samples in a shard's stored bytes; any error names what is wrong with them."""
    check_stored(shard.stored, data)
    raw = _raw(shard, data)
    return Samples(raw, _offsets(shard, raw))


def check_stored(stored: StoredFile, data: bytes, by: str = "index") -> None:
    """ValueError where the stored bytes are not of the size and hashes that the index says."""
    if len(data) != stored.bytes:
        raise ValueError(f"it has {len(data):,} bytes, and its {by} says {stored.bytes:,}")
    for algorithm, expected in stored.hashes.items():
        found = _digest(algorithm, data)
        if found and found != expected:
            raise ValueError(f"its {algorithm} is {found}, and its {by} says {expected}")


def _digest(algorithm: str, data: bytes) -> str | None:
    """None for a hash that is not known here."""
    if algorithm in xxhash.algorithms_available:
        return str(getattr(xxhash, algorithm)(data).hexdigest())
    if algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    return None


def _raw(shard: Shard, data: bytes) -> bytes:
    if not shard.packing:
        return data
    if not can_unpack(shard):
        raise ValueError(
            f"it is compressed by {shard.packing}, and mdsmix reads {', '.join(DECOMPRESSED)}"
        )
    raw = decompressed(io.BytesIO(data), shard.packing).read(shard.raw_data.bytes + 1)
    if len(raw) != shard.raw_data.bytes:
        raise ValueError(f"decompressed it is not the {shard.raw_data.bytes:,} bytes of its index")
    return raw


def _offsets(shard: Shard, raw: bytes) -> NDArray[np.int64]:
    count = int.from_bytes(raw[:4], "little")
    if count != shard.samples:
        raise ValueError(f"it holds {count} samples, and its index says {shard.samples}")
    if len(raw) < 4 * (count + 2):
        raise ValueError("its table of samples is cut off")
    offsets = np.frombuffer(raw, "<u4", count + 1, 4).astype(np.int64)
    if offsets[0] < 4 * (count + 2) or offsets[-1] != len(raw) or (np.diff(offsets) < 0).any():
        raise ValueError("its table of samples leads outside of it")
    return offsets
