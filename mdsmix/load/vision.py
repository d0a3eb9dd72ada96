"""Turns the images of a batch into the input of a vision-language model: tokens and pixels, both
made by the functions of the model's own (transformers) processor.

A stored row has one token for each image. Here, in the worker that makes the batch, its images are
decoded, rotated as their EXIF asks, and put through the processor once for the whole batch, so that
the pixels have the form that the model takes. The ids that the processor makes for each image
replace its one token. Nothing here depends on a family of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load.checked_stream import describe_error
from mdsmix.load.loader_settings import LoaderSettings
from mdsmix.load.training_rows import RowImages, RowRules, TrainingRow, cut_row
from mdsmix.processor.image_rows import Arrays, fill_row, replace_tokens, turn_upright
from mdsmix.processor.loaded import LoadedProcessor, make_blank_image
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.token_ids import IGNORED_LABEL
from mdsmix.storage import Location, locate
from mdsmix.tokenizer.published import fetch_folder, localize_name

PIXEL_ROWS = "pixel_rows"
"""An additional key of a batch that will be cut into microbatches. Its value is a dict: name of a
tensor of pixels -> how many of the tensor's entries belong to each row of the batch. Example:
{"pixel_values": [4, 0, 6]} for three rows, if the second has no image.
"""
DUMMY_SIZE = (56, 56)
"Height and width of the image that is added to a batch without images."


class ExpandedBatch(NamedTuple):
    """The rows of a batch with their images' tokens, and the pixels of all images."""

    rows: list[TrainingRow]
    pixels: Arrays


class ImageStream(NamedTuple):
    """A published stream of images."""

    root: Location
    manifest: Manifest


def open_vision(settings: LoaderSettings, has_images: bool) -> Vision | None:
    """Open the processor of a loader, or return None if it has none.

    The loader's section may name the processor. If it does not, and a stream has images, the
    processor is used that was published next to the streams.
    Raises RecipeError if the processor cannot be used, MixRefused if streams were not converted for
    it.
    """
    named_processor = settings.row_key("processor")
    if named_processor:
        name: str | None = localize_name(str(named_processor), settings.places)
    elif has_images:
        name = _fetch_published_processor(settings)
    else:
        return None
    if not name:
        return None
    refuse_packing(settings)
    vision = Vision(name, with_dummy=bool(settings.row_key("dummy_image", False)))
    # Some processors print ordinary text around each image. Only a conversion with a processor puts
    # this text into rows.
    if any(vision.processor.around):
        for stream in _list_image_streams(settings):
            if not stream.manifest.encoding.images.get("around"):
                raise MixRefused(
                    f"{stream.root} was converted without a processor, so its rows lack the text "
                    f"that {name} prints around each image; set processor: in the recipe and "
                    "convert the stream again."
                )
    return vision


def _list_image_streams(settings: LoaderSettings) -> Iterator[ImageStream]:
    """Yield those streams of the loader that were converted with images."""
    for stream in settings.section.stream_sections:
        root = locate(stream.url or "")
        manifest = read_manifest(root / str(stream.settings.get("split") or ""))
        if manifest and manifest.encoding.images:
            yield ImageStream(root, manifest)


def _fetch_published_processor(settings: LoaderSettings) -> str | None:
    """Fetch the processor that the streams were converted for, which is published next to them.
    Return its local folder, or None if it is not there.

    Raises MixRefused if the installed transformers makes another processor from its files.
    """
    for root, manifest in _list_image_streams(settings):
        if not manifest.processor_folder:
            continue
        published = root.parent / manifest.processor_folder
        folder = fetch_folder(published)
        if not folder:
            continue
        expected = manifest.encoding.images["processor"]
        actual = load_processor(str(folder)).digest
        if actual != expected:
            raise MixRefused(
                f"{published} contains the processor that the streams were converted for, whose "
                f"hash begins with {expected[:8]}. From the same files the installed transformers "
                f"{version('transformers')} makes a processor whose hash begins with {actual[:8]}: "
                "install the version of transformers with which mdsmix convert ran (the manifest "
                "does not state it), or name this processor by dataset.processor in the training "
                "YAML. A processor that is named there is used without this comparison."
            )
        return str(folder)
    return None


