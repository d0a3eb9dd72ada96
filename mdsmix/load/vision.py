"""Images of a batch -> what a model that sees takes: expanded tokens and pixels, both by the processor's own functions.

A stored row has one token an image. Here, in the worker that makes the batch, its images are decoded, turned as their EXIF asks, and
put through the processor once for the whole batch, so that pixels come as that model wants them; the ids that the processor
makes of each placeholder take its place. Nothing of a family of models is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from mdsmix.encode.processor_process import LoadedProcessor
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load.training_rows import IGNORED, Pictures, Row, RowRules, cut_to

Pixels = dict[str, Any]
ROWS = "pixel_rows"
"Key of a batch that will be cut: tensor of pixels -> how many of its entries each row has."
DUMMY = (56, 56)
"Height and width of the image of a batch without one."
_open: dict[str, LoadedProcessor] = {}


def opened(name: str) -> LoadedProcessor:
    """The processor, opened once a process; RecipeError where it cannot be."""
    if name not in _open:
        try:
            seeing = LoadedProcessor(name)
            assert seeing.token_id >= 0
        except Exception as error:
            why = " ".join(str(error).split())[:300].rstrip(".")
            raise RecipeError(
                f"the processor {name} cannot be opened ({why}); correct dataset.processor, a folder or hub name that this machine reaches."
            ) from error
        _open[name] = seeing
    return _open[name]


@dataclass(slots=True)
class Vision:
    """The processor of a loader. Workers that are started by spawning open it themselves."""

    name: str
    with_dummy: bool = False
    "A batch without an image gets a masked one, so that no rank leaves out what the others wait for."
    is_split: bool = False
    "Batches are cut into microbatches: each row is put through the processor by itself, and ROWS says what of the pixels is whose."
    _planned: dict[tuple[int, int], int] = field(default_factory=dict)
    _is_compared: bool = False

    @property
    def seeing(self) -> LoadedProcessor:
        return opened(self.name)

    def expand(self, rows: Sequence[Row], rules: RowRules) -> tuple[list[Row], Pixels]:
        """The rows with their images' tokens, and the pixels of all; MixRefused names the row that cannot be."""
        found, shown = list(rows), [(n, p) for n, row in enumerate(rows) if (p := row.pictures)]
        if not shown:
            return found, {}
        images = [[decoded(p, i) for i in range(len(p.images))] for _, p in shown]
        see = self._seen_by_row if self.is_split else self._seen
        made, pixels = see(images, shown[0][1].where)
        if self.is_split:
            pixels[ROWS] = _of_all(pixels[ROWS], [n for n, _ in shown], len(rows))
        for (number, pictures), of, pieces in zip(shown, images, made, strict=True):
            self._compare(pictures.where, of, pieces)
            found[number] = expanded(rows[number], pictures, pieces, rules)
        return found, pixels

    def dummy(self) -> tuple[dict[str, Any], Pixels]:
        """What stands for an image that nobody looks at, and its pixels."""
        from PIL import Image

        (row,), pixels = self.seeing.see([[Image.new("RGB", DUMMY[::-1])]])
        return row[0], pixels

    def _seen(self, images: Sequence[Sequence[Any]], where: str) -> Any:
        try:
            return self.seeing.see(images)
        except Exception as error:
            why = " ".join(str(error).split())[:300].rstrip(".")
            raise MixRefused(
                f"{where}: the processor {self.name} refuses a batch with its images ({why}); convert the stream for this processor."
            ) from error

    def _seen_by_row(self, images: Sequence[Sequence[Any]], where: str) -> Any:
        """The same as `_seen`, and under ROWS how many entries of each tensor are of each row. MixRefused where rows by themselves
        become other pixels than together, which is looked at once a process."""
        each = [self._seen([of], where) for of in images]
        made, apart = [rows[0] for rows, _ in each], [pixels for _, pixels in each]
        joint = _joint(apart)
        if not self._is_compared and len(images) > 1:
            if not _same(joint, self._seen(images, where)[1]):
                raise MixRefused(
                    f"{where}: the processor {self.name} makes other pixels of a batch than of its rows, so that its batches cannot be cut "
                    "into microbatches: read the stream by mdsmix.load in a training loop of your own."
                )
            self._is_compared = True
        joint[ROWS] = {key: [len(pixels[key]) for pixels in apart] for key in joint}
        return made, joint

    def _compare(self, where: str, images: Sequence[Any], pieces: Sequence[dict[str, Any]]) -> None:
        """MixRefused where an image became other than what its size was planned for."""
        if not self.seeing.has_function:
            return
        sizes = [(image.height, image.width) for image in images]
        if missing := sorted(set(sizes) - self._planned.keys()):
            self._planned |= zip(missing, self.seeing.counts(missing), strict=True)
        for size, piece in zip(sizes, pieces, strict=True):
            if len(piece["input_ids"]) != self._planned[size]:
                raise MixRefused(
                    f"{where}: an image of {size[1]} x {size[0]} became {len(piece['input_ids'])} tokens, and the processor's own count "
                    f"is {self._planned[size]}; name the processor that the stream was converted for."
                )


