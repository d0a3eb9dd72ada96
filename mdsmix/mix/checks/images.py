"""Whether streams of images are read by a loader that knows them: a stored sample has one token an image."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mdsmix.encode.pretrained import open_processor
from mdsmix.encode.published_folders import fetch_folder, name_at_hand, read_card
from mdsmix.errors import MdsmixError
from mdsmix.kinds.processor_proof import WAY_OUT, difference, row_of
from mdsmix.mix.streams import Loader, Mix, StreamInMix
from mdsmix.recipe.rules import PROCESSOR_FOLDER
from mdsmix.shards.token_ids import has_images
from mdsmix.storage import locate
from mdsmix.training.findings import Finding, Findings, check


@check(
    "error",
    "LLM-Foundry's loaders read the turns beside the images and train on one bare placeholder for each, without a word.",
)
def images_loader(loader: Loader, stream: StreamInMix) -> Findings:
    if has_images(stream.columns) and not loader.is_own:
        yield Finding(
            f"{{streams}}: images, which the {loader.name} loader of {{loader}} does not read.",
            "set train_loader.name: mdsmix, under LLM-Foundry with mdsmix installed beside it (docs/loading.md), or read it by mdsmix.load in "
            "a training loop of your own; or take the stream out.",
        )


def planned_for(stream: StreamInMix) -> str | None:
    """The hash of the processor by whose counts its rows fit."""
    return stream.encoding.images.get("processor") if stream.encoding else None


def processor_of(mix: Mix, loader: Loader, stream: StreamInMix) -> tuple[str, Path] | None:
    """Hash and folder of the processor that the loader takes for the stream: the one that it names, else the one beside the stream; None
    where it cannot be looked at here."""
    name, manifest = loader.dataset.get("processor"), stream.trusted_manifest
    home: str | Path | None = None
    with suppress(MdsmixError):
        if name:
            home = name_at_hand(str(name), mix.yaml.places)
        elif manifest and manifest.processor_folder:
            home = fetch_folder(stream.folder.parent.parent / manifest.processor_folder)
        if home and (card := read_card(locate(home)) if os.path.isdir(home) else None):
            return card.hash, Path(home)
        if home:
            opened = open_processor(str(home))
            return opened.hash, Path(opened.path)
    return None


@check(
    "error",
    "Rows for another processor do not fit and end training; of one that is not equal a model is given other tokens, masks or pixels than "
    "transformers gives it; without one training ends at once.",
)
def images_processor(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if not (loader.is_own and has_images(stream.columns)):
        return
    name, planned, longest = (
        loader.dataset.get("processor"),
        planned_for(stream),
        loader.max_seq_len or 0,
    )
    hash, folder = processor_of(mix, loader, stream) or (None, None)
    if not name and (len(_planned(loader)) != 1 or planned != hash):
        yield Finding(
            "{streams}: images, and {loader} names no processor, nor lies one beside all streams that they were converted for.",
            "write processor: (the model's folder or hub name) at the top of the recipe and convert again, or dataset.processor in a YAML of "
            "your own.",
        )
    elif planned and not hash and PROCESSOR_FOLDER.fullmatch(os.path.basename(str(name))):
        yield Finding(
            f"{{streams}}: the processor {name} of {{loader}} is not here, and not beside the stream, from where the loader would fetch it.",
            f"{mix.again(stream, 'convert')}, which publishes it there.",
        )
    elif planned and hash and planned != hash:
        yield Finding(
            f"{{streams}}: converted for another processor ({planned}) than that of {{loader}}, {name} ({hash}).",
            f"{mix.again(stream, 'convert')}; or name the processor of the conversion.",
        )
    if planned and stream.encoding and stream.encoding.max_seq_len > longest:
        yield Finding(
            f"{{streams}}: converted for rows longer than the {longest:,} tokens of {{loader}}, and what does not fit with its images is not cut.",
            f"{mix.again(stream, 'convert', f' max_seq_len={longest}')}.",
        )
    if mix.opened and stream.encoding and folder:
        own = [row_of("a row of the stream", sample) for sample in stream.head.samples]
        if found := difference(folder, stream.encoding, mix.opened, own):
            yield Finding(f"{found}.", f"{WAY_OUT}.")


def _planned(loader: Loader) -> set[str]:
    """The processors that its streams were converted for."""
    return {found for stream in loader.streams if (found := planned_for(stream))}


@check(
    "warning",
    "Whether every row fits max_seq_len with its images is then known only when the loader comes to one that does not, which ends training.",
)
def images_unplanned(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    name, planned = loader.dataset.get("processor"), planned_for(stream)
    if not (loader.is_own and has_images(stream.columns)) or not (name or _planned(loader)):
        return  # images-processor says so
    if not planned:
        yield Finding(
            "{streams}: converted without a processor.",
            f"{mix.again(stream, 'convert', f' processor={name}' if name else '')}.",
        )
    elif name and not processor_of(mix, loader, stream):
        yield Finding(
            f"{{streams}}: the processor {name} of {{loader}} cannot be looked at here.",
            "check where it can be loaded, for example on the machine that converts.",
        )
