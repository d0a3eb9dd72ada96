"""Whether streams of images are read by a loader that knows them: a stored sample has one token an image."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.mix.findings import check_loaders, listed, names
from mdsmix.mix.streams import Loader, Mix
from mdsmix.shards.turns import has_images
from mdsmix.training.rules import Hit
from mdsmix.words import does


@check_loaders(
    "images-loader",
    "error",
    "LLM-Foundry's loaders read the turns beside the images and train on one bare placeholder for each, without a word.",
)
def images_loader(mix: Mix, loader: Loader) -> Iterator[Hit]:
    seeing = [stream for stream in loader.streams if has_images(stream.columns)]
    if seeing and not loader.is_own:
        yield Hit(
            f"{listed(seeing)} {does(seeing, 'holds', 'hold')} images, and {{loader}} is the {loader.name} loader, which reads none.",
            "set train_loader.name: mdsmix, under LLM-Foundry with mdsmix installed beside it (docs/plugin.md), or read it by mdsmix.load in "
            "a training loop of your own; or take the stream out.",
            names(seeing),
        )