def refuse_packing(settings: LoaderSettings) -> None:
    """Raise RecipeError if the section sets packing, or encoder-decoder rows, with images."""
    is_packed = settings.row_key("packing_ratio", 1) != 1
    if is_packed or not settings.row_key("decoder_only_format", True):
        raise RecipeError(
            f"{settings.section.label}: a processor cannot be used with packing_ratio or "
            "decoder_only_format: false, since images cannot be packed or split into input and "
            "target; remove packing_ratio and set decoder_only_format: true."
        )


@cache
def load_processor(name: str) -> LoadedProcessor:
    """Load a processor, once in each process. Raises RecipeError if it cannot be loaded."""
    try:
        return LoadedProcessor(name)
    except Exception as error:
        raise RecipeError(
            f"the processor {name} cannot be opened ({describe_error(error)[:300]}); set "
            "dataset.processor to a folder or hub name that this machine can read."
        ) from error


@dataclass(slots=True)
class Vision:
    """The processor of a loader. Only its name is passed to spawned workers, which load it
    themselves.
    """

    name: str
    "The processor's local folder, or its name on the hub."
    with_dummy: bool
    """Add a masked image to a batch without images, so that every rank computes with images and
    none waits for another.
    """
    is_split: bool = False
    """Whether batches will be split into microbatches. Then each row is processed by itself, and
    PIXEL_ROWS in the batch maps pixels to rows.
    """

    @property
    def processor(self) -> LoadedProcessor:
        """The processor, loaded once in each process."""
        return load_processor(self.name)

    def expand(self, rows: Sequence[TrainingRow], rules: RowRules) -> ExpandedBatch:
        """Replace the placeholder of each image in a batch by the image's tokens, and make the
        pixels of all images.

        Raises MixRefused, with the name of the row, if an image cannot be decoded or does not fit.
        """
        pictures_of_rows = {n: row.pictures for n, row in enumerate(rows) if row.pictures}
        if not pictures_of_rows:
            return ExpandedBatch(list(rows), {})

        # Decode, then put all images through the processor: at once, or row by row if the batch
        # will be split.
        images_of_rows = {number: decode_images(row) for number, row in pictures_of_rows.items()}
        # The row that the message names if the processor refuses the batch.
        first_row_name = next(iter(pictures_of_rows.values())).where
        if self.is_split:
            pieces_of_rows, pixels = self._process_rows(images_of_rows, first_row_name, len(rows))
        else:
            pieces_of_rows, pixels = self._process([*images_of_rows.values()], first_row_name)

        # Replace the token of each image.
        expanded_rows = list(rows)
        for number, pieces in zip(pictures_of_rows, pieces_of_rows, strict=True):
            expanded_rows[number] = expand_images(rows[number], pieces, rules)
        return ExpandedBatch(expanded_rows, pixels)

    def _process_rows(
        self, images_of_rows: Mapping[int, Sequence[Any]], row_name: str, rows: int
    ) -> tuple[list[list[Arrays]], Arrays]:
        """Process the images of each row by themselves. Return what `_process` returns, with
        PIXEL_ROWS in the pixels.

        Args:
            images_of_rows: number of a row with images -> its images.
            row_name: the row that a message names.
            rows: number of rows in the batch, also without images.
        """
        pieces_of_rows = []
        pixels_of_rows = {}
        for number, images in images_of_rows.items():
            # `pieces` has the tokens of each image of the row.
            (pieces,), pixels_of_row = self._process([images], row_name)
            pieces_of_rows.append(pieces)
            pixels_of_rows[number] = pixels_of_row
        return pieces_of_rows, _join_pixels(pixels_of_rows, rows)

    def make_dummy(self) -> tuple[Arrays, Arrays]:
        """Return two dicts for a blank image: the arrays with a value per token, among them
        `input_ids`, and the pixels.
        """
        (pieces,), pixels = self.processor.process_images([[make_blank_image(DUMMY_SIZE)]])
        return pieces[0], pixels

    def _process(
        self, images_of_rows: Sequence[Sequence[Any]], row_name: str
    ) -> tuple[list[list[Arrays]], Arrays]:
        """Return the token arrays of each image of each row, and the pixels of the whole batch, as
        `process_images` of the processor gives them.

        Raises MixRefused if the processor fails.

        Args:
            images_of_rows: the images of each row.
            row_name: the row that the message names.
        """
        try:
            return self.processor.process_images(images_of_rows)
        except Exception as error:
            raise MixRefused(
                f"{row_name}: the processor {self.name} fails on a batch with the images of this "
                f"row ({describe_error(error)[:300]}); convert the stream with this processor in "
                "the recipe (processor: ...)."
            ) from error


