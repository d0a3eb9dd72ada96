"""Where the batches that loaders put together of stored rows are others than those that transformers makes of whole texts.

A loader has ids with one token for each image, and puts in its place what a processor makes of that image alone. A processor that looks
at the text around an image, or at other images of the text, makes something else of the whole.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


def differences(processor: Any, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[str, ...]]:
    """Where a batch of stored rows is another than what transformers makes of their whole texts: each row by itself, and those with
    images together. `processor`: a LoadedProcessor; `rows`: a name, token ids with one for each image, and the images as base64.

    Yields: the processor's class, the row's name, and the key of the batch with what transformers and a loader have there.
    """
    family = type(processor.processor).__name__
    opened = [(name, ids, [upright(base64.b64decode(i)) for i in of]) for name, ids, of in rows]
    together = [row for row in opened if row[2]]
    for some in filter(None, [*([row] for row in opened), together]):
        name = some[0][0] if len(some) == 1 else "several rows in one batch"
        texts = [processor.text_of(ids) for _, ids, _ in some]
        try:
            for what in _compared(processor, texts, [images for *_, images in some]):
                yield family, name, what
        except Exception as error:
            yield family, name, f"input_ids ({' '.join(str(error).split())[:300]})"


def _compared(
    processor: Any, texts: Sequence[str], images: Sequence[Sequence[Any]]
) -> Iterator[str]:
    stored = processor.token.join(processor.around)
    whole = processor.whole([text.replace(stored, processor.token) for text in texts], images)
    made, pixels = processor.see(images) if any(images) else ([[] for _ in texts], {})
    for of, pieces in zip(images, made, strict=True):
        told = [processor.count((image.height, image.width)) for image in of]
        tokens = [len(piece["input_ids"]) for piece in pieces]
        if told != tokens:
            yield f"the tokens of each image {tokens} and not {told}"
    is_token = whole["attention_mask"].bool()
    rows = [_row(processor, text, pieces) for text, pieces in zip(texts, made, strict=True)]
    for key, value in whole.items():
        if getattr(value, "shape", None) != is_token.shape:
            if not same(value, pixels.get(key)):
                yield key
            continue
        for theirs, row, mask in zip(value, rows, is_token, strict=True):
            ours = row.get(key, np.zeros(len(row["input_ids"]), np.int64))
            if not np.array_equal(theirs[mask].numpy(), ours):
                yield key
                break


def _row(processor: Any, text: str, pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a loader makes of the text's ids."""
    ids = np.array(processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
    spots = np.flatnonzero(ids == processor.token_id)
    if len(spots) != len(pieces):
        raise ValueError(f"{len(spots)} tokens {processor.token} stand for {len(pieces)} images")
    row = {
        key: replaced(np.zeros(len(ids), np.int64), spots, [piece[key] for piece in pieces])
        for key in (pieces[0] if pieces else ())
    }
    row["input_ids"] = replaced(ids, spots, [piece["input_ids"] for piece in pieces])
    return row | {"attention_mask": np.ones(len(row["input_ids"]), np.int64)}


def upright(content: Any) -> Any:
    """An image as it is seen: decoded, turned as its EXIF asks, in RGB. `content`: its bytes, or Pillow's image."""
    from PIL import Image, ImageOps

    image = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
    return ImageOps.exif_transpose(image).convert("RGB")


def replaced(values: Any, spots: Any, pieces: Sequence[Any]) -> Any:
    """int64: the values with a piece in place of each of those at `spots`."""
    first, *others = np.split(values, spots)
    parts = [first]
    for piece, other in zip(pieces, others, strict=True):
        parts += [np.asarray(piece, np.int64), other[1:]]
    return np.concatenate(parts)


def same(one: Any, other: Any) -> bool:
    """Whether two tensors, or lists of them, are equal."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and np.array_equal(_array(one), _array(other))


def _array(value: Any) -> Any:
    """A tensor, or what a list of them holds; NumPy has no bfloat16, in which Llama 4 has its pixels."""
    is_float = getattr(value, "is_floating_point", bool)()
    return np.asarray(value.float() if is_float else value)
