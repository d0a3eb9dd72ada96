"""Samples of shards, read where the streams were published and up to a bound, and the images in them.

The bound counts a shard's table of offsets, 4 bytes a sample, and samples of the mean size with the gaps that are read along; of a compressed
shard all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mdsmix.encode.processor_server import SizeCounts
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import RowImages
from mdsmix.mix.checks.images import processor_of
from mdsmix.mix.streams import Mix, StreamInMix, names_listed
from mdsmix.shards.shard_samples import GAP, read_samples
from mdsmix.shards.token_ids import has_images, layout_of
from mdsmix.storage import together


class ImageSize(NamedTuple):
    """An image of a row."""

    height: int
    width: int
    tokens: int


@dataclass(frozen=True)
class Images:
    """Of the streams of a mix."""

    token: int
    "The id that stands for one."
    counter: SizeCounts

    def sizes(self, pictures: RowImages) -> list[ImageSize]:
        """Of each image of a row; MixRefused where the processor refuses one."""
        found = self.counter.of((h, w) for h, w in pictures.sizes)
        for said in found.values():
            if isinstance(said, str):
                raise MixRefused(f"{pictures.where}: {said}; convert the stream for it.")
        return [ImageSize(h, w, int(found[h, w])) for h, w in pictures.sizes]


def images_of(mix: Mix) -> Images | None:
    """None where no stream holds any. RecipeError where no processor says what they become."""
    streams = [stream for stream in mix.train.streams if has_images(stream.columns)]
    if not streams:
        return None
    tokens = {id for s in streams if s.manifest for id in s.manifest.encoding.image_ids}
    found = processor_of(mix, mix.train, streams[0])
    if found is None or len(tokens) != 1:
        raise RecipeError(
            f"nothing here says how many tokens each image of {names_listed(streams)} becomes: name the processor by "
            "train_loader.dataset.processor, or convert again with processor: in the recipe, which publishes it beside the streams."
        )
    return Images(tokens.pop(), SizeCounts(found[0]))


def has_ids(stream: StreamInMix) -> bool:
    """Whether it holds token ids; of others the loader tokenizes the text."""
    return bool(layout_of(stream.columns)) and "text" not in stream.columns


Sample = Mapping[str, Any]
ShardKey = tuple[int, int]
"Numbers of a stream, and of a shard in it."


@dataclass(slots=True)
class ShardReader:
    """Reads samples of the streams, at most so many bytes."""

    streams: Sequence[StreamInMix]
    most: int
    read: int = 0

    def samples(self, places: Iterable[SampleAt]) -> dict[SampleAt, Sample] | None:
        """The decoded samples. None where they go beyond the bound, and of all that is asked for later. Unreachable where one cannot be read."""
        wanted = defaultdict[ShardKey, list[int]](list)
        for place in places:
            wanted[place.stream, place.shard].append(place.position)
        size = sum(self._size(key, len(positions)) for key, positions in wanted.items())
        if self.read + size > self.most:
            self.most = self.read
            return None
        self.read += size

        def read(key: ShardKey) -> dict[int, dict[str, Any]]:
            stream = self.streams[key[0]]
            return read_samples(stream.folder, stream.shards[key[1]], wanted[key])

        found = zip(wanted, together(read, wanted), strict=True)
        return {SampleAt(*key, at): sample for key, some in found for at, sample in some.items()}

    def _size(self, key: ShardKey, count: int) -> int:
        """Bytes that are read for so many samples of a shard, at most."""
        shard = self.streams[key[0]].shards[key[1]]
        size, mean = shard.stored.bytes, shard.raw_data.bytes // shard.samples
        few = 4 * (shard.samples + 2) + count * (mean + GAP)
        return size if shard.packing else min(size, few)

    def name_of(self, place: SampleAt) -> str:
        """A sample, for a sentence."""
        stream = self.streams[place.stream]
        return f"stream {stream.name}, shard {stream.shards[place.shard].raw_data.basename}, row {place.position}"
