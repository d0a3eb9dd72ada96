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

from mdsmix.encode.processor_server import SizeCounts
from mdsmix.encode.published_folders import fetch_folder
from mdsmix.errors import MixRefused, RecipeError, Unreachable
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import TrainingRow
from mdsmix.mix.checks.images import planned_for, processor_hash
from mdsmix.mix.streams import Mix, StreamInMix
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_samples import can_unpack, read_samples, sample_runs, sample_table
from mdsmix.shards.token_ids import has_images
from mdsmix.storage import together
from mdsmix.words import does, plural


@dataclass(frozen=True)
class Images:
    """Of the streams of a mix."""

    token: int
    "The id that stands for one."
    counter: SizeCounts

    def counts(self, row: TrainingRow) -> list[int]:
        """Tokens of each image of a row; MixRefused where the processor refuses one."""
        if not row.pictures:
            return []
        sizes = [(h, w) for h, w in row.pictures.sizes]
        found = self.counter.of(sizes)
        for said in found.values():
            if isinstance(said, str):
                raise MixRefused(f"{row.pictures.where}: {said}; convert the stream for it.")
        return [int(found[size]) for size in sizes]


def images_of(mix: Mix) -> Images | None:
    """None where no stream holds any. RecipeError where no processor says what they become."""
    streams = [stream for stream in mix.train.streams if has_images(stream.columns)]
    if not streams:
        return None
    said = [s.manifest.encoding.images if s.manifest else {} for s in streams]
    tokens = {images.get("id", -1) for images in said} - {-1}
    digest = _digest(mix, streams)
    if digest is None or len(tokens) != 1:
        names = [stream.name for stream in streams]
        raise RecipeError(
            f"{', '.join(names)} {does(names, 'holds', 'hold')} images, and nothing here says how many tokens each becomes: name the processor by "
            "train_loader.dataset.processor, or convert again with processor: in the recipe, which publishes it beside the streams."
        )
    return Images(tokens.pop(), SizeCounts(digest))


def _digest(mix: Mix, streams: list[StreamInMix]) -> str | None:
    """The hash of the processor that the loader takes."""
    if name := mix.train.dataset.get("processor"):
        return processor_hash(mix, name)
    for stream in streams:
        manifest, digest = stream.manifest, planned_for(stream)
        if manifest and manifest.processor_folder:
            home = stream.folder.parent.parent / manifest.processor_folder
            return digest if fetch_folder(home) else None
    return None


Sample = Mapping[str, Any]
ShardKey = tuple[int, int]
"Numbers of a stream, and of a shard in it."


@dataclass(slots=True)
class ShardReader:
    """Reads of streams until `left` bytes are spent."""

    streams: Sequence[StreamInMix]
    left: int
    read: int = 0
    tables: dict[ShardKey, NDArray[np.int64]] = field(default_factory=dict)

    def samples(self, places: Iterable[SampleAt]) -> dict[SampleAt, Sample]:
        """The decoded samples, without those that the bound left out. Unreachable where one cannot be read."""
        wanted = defaultdict[ShardKey, list[int]](list)
        for place in places:
            wanted[place.stream, place.shard].append(place.position)
        shards = {key: self.streams[key[0]].shards[key[1]] for key in wanted}

        def table(key: ShardKey) -> NDArray[np.int64]:
            return sample_table(self.streams[key[0]].folder, shards[key])

        def read(key: ShardKey) -> dict[int, dict[str, Any]]:
            folder = self.streams[key[0]].folder
            return read_samples(folder, shards[key], self.tables[key], wanted[key])

        new = [
            key
            for key in wanted
            if key not in self.tables
            and can_unpack(shards[key])
            and self._pay(4 * (shards[key].samples + 2))
        ]
        self.tables |= zip(new, together(table, new), strict=True)
        paid = [
            key
            for key, at in wanted.items()
            if key in self.tables and self._pay(_cost(shards[key], self.tables[key], at))
        ]
        found = zip(paid, together(read, paid), strict=True)
        return {SampleAt(*key, at): sample for key, some in found for at, sample in some.items()}

    def _pay(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left, self.read = self.left - size, self.read + size
        return True

    def name_of(self, place: SampleAt) -> str:
        """A sample, for a sentence."""
        stream = self.streams[place.stream]
        return f"stream {stream.name}, shard {stream.shards[place.shard].raw_data.basename}, row {place.position}"


def _cost(shard: Shard, table: NDArray[np.int64], positions: Sequence[int]) -> int:
    if shard.zip_data:  # unpacked from its beginning on
        return int(shard.zip_data.bytes * table[max(positions) + 1] / max(1, table[-1]))
    return sum(int(table[b + 1] - table[a]) for a, b in sample_runs(table, positions))


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
