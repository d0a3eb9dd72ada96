"""Images of samples, small enough for a page: at most 144 pixels a side, as data in the page itself.

They come from anyone's data, so they are opened as `convert` opens them, and what cannot be is told in a sentence.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from mdsmix.errors import RecipeError
from mdsmix.images.judge import WITHOUT, Bad, Rules, opened, require_pillow, size_of
from mdsmix.report.sample_images import Picture

SIDE = 144
QUALITY = 70
MOST_PIXELS = 1 << 25
"An image of more is not decoded for a page: it would take more than 100 MB."


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """An image made small, or a sentence in place of it."""

    said: str
    "Its size, bytes and place among the tokens."
    data: str = ""
    "A data: URI; empty where there is none."
    width: int = 0
    height: int = 0
    problem: str = ""


def thumbnail(picture: Picture) -> Thumbnail:
    """Never raises for what an image holds."""
    said = str(picture)
    try:
        require_pillow()
    except RecipeError:
        return Thumbnail(said, problem=f"not shown: {WITHOUT}")
    try:
        size_of(picture.data, Rules(decode="header", max_pixels=MOST_PIXELS))
        return _small(picture, said)
    except Bad as bad:
        return Thumbnail(said, problem=f"not shown: {bad.reason}, {bad.why}")


def _small(picture: Picture, said: str) -> Thumbnail:
    from PIL import ImageOps

    with opened(picture.data) as image:
        image.draft("RGB", (2 * SIDE, 2 * SIDE))  # of a JPEG no more is decoded
        small = ImageOps.exif_transpose(image).convert("RGBA")
        small.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        small.save(out, "WEBP", quality=QUALITY)
        width, height = small.size
    data = base64.b64encode(out.getvalue()).decode()
    return Thumbnail(said, f"data:image/webp;base64,{data}", width, height)
