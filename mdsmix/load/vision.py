"""Images of a batch -> what a model that sees takes: expanded tokens and pixels, both by the
processor's own functions.

A stored row has one token an image. Here, in the worker that makes the batch, its images are
decoded, turned as their EXIF asks, and put through the processor once for the whole batch, so that
pixels come as that model wants them; the ids that the processor makes of each placeholder take its
place. Nothing of a family of models is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load.dataset import describe_error
from mdsmix.load.loader_settings import LoaderSettings
from mdsmix.load.training_rows import RowImages, RowRules, TrainingRow, cut_row
from mdsmix.processor.loaded import (
    Arrays,
    LoadedProcessor,
    fill_row,
    make_blank_image,
    replace_tokens,
    turn_upright,
)
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.token_ids import IGNORED_LABEL
from mdsmix.storage import Location, locate
from mdsmix.tokenizer.published import fetch_folder, localize_name

PIXEL_ROWS = "pixel_rows"
"""Key of a batch that will be cut into microbatches. Its value: name of a tensor of pixels -> the
number of its entries of each row.
"""
DUMMY_SIZE = (56, 56)
"Height and width of the image of a batch without one."


def open_vision(settings: LoaderSettings, has_images: bool) -> Vision | None:
    """The Vision of a loader: of the processor that its section names, else, for streams of images,
    of the one that lies beside them; None where there is neither. RecipeError where the processor
    cannot be used, MixRefused where streams were not converted for it.
    """
    named = settings.row_key("processor")
    if not (named or has_images):
        return None
    name = localize_name(str(named), settings.places) if named else _published(settings)
    if not name:
        return None
    refuse_packing(settings)
    vision = Vision(name, with_dummy=bool(settings.row_key("dummy_image", False)))
    for root, manifest in _converted(settings) if any(vision.processor.around) else ():
        if not manifest.encoding.images.get("around"):
            raise MixRefused(
                f"{root} was converted without a processor, and {name} prints text around each image, which its rows lack: write "
                "processor: into the recipe and convert it again."
            )
    return vision


def _converted(settings: LoaderSettings) -> Iterator[tuple[Location, Manifest]]:
    """The streams of images, each with its manifest."""
    for stream in settings.section.stream_sections:
        root = locate(stream.url or "")
        manifest = read_manifest(root / str(stream.settings.get("split") or ""))
        if manifest and manifest.encoding.images:
            yield root, manifest


def _published(settings: LoaderSettings) -> str | None:
    """The local folder of the processor for which streams were converted, fetched from beside them;
    None where none lies there. MixRefused where this transformers makes another processor of it.
    """
    for root, manifest in _converted(settings):
        home = root.parent / (manifest.processor_folder or "")
        if manifest.processor_folder and (folder := fetch_folder(home)):
            digest, found = (
                manifest.encoding.images["processor"],
                load_processor(str(folder)).digest,
            )
            if found != digest:
                raise MixRefused(
                    f"{home} holds the processor for which the streams were converted ({digest[:8]}), and transformers "
                    f"{version('transformers')} makes another of it ({found[:8]}): install the version that converted, or name it by "
                    "dataset.processor to have each image's count compared instead."
                )
            return str(folder)
    return None


def refuse_packing(settings: LoaderSettings) -> None:
    """RecipeError where the section asks for packing, or for encoder-decoder rows, with images."""
    own = settings.row_key
    if own("packing_ratio", 1) != 1 or not own("decoder_only_format", True):
        raise RecipeError(
            f"{settings.section.label}: a processor stands beside packing_ratio or decoder_only_format: false, and images are seen in rows of "
            "their own alone: take packing_ratio out and set decoder_only_format: true."
        )


@cache
def load_processor(name: str) -> LoadedProcessor:
    """The processor, opened once a process; RecipeError where it cannot be."""
    try:
        return LoadedProcessor(name)
    except Exception as error:
        raise RecipeError(
            f"the processor {name} cannot be opened ({describe_error(error)[:300]}); correct dataset.processor, a folder or hub name that this machine reaches."
        ) from error


@dataclass(slots=True)
class Vision:
    """The processor of a loader. Workers that are started by spawning open it themselves."""

    name: str
    with_dummy: bool
    """A batch without an image gets a masked one, so that no rank leaves out what the others wait
    for.
    """
    is_split: bool = False
    """Batches are cut into microbatches: each row is put through the processor by itself, and ROWS
    says which pixels are whose.
    """

    @property
    def processor(self) -> LoadedProcessor:
        return load_processor(self.name)

    def expand(
        self, rows: Sequence[TrainingRow], rules: RowRules
    ) -> tuple[list[TrainingRow], Arrays]:
        """The rows with their images' tokens, and the pixels of all; MixRefused names the row that
        cannot be.
        """
        found, shown = list(rows), {n: p for n, row in enumerate(rows) if (p := row.pictures)}
        if not shown:
            return found, {}
        images = [[decode_image(p, i) for i in range(len(p.images))] for p in shown.values()]
        where = next(iter(shown.values())).where
        if self.is_split:
            each = [self._processed([of], where) for of in images]
            made = [pieces for (pieces,), _ in each]
            pixels = _joint(dict(zip(shown, (of for _, of in each), strict=True)), len(rows))
        else:
            made, pixels = self._processed(images, where)
        for number, pieces in zip(shown, made, strict=True):
            found[number] = expand_images(rows[number], pieces, rules)
        return found, pixels

    def dummy(self) -> tuple[Arrays, Arrays]:
        """The tokens of a blank image, and its pixels."""
        (row,), pixels = self.processor.process_images([[make_blank_image(DUMMY_SIZE)]])
        return row[0], pixels

    def _processed(self, images: Sequence[Sequence[Any]], where: str) -> Any:
        try:
            return self.processor.process_images(images)
        except Exception as error:
            raise MixRefused(
                f"{where}: the processor {self.name} refuses a batch with its images ({describe_error(error)[:300]}); convert the stream for this processor."
            ) from error


def _joint(apart: Mapping[int, Arrays], rows: int) -> Arrays:
    """Joins the pixels of rows (number of a row -> pixels) into those of their batch. ROWS counts
    each row's entries of each tensor.
    """
    first = next(iter(apart.values()))
    keys = [key for key, value in first.items() if isinstance(value, torch.Tensor)]
    counts = {key: [len(apart[n][key]) if n in apart else 0 for n in range(rows)] for key in keys}
    joint = {key: _stacked([pixels[key] for pixels in apart.values()]) for key in keys}
    return joint | {PIXEL_ROWS: counts}


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors end to end, each filled with zeros to the largest in its other dimensions, as
    processors fill a batch.
    """
    sizes = torch.tensor([tensor.shape[1:] for tensor in tensors])
    # torch's pad takes the last dimension first, and for each the zeros before and behind.
    each = zip(tensors, (sizes.amax(0) - sizes).tolist(), strict=True)
    return torch.cat(
        [pad(tensor, [n for more in of[::-1] for n in (0, more)]) for tensor, of in each]
    )


