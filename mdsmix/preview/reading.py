"""Samples and tables of shards, read where the streams were published and up to a bound.

A shard's table of offsets takes 4 bytes a sample, and says where each begins. What is read first is what was asked for
first; what would go beyond the bound is left out, and whoever asked can tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.load.layout import SampleAt
from mdsmix.mix.streams import StreamInMix
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_samples import can_unpack, read_samples, sample_runs, sample_table
from mdsmix.storage import together
from mdsmix.words import plural

Sample = Mapping[str, Any]
Table = NDArray[np.int64]
ShardKey = tuple[int, int]
"Numbers of a stream, and of a shard in it."


@dataclass(slots=True)
class ShardReader:
    """Reads of streams until `left` bytes are spent."""

    streams: Sequence[StreamInMix]
    left: int
    read: int = 0
    tables: dict[ShardKey, Table] = field(default_factory=dict)

    def look(self, keys: Iterable[ShardKey]) -> bool:
        """Reads the tables of these shards; False where the bound left one out."""
        new = [
            key
            for key in dict.fromkeys(keys)
            if key not in self.tables and can_unpack(self._shard(key))
        ]
        paid = [key for key in new if self._pay(4 * (self._shard(key).samples + 2))]
        found = together(
            lambda key: sample_table(self.streams[key[0]].folder, self._shard(key)), paid
        )
        self.tables |= zip(paid, found, strict=True)
        return len(paid) == len(new)

    def samples(self, places: Iterable[SampleAt]) -> dict[SampleAt, Sample]:
        """The decoded samples, without those that the bound left out. Unreachable where one cannot be read."""
        wanted = defaultdict[ShardKey, set[int]](set)
        for place in places:
            wanted[place.stream, place.shard].add(place.position)
        self.look(wanted)
        paid = [k for k in wanted if k in self.tables and self._pay(self._cost(k, wanted[k]))]

        def samples_of(key: ShardKey) -> dict[int, dict[str, Any]]:
            folder = self.streams[key[0]].folder
            return read_samples(folder, self._shard(key), self.tables[key], sorted(wanted[key]))

        found = zip(paid, together(samples_of, paid), strict=True)
        return {SampleAt(*key, at): sample for key, some in found for at, sample in some.items()}

    def _shard(self, key: ShardKey) -> Shard:
        return self.streams[key[0]].shards[key[1]]

    def _cost(self, key: ShardKey, positions: set[int]) -> int:
        table, shard = self.tables[key], self._shard(key)
        if shard.zip_data:  # unpacked from its beginning on
            return int(shard.zip_data.bytes * table[max(positions) + 1] / max(1, table[-1]))
        return sum(int(table[b + 1] - table[a]) for a, b in sample_runs(table, positions))

    def _pay(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left, self.read = self.left - size, self.read + size
        return True


def require_shards(streams: Sequence[StreamInMix]) -> None:
    """Unreachable where a shard is not stored as its index says: training would end, or hang, when it comes to one of its rows.
    One listing a stream."""
    together(lambda stream: stream.files, streams)
    for stream in streams:
        lacking = [shard for shard in stream.shards if not stream.holds(shard)]
        if lacking:
            name, stored = lacking[0].stored.basename, lacking[0].stored.missing_from(stream.files)
            raise Unreachable(
                f"The stream {stream.name} lacks {plural(len(lacking), 'shard')} of {len(stream.shards):,} at {stream.folder} "
                f"({name}: {stored}), and training would lose the rows in it; convert it again, or restore it there."
            )
        if not stream.index.samples:
            raise Unreachable(
                f"The stream {stream.name} at {stream.folder} has no samples, and Streaming refuses it; convert it again or take "
                "it out of the mix."
            )
