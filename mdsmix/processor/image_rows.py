"""Rows with images: splits a processor's batch into rows, and puts the tokens of images in place of
the image tokens of a row.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from mdsmix.lazy_numpy import np

Arrays = dict[str, Any]
"""Key -> array or tensor. Some keys, such as `input_ids`, have a value per token. Others, such as
`pixel_values`, belong to a whole batch.
"""


class StoredRow(NamedTuple):
    """A row of a converted stream, with its images, on which a processor is tested."""

    name: str
    "For messages, such as `one image`."
    ids: list[int]
    "The token ids of the row, with one token for each image."
    images: Sequence[Any]
    "The images of the row: bytes of files, or images of Pillow."


class RowsOfBatch(NamedTuple):
    """A processor's batch, split into rows."""

    rows: list[Arrays]
    "For each row the arrays with a value per token, without padding."
    batch_entries: Arrays
    "The entries of the batch that have no value per token, such as `pixel_values`."


def split_by_row(batch: Any) -> RowsOfBatch:
    """Split a processor's batch into rows.

    Arrays that contain only zeros are left out: generic tokenizers return such token_type_ids,
    which vision models do not accept.
    """
    mask = batch["attention_mask"].bool()
    # A tensor with the shape of the mask has a value per token.
    by_token = {
        key: values for key, values in batch.items() if getattr(values, "shape", None) == mask.shape
    }
    keys = [key for key, values in by_token.items() if key != "attention_mask" and values.any()]
    rows = [
        {key: by_token[key][number][row_mask].numpy() for key in keys}
        for number, row_mask in enumerate(mask)
    ]
    return RowsOfBatch(rows, {key: values for key, values in batch.items() if key not in by_token})


def fill_row(ids: Any, spots: Any, pieces: Sequence[Arrays]) -> Arrays:
    """Replace the image tokens of a row by the tokens of its images. Return key -> int64 array,
    with a value per token of the new row.

    Args:
        ids: int64, the row's token ids.
        spots: the positions of the image tokens in `ids`.
        pieces: the arrays of each image, by key. Keys other than `input_ids` have the value 0 at
            the row's own tokens.
    """
    if not pieces:
        return {"input_ids": replace_tokens(ids, spots, [])}
    filled = Arrays()
    for key in pieces[0]:
        values = ids if key == "input_ids" else np.zeros_like(ids)
        filled[key] = replace_tokens(values, spots, [piece[key] for piece in pieces])
    return filled


def replace_tokens(values: Any, spots: Any, pieces: Sequence[Any]) -> Any:
    """Return `values` as int64, with the value at each of `spots` replaced by one of the pieces.

    Args:
        values: the ids of one row, or other values per token.
        spots: ascending positions in `values`.
        pieces: for each position, the values that replace the value there; any number of them.
    """
    # Split the values before each spot. Each stretch after the first begins with the value that is
    # replaced.
    first, *later_stretches = np.split(values, spots)
    arrays = [first]
    for piece, stretch in zip(pieces, later_stretches, strict=True):
        arrays += [np.asarray(piece, np.int64), stretch[1:]]
    return np.concatenate(arrays)


def turn_upright(content: Any) -> Any:
    """Return a decoded image in RGB, turned upright as its EXIF asks.

    Args:
        content: the file's bytes, or Pillow's image.
    """
    from PIL import Image, ImageOps

    image = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
    return ImageOps.exif_transpose(image).convert("RGB")
