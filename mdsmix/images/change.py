"""Images made smaller or written anew, where a recipe asks for it: turned as EXIF says, without EXIF, in 8 bits a channel."""

from __future__ import annotations

import io
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mdsmix.images.judge import LARGE_PIXELS, alone, opened

if TYPE_CHECKING:
    from PIL.Image import Image

PLAIN = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "RGBA", "L", "LA", "1"), "WEBP": ("RGB", "RGBA")}
"What each format is written in; any other mode becomes RGB, and RGB on white where it is transparent."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """What becomes of every image; nothing where neither is asked for."""

    longest: int | None = None
    format: str | None = None
    quality: int = 90

    def apply(self, data: bytes, height: int, width: int) -> tuple[bytes, int, int]:
        """The image as it is to be stored, with height and width; Bad where it cannot be made. One that is small enough keeps its bytes."""
        scale = min(1.0, (self.longest or math.inf) / max(height, width))
        if scale == 1 and self.format is None:
            return data, height, width
        new = max(1, round(height * scale)), max(1, round(width * scale))
        with alone() if height * width > LARGE_PIXELS else nullcontext(), opened(data) as image:
            return self._made(image, *new, scale < 1), *new

    def _made(self, image: Image, height: int, width: int, shrinks: bool) -> bytes:
        from PIL import Image as pillow  # noqa: N813
        from PIL import ImageOps

        own = "JPEG" if image.format == "MPO" else str(image.format)
        format = (self.format or (own if own in PLAIN else "PNG")).upper()
        if shrinks and height * width * 16 < LARGE_PIXELS and own == "JPEG":
            image.draft(None, (2 * max(width, height), 2 * max(width, height)))
        upright = _plain(ImageOps.exif_transpose(image), format)
        if upright.size != (width, height):
            upright = upright.resize((width, height), pillow.Resampling.LANCZOS)
        out = io.BytesIO()
        upright.save(out, format, **({} if format == "PNG" else {"quality": self.quality}))
        return out.getvalue()


def _plain(image: Image, format: str) -> Image:
    from PIL import Image as pillow  # noqa: N813

    if image.mode in PLAIN[format]:
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    if "RGBA" in PLAIN[format]:
        return rgba
    white = pillow.new("RGBA", rgba.size, "white")
    return pillow.alpha_composite(white, rgba).convert("RGB")
