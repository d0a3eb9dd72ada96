"""Whether streams of images are read by a loader that knows them: a stored sample has one token an image."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.encode.processor import open_processor
from mdsmix.errors import MdsmixError
from mdsmix.mix.findings import check_loaders, listed, names
from mdsmix.mix.streams import Loader, Mix, Stream
from mdsmix.shards.turns import has_images
from mdsmix.training.rules import Hit
from mdsmix.words import does


@check_loaders(
    "images-loader",
    "error",
    "LLM-Foundry's loaders read the turns beside the images and train on one bare placeholder for each, without a word.",
)
def images_loader(mix: Mix, loader: Loader) -> Iterator[Hit]:
    seeing = _seeing(loader)
    if seeing and not loader.is_own:
        yield Hit(
            f"{listed(seeing)} {does(seeing, 'holds', 'hold')} images, and {{loader}} is the {loader.name} loader, which reads none.",
            "set train_loader.name: mdsmix, under LLM-Foundry with mdsmix installed beside it (docs/plugin.md), or read it by mdsmix.load in "
            "a training loop of your own; or take the stream out.",
            names(seeing),
        )


def _seeing(loader: Loader) -> list[Stream]:
    return [stream for stream in loader.streams if has_images(stream.columns)]


def _planned(stream: Stream) -> str | None:
    """The hash of the processor by whose counts its rows fit."""
    manifest = stream.trusted_manifest
    return manifest.encoding.images.get("processor") if manifest else None


@check_loaders(
    "images-processor",
    "error",
    "Another processor makes other tokens of an image, so that rows no longer fit and training ends at the first that does not; without "
    "one it ends at once.",
)
def images_processor(mix: Mix, loader: Loader) -> Iterator[Hit]:
    seeing = _seeing(loader) if loader.is_own else []
    name = loader.dataset.get("processor")
    if seeing and not name:
        yield Hit(
            f"{listed(seeing)} {does(seeing, 'holds', 'hold')} images, and {{loader}} names no processor.",
            "write processor: (the model's folder or hub name) at the top of the recipe, or dataset.processor in a YAML of your own.",
            names(seeing),
        )
        return
    planned = [stream for stream in seeing if _planned(stream)]
    found = _hash(str(name)) if planned else None
    if wrong := [s for s in planned if found and _planned(s) != found]:
        yield Hit(
            f"{listed(wrong)} {does(wrong, 'was', 'were')} converted for another processor ({str(_planned(wrong[0]))[:8]}) than that of "
            f"{{loader}}, {name} ({str(found)[:8]}).",
            f"{mix.makers(wrong, 'convert')}; or name the processor of the conversion.",
            names(wrong),
        )
    longest = loader.max_seq_len or 0
    if short := [s for s in planned if s.manifest and s.manifest.encoding.max_seq_len > longest]:
        yield Hit(
            f"{listed(short)} {does(short, 'was', 'were')} converted for rows longer than the {longest:,} tokens of {{loader}}, and what does "
            "not fit with its images is not cut.",
            f"{mix.makers(short, 'convert', f' max_seq_len={longest}')}.",
            names(short),
        )


def _hash(name: str) -> str | None:
    """Of the processor; None where it cannot be looked at here."""
    try:
        return open_processor(name).hash
    except MdsmixError:
        return None


@check_loaders(
    "images-unplanned",
    "warning",
    "Whether every row fits max_seq_len with its images is then known only when the loader comes to one that does not, which ends training.",
)
def images_unplanned(mix: Mix, loader: Loader) -> Iterator[Hit]:
    name = loader.dataset.get("processor")
    seeing = _seeing(loader) if loader.is_own and name else []
    if blind := [stream for stream in seeing if not _planned(stream)]:
        yield Hit(
            f"{listed(blind)} {does(blind, 'was', 'were')} converted without a processor.",
            f"{mix.makers(blind, 'convert', f' processor={name}')}.",
            names(blind),
        )
    elif seeing and _hash(str(name)) is None:
        yield Hit(
            f"the processor {name} of {{loader}} cannot be looked at here.",
            "check where it can be loaded, for example on the machine that converts.",
            names(seeing),
        )