def decode_image(pictures: RowImages, number: int) -> Any:
    """An image as it is seen; MixRefused where it does not decode."""
    try:
        return turn_upright(pictures.images[number])
    except Exception as error:
        raise MixRefused(
            f"{pictures.where}: image {number} does not decode ({describe_error(error)}); convert the data with decode: full."
        ) from error


def expand_images(row: TrainingRow, pieces: Sequence[Arrays], rules: RowRules) -> TrainingRow:
    """The row with the processor's tokens for each image in place of its one token; MixRefused
    where an image would be cut.
    """
    pictures = row.pictures
    assert pictures
    spots, lengths = pictures.spots, [len(piece["input_ids"]) for piece in pieces]
    end = int(spots[-1]) + 1 - len(pieces) + sum(lengths)
    if end > rules.max_seq_len:
        raise MixRefused(
            f"{pictures.where}: its images end at token {end:,} of at most {rules.max_seq_len:,}, and no image is cut; convert the stream with "
            "this processor in the recipe (processor: ...), which leaves such records out."
        )
    outputs = fill_row(row.input_ids, spots, pieces)
    grown = row._replace(
        input_ids=outputs.pop("input_ids"),
        labels=replace_tokens(row.labels, spots, [np.full(n, IGNORED_LABEL) for n in lengths]),
        outputs=outputs,
        pictures=None,
    )
    try:
        return cut_row(grown, rules)
    except MixRefused as refusal:
        raise MixRefused(f"{pictures.where}: {refusal}") from refusal
