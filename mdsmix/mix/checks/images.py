"""Whether streams with images are read by a loader that reads images. A stored sample has one token for each image."""

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
    """The hash of the processor by whose token counts the stream's rows fit; None where none is known."""
    return stream.encoding.images.get("processor") if stream.encoding else None


def processor_of(mix: Mix, loader: Loader, stream: StreamInMix) -> tuple[str, Path] | None:
    """Hash and folder of the processor for the stream: the processor that the loader names, else the one published beside the stream. None
    where it cannot be opened here."""
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
    "warning",
    "Whether every row fits max_seq_len with its images is then known only when the loader comes to one that does not, which ends training.",
    "images-unplanned",
)
@check(
    "error",
    "Rows for another processor do not fit and end training; of one that is not equal a model is given other tokens, masks or pixels than "
    "transformers gives it; without one training ends at once.",
    "images-processor",
)
def images_planned(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if not (loader.is_own and has_images(stream.columns)):
        return
    name, planned = loader.dataset.get("processor"), planned_for(stream)
    hash, folder = processor_of(mix, loader, stream) or (None, None)
    of_all = {found for each in loader.streams if (found := planned_for(each))}
    # A processor folder that `convert` published is fetched from beside the stream, so it must lie there.
    is_ours = PROCESSOR_FOLDER.fullmatch(os.path.basename(str(name)))
    is_other = bool(hash or is_ours) and planned != hash
    rule = None
    if (planned and is_other) if name else (len(of_all) != 1 or planned != hash):
        rule = "images-processor"
    elif not planned or (name and not hash):
        rule = "images-unplanned"
    if rule:
        made = f"for the processor {planned}" if planned else "without a processor"
        again = mix.again(f" processor={name}" if name else "")
        yield Finding(
            f"{{streams}}: images, converted {made}, and that of {{loader}} is {name or 'not named'} ({hash or 'not to be found here'}).",
            "name the model's processor (processor: at the top of the recipe, dataset.processor in a YAML of your own), check where it can be "
            f"loaded, and {again}, which publishes it beside the streams.",
            id=rule,
        )
    longest = loader.max_seq_len or 0
    if planned and stream.encoding and stream.encoding.max_seq_len > longest:
        yield Finding(
            f"{{streams}}: converted for rows longer than the {longest:,} tokens of {{loader}}, and what does not fit with its images is not cut.",
            f"{mix.again(f' max_seq_len={longest}')}.",
            id="images-processor",
        )
    if mix.opened and stream.encoding and folder:
        own = [row_of("a row of the stream", sample) for sample in stream.head.samples]
        if found := difference(folder, stream.encoding, mix.opened, own):
            yield Finding(f"{found}.", f"{WAY_OUT}.", id="images-processor")
