"""Rows of images as long as the model sees them: how many tokens each image becomes, by its size, as when it was converted.

No image is decoded. What stands for an image is repeated as often as the processor's count says, which is the length that the loader's
row has; for people and programs the row is shown as it is stored, with one token an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mdsmix.encode.folders import fetch_folder
from mdsmix.encode.processor_server import SizeCounts
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load.training_rows import Row, RowRules
from mdsmix.load.vision import expanded
from mdsmix.mix.checks.images import planned_for, processor_hash
from mdsmix.mix.streams import Mix, StreamInMix
from mdsmix.shards.token_ids import has_images
from mdsmix.words import does


@dataclass(frozen=True)
class Images:
    """Of the streams of a mix."""

    token: int
    "The id that stands for one."
    counter: SizeCounts

    def counts(self, row: Row) -> list[int]:
        """Tokens of each image of a row; MixRefused where the processor refuses one."""
        if not row.pictures:
            return []
        sizes = [(h, w) for h, w in row.pictures.sizes]
        found = self.counter.of(sizes)
        for said in found.values():
            if isinstance(said, str):
                raise MixRefused(f"{row.pictures.where}: {said}; convert the stream for it.")
        return [int(found[size]) for size in sizes]

    def grown(self, row: Row, rules: RowRules) -> Row:
        """The row with its images' tokens; MixRefused where the loader raises."""
        if not row.pictures:
            return row
        pieces = [{"input_ids": np.full(n, self.token)} for n in self.counts(row)]
        return expanded(row, row.pictures, pieces, rules)


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
