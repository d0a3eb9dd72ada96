"""Tests whether a loader's rows equal the rows that a processor makes itself.

A stored row has one token for each image. A loader replaces this token by the tokens that the
processor makes of the image alone. That is wrong if the processor's tokens depend on the text
around an image, or on the row's other images. `first_difference` finds such a processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mdsmix.lazy_numpy import np
from mdsmix.messages import flatten_error
from mdsmix.processor.image_rows import (
    Arrays,
    StoredRow,
    fill_row,
    split_by_row,
    turn_upright,
)
from mdsmix.processor.loaded import LoadedProcessor, is_odd

OTHER_VALUES = "makes other {key} from the whole text than the loader makes from the stored row"
"The end of a sentence that begins with the processor's name."


def first_difference(processor: LoadedProcessor, rows: Sequence[StoredRow]) -> str | None:
    """Compare two ways of making a batch: a loader replaces the image tokens of stored rows, and
    transformers makes rows of the whole texts. Return a sentence on the first difference; None if
    all rows are equal.

    Each row is compared alone, then all rows with images in one batch. A row with an odd image that
    the processor refuses is left out, since `convert` puts such a record into the quarantine.
    """
    decoded = [row._replace(images=[turn_upright(image) for image in row.images]) for row in rows]
    refuses = partial(_is_refused, processor)
    usable = [row for row in decoded if not any(map(refuses, row.images))]
    with_images = [row for row in usable if row.images]
    batches = [[row] for row in usable]
    if with_images:
        batches.append(with_images)
    class_name = type(processor.processor).__name__
    for batch in batches:
        name = batch[0].name if len(batch) == 1 else "several rows in one batch"
        try:
            problem = next(_find_differences(processor, batch), None)  # only the first
        except Exception as error:
            problem = f"makes input_ids by a rule of its own ({flatten_error(error)[:300]})"
        if problem:
            return f"for {name}, {class_name} {problem}"
    return None


def _is_refused(processor: LoadedProcessor, image: Any) -> bool:
    """Return whether an image is odd and the processor refuses it. Then `count` returns a reason,
    not a number.
    """
    size = image.height, image.width
    return is_odd(size) and isinstance(processor.count(size), str)


def _find_differences(processor: LoadedProcessor, rows: Sequence[StoredRow]) -> Iterator[str]:
    """Yield the differences between the batch that the processor makes of whole texts and the batch
    that a loader makes of stored rows. Each difference is the end of a sentence that begins with
    the processor's name: `makes other pixel_values ...`.
    """
    texts = [processor.decode(row.ids) for row in rows]
    images = [row.images for row in rows]
    # Let the processor make a batch of the whole texts. A stored text contains the text around an
    # image, which the processor prints itself.
    before, after = processor.around
    stored_token = f"{before}{processor.token}{after}"
    whole_texts = [text.replace(stored_token, processor.token) for text in texts]
    whole = split_by_row(processor.process_texts(whole_texts, images))
    # Let it make the tokens and pixels of the images alone, as a loader does.
    pieces: list[list[Arrays]] = [[] for _ in texts]
    pixels: Arrays = {}
    if any(images):
        pieces, pixels = processor.process_images(images)
    # Compare the counts of tokens, each row, and the pixels.
    for row_images, row_pieces in zip(images, pieces, strict=True):
        yield from _find_wrong_counts(processor, row_images, row_pieces)
    for text, row_pieces, whole_row in zip(texts, pieces, whole.rows, strict=True):
        loader_row = _make_loader_row(processor, text, row_pieces)
        # A key that only one of the two rows has must be 0 at every token.
        zeros = 0 * whole_row["input_ids"]
        for key in {**whole_row, **loader_row}:
            if not are_equal(whole_row.get(key, zeros), loader_row.get(key, zeros)):
                yield OTHER_VALUES.format(key=key)
    for key, values in whole.batch_entries.items():
        if not are_equal(values, pixels.get(key)):
            yield OTHER_VALUES.format(key=key)


def _find_wrong_counts(
    processor: LoadedProcessor, images: Sequence[Any], pieces: Sequence[Arrays]
) -> Iterator[str]:
    """Compare the number of tokens that the processor makes of each image with its count for the
    image's size. Yield the end of a sentence for each difference.

    Args:
        processor: the processor.
        images: the images of one row.
        pieces: for each image, the arrays that the processor makes of it.
    """
    for image, image_arrays in zip(images, pieces, strict=True):
        number = len(image_arrays["input_ids"])
        counted = processor.count((image.height, image.width))
        if number != counted:
            yield (
                f"makes {number} tokens of an image of {image.width} x {image.height} pixels, but "
                f"its count for this size is {counted}"
            )


def _make_loader_row(processor: LoadedProcessor, text: str, pieces: Sequence[Arrays]) -> Arrays:
    """Return the row that a loader makes of a text: the ids of the text, with each image token
    replaced by the tokens of its image, and the arrays that the images have besides ids, such as
    token_type_ids.

    Raises ValueError if the text does not have one image token for each image.

    Args:
        processor: its tokenizer is used.
        text: the text of a stored row, with one image token for each image.
        pieces: for each image, its tokens and other arrays, as `process_images` returns them.
    """
    ids = np.array(processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
    spots = np.flatnonzero(ids == processor.token_id)
    if len(spots) != len(pieces):
        raise ValueError(
            f"the text has {len(spots)} tokens {processor.token} for {len(pieces)} images"
        )
    return fill_row(ids, spots, pieces)


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two tensors or arrays have the same shapes and values. Lists are equal if they
    have equally many items and these are equal.
    """
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(are_equal, first, second))
    # Llama 4's pixels are bfloat16, which NumPy does not have.
    arrays = [
        values.double() if hasattr(values, "double") else values for values in (first, second)
    ]
    return np.array_equal(arrays[0], arrays[1])