def _joint(apart: Sequence[Pixels]) -> Pixels:
    """Pixels of rows -> of their batch."""
    keys = [key for key, value in apart[0].items() if isinstance(value, torch.Tensor)]
    return {key: _stacked([pixels[key] for pixels in apart]) for key in keys}


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """End to end, each filled with zeros to the largest in its other dimensions, as processors fill a batch."""
    sizes = torch.tensor([tensor.shape[1:] for tensor in tensors])
    missing = sizes.amax(0) - sizes
    # torch names the last dimension first, each by what stands before and behind.
    each = zip(tensors, missing.tolist(), strict=True)
    return torch.cat(
        [pad(tensor, [n for more in of[::-1] for n in (0, more)]) for tensor, of in each]
    )


def _same(one: Pixels, other: Pixels) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _of_all(
    counts: Mapping[str, Sequence[int]], shown: Sequence[int], rows: int
) -> dict[str, list[int]]:
    """Counts of the rows with images -> of all rows of the batch."""
    found = {key: [0] * rows for key in counts}
    for key, of in counts.items():
        for number, count in zip(shown, of, strict=True):
            found[key][number] = count
    return found


def decoded(pictures: Pictures, number: int) -> Any:
    """An image as it is seen; MixRefused where it does not decode, or has another size than was stored."""
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(pictures.images[number]).convert("RGB")
    except Exception as error:
        raise MixRefused(
            f"{pictures.where}: image {number} does not decode ({' '.join(str(error).split())}); convert the data with decode: full."
        ) from error
    if [image.height, image.width] != list(pictures.sizes[number]):
        raise MixRefused(
            f"{pictures.where}: image {number} has {image.height} x {image.width} pixels, and {pictures.sizes[number]} are stored; convert it again."
        )
    return image


def expanded(
    row: Row, pictures: Pictures, pieces: Sequence[dict[str, Any]], rules: RowRules
) -> Row:
    """The row with what stands for each image in place of its token; MixRefused where one would be cut."""
    ids, labels = ([*_parts(each, pictures.spots)] for each in (row.input_ids, row.labels))
    end = sum(map(len, ids[:-1])) + sum(len(piece["input_ids"]) for piece in pieces)
    if end > rules.max_seq_len:
        raise MixRefused(
            f"{pictures.where}: its images end at token {end:,} of at most {rules.max_seq_len:,}, and no image is cut; convert the stream with "
            "this processor in the recipe (processor: ...), which leaves such records out."
        )
    nothing = [np.full(len(piece["input_ids"]), IGNORED) for piece in pieces]
    zeros = [np.zeros(len(part), np.int64) for part in ids]
    woven = {key: _woven(zeros, [piece[key] for piece in pieces]) for key in pieces[0]}
    woven["input_ids"] = _woven(ids, [piece["input_ids"] for piece in pieces])
    grown = row._replace(
        input_ids=woven.pop("input_ids"), labels=_woven(labels, nothing), said=woven, pictures=None
    )
    try:
        return cut_to(grown, rules)
    except MixRefused as refusal:
        raise MixRefused(f"{pictures.where}: {refusal}") from refusal


def _parts(values: Any, spots: Any) -> Iterator[Any]:
    """What stands before, between and after the placeholders."""
    start = 0
    for spot in spots.tolist():
        yield values[start:spot]
        start = spot + 1
    yield values[start:]


def _woven(parts: Sequence[Any], between: Sequence[Any]) -> Any:
    pieces = [parts[0]]
    for one, other in zip(between, parts[1:], strict=True):
        pieces += [np.asarray(one, np.int64), other]
    return np.concatenate(pieces)
