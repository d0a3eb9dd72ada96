"""Images made smaller or written anew, where a recipe asks for it: turned as EXIF says, without EXIF, in 8 bits a channel."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mdsmix.images.judge import LARGE_PIXELS, Bad, alone, opened

if TYPE_CHECKING:
    from PIL.Image import Image

PLAIN = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "RGBA", "L", "LA", "P", "1"), "WEBP": ("RGB", "RGBA")}
"What each format is written in; any other mode becomes RGB, and RGB on white where it is transparent."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """What becomes of every image; nothing where neither is asked for."""

    longest: int | None = None
    format: str | None = None
    quality: int = 90

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Rewriting:
        """From a stream's settings of images, as the manifest has them."""
        reencode = settings.get("reencode") or {}
        return Rewriting(
            longest=(settings.get("resize") or {}).get("longest"),
            format=reencode["format"].upper() if reencode else None,
            quality=reencode.get("quality", 90),
        )

    def apply(self, data: bytes, height: int, width: int) -> tuple[bytes, int, int]:
        """The image as it is to be stored, with height and width; Bad where it cannot be made. One that is small enough keeps its bytes."""
        longest = max(height, width)
        shrinks = self.longest is not None and longest > self.longest
        if not shrinks and self.format is None:
            return data, height, width
        scale = (self.longest or 0) / longest if shrinks else 1.0
        new = max(1, round(height * scale)), max(1, round(width * scale))
        with alone() if height * width > LARGE_PIXELS else nullcontext(), opened(data) as image:
            stored = self._made(image, *new, shrinks)
        if not stored:
            raise Bad("image_damaged", "nothing came of writing it anew")
        return stored, *new

    def _made(self, image: Image, height: int, width: int, shrinks: bool) -> bytes:
        from PIL import Image as pillow  # noqa: N813
        from PIL import ImageOps

        format = self.format or _own(image)
        if shrinks and height * width * 16 < LARGE_PIXELS and image.format in ("JPEG", "MPO"):
            image.draft(None, (2 * max(width, height), 2 * max(width, height)))
        upright = _plain(ImageOps.exif_transpose(image), format)
        if upright.size != (width, height):
            upright = upright.resize((width, height), pillow.Resampling.LANCZOS)
        out = io.BytesIO()
        upright.save(out, format, **({} if format == "PNG" else {"quality": self.quality}))
        return out.getvalue()


def _own(image: Image) -> str:
    """The image's own format, where it is one that is written: else PNG, which loses nothing."""
    format = "JPEG" if image.format == "MPO" else str(image.format)
    return format if format in PLAIN else "PNG"


def _plain(image: Image, format: str) -> Image:
    from PIL import Image as pillow  # noqa: N813

    if image.mode == "P" and format != "PNG":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    if image.mode in PLAIN[format] and image.mode != "P":
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        if "RGBA" in PLAIN[format]:
            return rgba
        white = pillow.new("RGBA", rgba.size, "white")
        return pillow.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")
