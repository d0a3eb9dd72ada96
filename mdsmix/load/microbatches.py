"""A batch with images -> the microbatches that Composer trains one after the other.

Composer cuts every tensor of a batch after so many entries, which is right of tokens. Pixels have other first dimensions: patches,
images, or rows that have one. So the worker notes what of them is whose (`Vision.is_split`), and here they are cut by it. A
microbatch without an image gets the masked one of `dummy_image`, as a whole batch does elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.load.collate import Batch, Collate
from mdsmix.load.vision import ROWS

Split = Callable[[Batch, int | float], list[Batch]]


def prepare(collate: Collate) -> Split:
    """Makes the batches of a loader that sees such as can be cut, and returns what cuts them."""
    vision = collate.vision
    assert vision is not None, "a loader of images"
    vision.is_split, with_dummy = True, vision.with_dummy
    vision.with_dummy = False  # each microbatch has its own

    def split(batch: Batch, size: int | float) -> list[Batch]:
        if isinstance(size, float):
            raise RecipeError(
                f"device_train_microbatch_size is {size}, and a row with its images cannot be cut: give a whole number of rows."
            )
        return [
            collate.with_dummy_image(part) if with_dummy and not has_images else part
            for part, has_images in _parts(batch, size)
        ]

    return split


def rows_of(batch: Batch) -> int:
    """Rows of a batch or of a microbatch."""
    return len(batch["input_ids"])


def _parts(batch: Batch, size: int) -> Iterator[tuple[Batch, bool]]:
    """So many rows each, and whether there are images among them: else no tensor of pixels is in it."""
    whose: Any = batch.get(ROWS, {})
    for start in range(0, rows_of(batch), size):
        stop = start + size
        part = {k: v[start:stop] for k, v in batch.items() if k != ROWS and k not in whose}
        pixels = {
            key: batch[key][sum(counts[:start]) : sum(counts[:stop])]
            for key, counts in whose.items()
        }
        has_images = any(len(tensor) for tensor in pixels.values())
        yield (part | pixels if has_images else part), has_images
