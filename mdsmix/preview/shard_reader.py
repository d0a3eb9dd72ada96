"""Samples of published shards, read up to a bound of bytes, and the images in them.

The bound counts a shard's table of offsets (4 bytes a sample), and samples at their mean size with
the gaps between them. A compressed shard counts whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load.layout import SamplePlace
from mdsmix.load.training_rows import RowImages
from mdsmix.mix.checks.conversion import find_processor
from mdsmix.mix.streams.mix import Mix, StreamInMix, list_stream_names
from mdsmix.shards.shard_samples import MOST_GAP_BYTES, Sample, read_samples
from mdsmix.shards.token_ids import find_id_columns, has_images
from mdsmix.storage import together
from mdsmix.tokenizer.card import image_tokens


class ImageSize(NamedTuple):
    """The size of an image of a row, in pixels, and its tokens."""

    height: int
    width: int
    tokens: int


@dataclass(frozen=True)
class Images:
    """How the images of a mix become tokens."""

    token: int
    "The token id that stands for an image."
    processor: str
    "The hash of the processor that counts the tokens of images."

    def sizes(self, pictures: RowImages) -> list[ImageSize]:
        """The size of each image of a row; MixRefused where the processor refuses one."""
        found = image_tokens(self.processor, ((h, w) for h, w in pictures.sizes))
        for said in found.values():
            if isinstance(said, str):
                raise MixRefused(f"{pictures.where}: {said}; convert the stream for it.")
        return [ImageSize(h, w, int(found[h, w])) for h, w in pictures.sizes]


def images_of(mix: Mix) -> Images | None:
    """The images of a mix's training streams; None where no stream holds any. RecipeError where no
    processor counts their tokens.
    """
    streams = [stream for stream in mix.train.streams if has_images(stream.columns)]
    if not streams:
        return None
    tokens = {id for s in streams if s.manifest for id in s.manifest.encoding.image_ids}
    found = find_processor(mix, mix.train, streams[0])
    if found is None or len(tokens) != 1:
        raise RecipeError(
            f"nothing here says how many tokens each image of {list_stream_names(streams)} becomes: name the processor by "
            "train_loader.dataset.processor, or convert again with processor: in the recipe, which publishes it beside the streams."
        )
    return Images(tokens.pop(), found[0])


def has_ids(stream: StreamInMix) -> bool:
    """Whether the stream holds token ids. The loader tokenizes the text of other streams."""
    return bool(find_id_columns(stream.columns)) and "text" not in stream.columns


ShardKey = tuple[int, int]
"The numbers of a stream and of a shard in it, each from 0."


@dataclass(slots=True)
class ShardReader:
    """Reads samples of the streams, `most` bytes in all. `read` counts the bytes."""

    streams: Sequence[StreamInMix]
    most: int
    read: int = 0

    def samples(self, places: Iterable[SamplePlace]) -> dict[SamplePlace, Sample] | None:
        """The decoded samples. None where they exceed the bound, and from then on. Unreachable
        where a sample cannot be read.
        """
        wanted = defaultdict[ShardKey, list[int]](list)
        for place in places:
            wanted[place.stream, place.shard].append(place.position)
        size = sum(self._size(key, len(positions)) for key, positions in wanted.items())
        if self.read + size > self.most:
            self.most = self.read
            return None
        self.read += size

        def read(key: ShardKey) -> dict[int, Sample]:
            stream = self.streams[key[0]]
            return read_samples(stream.folder, stream.shards[key[1]], wanted[key])

        found = zip(wanted, together(read, wanted), strict=True)
        return {SamplePlace(*key, at): sample for key, some in found for at, sample in some.items()}

    def _size(self, key: ShardKey, count: int) -> int:
        """The most bytes that `count` samples of a shard take to read."""
        shard = self.streams[key[0]].shards[key[1]]
        size, mean = shard.stored.bytes, shard.raw_data.bytes // shard.samples
        few = 4 * (shard.samples + 2) + count * (mean + MOST_GAP_BYTES)
        return size if shard.packing else min(size, few)

    def named(self, place: SamplePlace) -> dict[str, Any]:
        """The place of a sample by names: its `stream`, `shard` and `row`."""
        stream = self.streams[place.stream]
        shard = stream.shards[place.shard].stored.basename
        return {"stream": stream.name, "shard": shard, "row": place.position}