def _join_pixels(pixels_of_rows: Mapping[int, Arrays], rows: int) -> Arrays:
    """Join the pixels of single rows into the pixels of their batch, and add PIXEL_ROWS.

    Args:
        pixels_of_rows: number of a row with images -> its pixels.
        rows: number of rows in the batch, also without images.
    """
    # All rows have the same keys.
    first = next(iter(pixels_of_rows.values()))
    keys = [key for key, value in first.items() if isinstance(value, torch.Tensor)]
    joined: Arrays = {}
    # For each key, how many entries of its joined tensor belong to each row; 0 without images.
    entries: dict[str, list[int]] = {}
    for key in keys:
        joined[key] = _stack_padded([pixels[key] for pixels in pixels_of_rows.values()])
        entries[key] = [0] * rows
        for number, pixels in pixels_of_rows.items():
            entries[key][number] = len(pixels[key])
    return joined | {PIXEL_ROWS: entries}


def _stack_padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors along the first dimension. In the other dimensions each is padded with zeros to
    the largest size, as processors pad a batch: [2, 5] and [1, 7] -> [3, 7].
    """
    sizes = torch.tensor([tensor.shape[1:] for tensor in tensors])
    missing = (sizes.amax(0) - sizes).tolist()
    padded = []
    for tensor, missing_of_tensor in zip(tensors, missing, strict=True):
        # torch's pad takes the last dimension first, and for each the zeros before and after.
        zeros = list[int]()
        for count in reversed(missing_of_tensor):
            zeros += [0, count]
        padded.append(pad(tensor, zeros))
    return torch.cat(padded)


def decode_images(pictures: RowImages) -> list[Any]:
    """Return the images of a row, decoded and rotated as their EXIF says. Raises MixRefused if one
    does not decode.
    """
    images = []
    for number, image in enumerate(pictures.images):
        try:
            images.append(turn_upright(image))
        except Exception as error:
            raise MixRefused(
                f"{pictures.where}: image {number} does not decode ({describe_error(error)}); "
                "convert the data with decode: full, which finds such images."
            ) from error
    return images


def expand_images(row: TrainingRow, pieces: Sequence[Arrays], rules: RowRules) -> TrainingRow:
    """Replace each image's placeholder token by the processor's tokens, and cut the row to
    max_seq_len.

    Raises MixRefused if an image would be cut.

    Args:
        pieces: for each image of the row, the processor's arrays, among them its `input_ids`.
    """
    pictures = row.pictures
    assert pictures
    spots = pictures.spots
    lengths = [len(piece["input_ids"]) for piece in pieces]
    # Where the last image ends after each placeholder, one token, is replaced.
    end = int(spots[-1]) + 1 - len(pieces) + sum(lengths)
    if end > rules.max_seq_len:
        raise MixRefused(
            f"{pictures.where}: the tokens of this row's images end at position {end:,}, beyond "
            f"max_seq_len {rules.max_seq_len:,}, and an image cannot be truncated; convert the "
            "stream with this processor in the recipe (processor: ...), which leaves such records "
            "out."
        )
    outputs = fill_row(row.input_ids, spots, pieces)
    ignored = [np.full(length, IGNORED_LABEL) for length in lengths]
    expanded_row = row._replace(
        input_ids=outputs.pop("input_ids"),
        labels=replace_tokens(row.labels, spots, ignored),
        outputs=outputs,
        pictures=None,
    )
    try:
        return cut_row(expanded_row, rules)
    except MixRefused as refusal:
        raise MixRefused(f"{pictures.where}: {refusal}") from refusal
