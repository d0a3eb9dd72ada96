"""Whether streams of images are read by a loader that knows them: a stored sample has one token an image."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mdsmix.encode.pretrained import open_processor
from mdsmix.encode.published_folders import (
    card_name,
    fetch_folder,
    name_at_hand,
    read_card,
)
from mdsmix.errors import MdsmixError
from mdsmix.kinds.processor_proof import WAY_OUT, difference, row_of
from mdsmix.mix.streams import Loader, Mix, StreamInMix, names
from mdsmix.recipe.rules import PROCESSOR_FOLDER
from mdsmix.shards.token_ids import has_images
from mdsmix.storage import Location, locate
from mdsmix.training.findings import Finding, Findings, check


@check(
    "error",
    "LLM-Foundry's loaders read the turns beside the images and train on one bare placeholder for each, without a word.",
)
def images_loader(loader: Loader) -> Findings:
    seeing = _seeing(loader)
    if seeing and not loader.is_own:
        yield _told(
            seeing,
            f"images, which the {loader.name} loader of {{loader}} does not read",
            "set train_loader.name: mdsmix, under LLM-Foundry with mdsmix installed beside it (docs/loading.md), or read it by mdsmix.load in "
            "a training loop of your own; or take the stream out.",
        )


def _told(streams: list[StreamInMix], problem: str, fix: str) -> Finding:
    return Finding(f"{{streams}}: {problem}.", fix, names(streams))


def _seeing(loader: Loader) -> list[StreamInMix]:
    return [stream for stream in loader.streams if has_images(stream.columns)]


def planned_for(stream: StreamInMix) -> str | None:
    """The hash of the processor by whose counts its rows fit."""
    return stream.encoding.images.get("processor") if stream.encoding else None


@check(
    "error",
    "Rows for another processor do not fit and end training; of one that is not equal a model is given other tokens, masks or pixels than "
    "transformers gives it; without one training ends at once.",
)
def images_processor(mix: Mix, loader: Loader) -> Findings:
    seeing, name = _seeing(loader) if loader.is_own else [], loader.dataset.get("processor")
    planned = [stream for stream in seeing if planned_for(stream)]
    if seeing and not name:
        yield from _unnamed(seeing, planned)
    found = processor_hash(mix, name) if planned and name else None
    if planned and name and not found and PROCESSOR_FOLDER.fullmatch(os.path.basename(str(name))):
        yield _told(
            planned,
            f"the processor {name} of {{loader}} is not here, and not beside these streams, from where the loader would fetch it",
            f"{mix.makers(planned, 'convert')}, which publishes it there.",
        )
    if wrong := [s for s in planned if found and planned_for(s) != found]:
        yield _told(
            wrong,
            f"converted for another processor ({planned_for(wrong[0])}) than that of {{loader}}, {name} ({found})",
            f"{mix.makers(wrong, 'convert')}; or name the processor of the conversion.",
        )
    longest = loader.max_seq_len or 0
    if short := [s for s in planned if s.encoding and s.encoding.max_seq_len > longest]:
        yield _told(
            short,
            f"converted for rows longer than the {longest:,} tokens of {{loader}}, and what does not fit with its images is not cut",
            f"{mix.makers(short, 'convert', f' max_seq_len={longest}')}.",
        )
    for stream in seeing:
        yield from _unequal(mix, loader, stream)


def _unnamed(seeing: list[StreamInMix], planned: list[StreamInMix]) -> Findings:
    """The loader then takes the processor that lies beside the streams, if they were converted for one."""
    is_one = len({planned_for(stream) for stream in planned}) == 1
    if not is_one or not all(map(_is_beside, planned)):
        yield _told(
            seeing,
            "images, and {loader} names no processor, nor lies one beside all streams that they were converted for",
            "write processor: (the model's folder or hub name) at the top of the recipe and convert again, or dataset.processor in a YAML of "
            "your own.",
        )


def _is_beside(stream: StreamInMix) -> bool:
    card = read_card(_home_of(stream))
    return bool(card and card.hash == planned_for(stream))


def _home_of(stream: StreamInMix) -> Location:
    """Where the processor that it was converted for was published."""
    manifest = stream.trusted_manifest
    assert manifest is not None, "it was planned"
    return stream.folder.parent.parent / str(manifest.processor_folder)


def processor_hash(mix: Mix, name: Any) -> str | None:
    """Of the processor; None where it cannot be looked at here."""
    try:
        folder = name_at_hand(str(name), mix.yaml.places)
        card = read_card(locate(folder)) if os.path.isdir(folder) else None
        return card.hash if card else open_processor(folder).hash
    except MdsmixError:
        return None


def _unequal(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """What the processor makes of whole conversations and the loader not of the stream's rows."""
    if mix.opened and stream.encoding and (folder := _folder(mix, loader, stream)):
        own = [row_of("a row of the stream", sample) for sample in stream.head.samples]
        if found := difference(folder, stream.encoding, mix.opened, own):
            yield Finding(f"{found}.", f"{WAY_OUT}.", (stream.name,))


def _folder(mix: Mix, loader: Loader, stream: StreamInMix) -> Path | None:
    """Of the processor that the loader will take; None where it cannot be opened here."""
    with suppress(MdsmixError):
        if name := loader.dataset.get("processor"):
            folder = name_at_hand(str(name), mix.yaml.places)
            is_fetched = (Path(folder) / card_name(Path(folder).name)).is_file()
            return Path(folder if is_fetched else open_processor(folder).path)
        if planned_for(stream):
            return fetch_folder(_home_of(stream))
    return None


@check(
    "warning",
    "Whether every row fits max_seq_len with its images is then known only when the loader comes to one that does not, which ends training.",
)
def images_unplanned(mix: Mix, loader: Loader) -> Findings:
    name = loader.dataset.get("processor")
    seeing = _seeing(loader) if loader.is_own else []
    blind = [stream for stream in seeing if not planned_for(stream)]
    if not name and len(blind) == len(seeing):
        return  # images-processor says so
    if blind:
        yield _told(
            blind,
            "converted without a processor",
            f"{mix.makers(blind, 'convert', f' processor={name}' if name else '')}.",
        )
    elif name and seeing and processor_hash(mix, name) is None:
        yield _told(
            seeing,
            f"the processor {name} of {{loader}} cannot be looked at here",
            "check where it can be loaded, for example on the machine that converts.",
        )
