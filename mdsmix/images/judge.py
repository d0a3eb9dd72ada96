"""Judges whether an image can be trained on, and reads its size: header, mark of the end, and a
full decode, by Pillow. Shrinks images or writes them in another format where a recipe asks for it:
turned as EXIF says, without EXIF, in 8 bits a channel.

A full decode finds damage behind the header, and takes 3 to 4 ms for a JPEG of 1,120 x 1,120
pixels. `decode: header` leaves it out, and still finds images whose end is missing. An image is
judged by its bytes alone, never by the memory of a machine: the same image is good or bad
everywhere. Reason codes: README.md beside this file.
"""

from __future__ import annotations

import fcntl
import io
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.errors import RecipeError
from mdsmix.messages import flatten_error

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that Pillow may open here, and that every processor opens. Pillow's other decoders
are seldom used, and some start programs.
"""
AVIF = "AVIF"
"A further format that Pillow may open here if it can: from 11.3 on, with its decoder in it."
DEEP = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits a channel: convert('RGB') turns such an
image white.
"""
LARGE_PIXELS = 1 << 25
"""33 Mpx. A larger image takes over 134 MB to decode, so this machine decodes one such image at a
time.
"""
_TURNED = (5, 6, 7, 8)
"Orientations of EXIF that swap height and width."
_ORIENTATION, _WIDTH, _HEIGHT = 0x0112, 0x0100, 0x0101
_PNG_EXIF = (b"eXIf", b"Raw profile type exif", b"tiff:Orientation")
READ = "JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF"
_BEGINS = (
    (
        rb"version https://git-lfs",
        "it is a pointer of Git LFS: git lfs pull brings the file itself",
    ),
    (rb"\s*<", f"it is HTML, SVG or XML, as servers send without an image: {READ} are read"),
    (
        rb"....ftypavi[fs]",
        "it is AVIF, which Pillow reads from 11.3 on: install Pillow>=11.3, or it is damaged",
    ),
    (rb"....ftyp", f"it is HEIC or a video: {READ} are read"),
    (rb"\0*$", "it holds zeros, as after a download or a copy that was not finished"),
)
"Beginning of a file that is mistaken for an image -> the sentence on it."
_SIZES = ((rb"RIFF....WEBP", 4, 8), (rb"BM....\0{4}", 2, 0))
"""For formats whose header says the file's length: the beginning, the offset of that number, and
how many bytes it leaves out.
"""
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""The mark at a format's end. It must lie behind the header, where a thumbnail has such a mark too.
For GIF and TIFF only a decode tells.
"""
WITHOUT = "images are looked at by Pillow, which is not installed: install mdsmix with its extra, pip install 'mdsmix[images]'"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A stream's rules for its images: `decode`, full or header; `max_pixels`, the most pixels of
    an image.
    """

    decode: str = "full"
    max_pixels: int = 178_956_970


def require_pillow() -> None:
    """RecipeError where Pillow is not installed. Takes off Pillow's own limit of pixels, since the
    recipe has one (max_pixels).
    """
    try:
        from PIL import Image
    except ImportError:
        raise RecipeError(WITHOUT) from None
    Image.MAX_IMAGE_PIXELS = None


def judge_image(data: bytes, rules: Rules) -> tuple[int, int]:
    """Judges an image by its bytes. Returns height and width in pixels, after the turn that EXIF
    asks for. Bad where the image is bad.
    """
    if not data:
        raise Bad("image_empty", "the file has no bytes")
    for begin, at, before in _SIZES:
        size = before + int.from_bytes(data[at : at + 4], "little")
        if re.match(begin, data, re.DOTALL) and size > len(data):
            raise Bad("image_truncated", "it has fewer bytes than its header says")
    with open_image(data) as image:
        width, height = image.size
        if width * height > rules.max_pixels:
            raise Bad(
                "image_too_large", f"{width} x {height} pixels are more than {rules.max_pixels}"
            )
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise Bad("image_animated", "it has more than one frame")
        if image.mode.startswith(DEEP):
            raise Bad("image_depth", f"it has more than 8 bits a channel (mode {image.mode})")
        if (end := _ENDS.get(str(image.format))) and data.rfind(end) <= image.fp.tell():  # type: ignore[attr-defined]
            raise Bad("image_truncated", "the mark of its end is missing")
        is_turned = _is_turned(image, data)
        if rules.decode == "full":
            decode_image(image, data)
    return (width, height) if is_turned else (height, width)


class Bad(Exception):
    """An image is bad. `reason`: a reason code; `why`: the detail; `stamp`: size and stamp of a
    file too large to be read, else None.
    """

    def __init__(self, reason: str, why: str, stamp: tuple[int, str] | None = None) -> None:
        super().__init__(reason, why)
        self.reason, self.why, self.stamp = reason, why[:200], stamp


@cache
def _formats() -> tuple[str, ...]:
    """Return FORMATS, and AVIF if this Pillow decodes it."""
    from PIL import features

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older releases warn about a name that they do not know
        reads_avif = features.check("avif")
    return (*FORMATS, AVIF) if reads_avif else FORMATS


@contextmanager
def open_image(data: bytes) -> Iterator[Image]:
    """The image, not decoded yet. An exception of Pillow inside the block becomes Bad."""
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=_formats()) as image:
                yield image
        except UnidentifiedImageError:
            raise Bad("not_an_image", _said(data)) from None
        except (Bad, MemoryError):
            raise
        except Exception as error:  # decoders raise nearly any exception on damaged bytes
            why = flatten_error(error) or type(error).__name__
            reason = "image_truncated" if "truncated" in why.lower() else "image_damaged"
            raise Bad(reason, why) from None


def decode_image(image: Image, data: bytes) -> None:
    """Decodes all bytes of the image. A large one waits until no other process of this user decodes
    one: it takes hundreds of MB. A large JPEG of several scans takes as much even where it is
    decoded to few pixels.
    """
    is_large = image.size[0] * image.size[1] > LARGE_PIXELS
    with lock_large_images() if is_large else nullcontext():
        if image.format not in ("JPEG", "MPO"):
            image.load()
        elif not _is_whole(image):
            with open_image(data) as again:
                if is_large:
                    again.draft(None, (1, 1))
                again.load()
        if is_large:
            image.close()


def _is_whole(image: Image) -> bool:
    """Whether a JPEG decodes at an eighth of its height and width, brightness alone. This reads and
    decodes the same bytes as a full decode in half of the time, and agreed with it on each of
    400,000 damaged files. Where the answer is no, the caller decodes the image whole.
    """
    try:
        image.draft("L", (1, 1))
        image.load()
    except Exception:  # decoders raise nearly any exception on damaged bytes
        return False
    return True


def _is_turned(image: Image, data: bytes) -> bool:
    """Whether EXIF swaps height and width. False where `image.size` is already that of the turned
    image, as in newer releases of Pillow for a TIFF. Pillow decodes a whole PNG to find its EXIF,
    so a PNG without a mark of EXIF is not asked.
    """
    if image.format == "PNG" and not any(mark in data for mark in _PNG_EXIF):
        return False
    tags: Any = getattr(image, "tag_v2", {})
    is_done = image.size == (tags.get(_HEIGHT), tags.get(_WIDTH))
    return image.getexif().get(_ORIENTATION) in _TURNED and not is_done


@contextmanager
def lock_large_images() -> Iterator[None]:
    """Inside the block no other process of this user decodes a large image. The lock is a file's,
    so it ends with its process.
    """
    with (Path(tempfile.gettempdir()) / f"mdsmix-large-image-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _said(data: bytes) -> str:
    """A sentence on bytes that Pillow does not open, by how they begin. It quotes none, since a
    record may name any file of a machine.
    """
    for begin, name in _BEGINS:
        if re.match(begin, data[:4096], re.DOTALL | re.IGNORECASE):
            return name
    return f"it begins as none of {READ} does, or its header cannot be read"


PLAIN = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "RGBA", "L", "LA", "1"), "WEBP": ("RGB", "RGBA")}
"""Format -> Pillow's modes that are written as they are. Any other mode becomes RGB; a transparent
image RGBA, or RGB on white in a JPEG.
"""


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """How images are shrunk and rewritten before they are stored."""

    longest: int | None = None
    "The most pixels of the longer side; None: no image is shrunk."
    format: str | None = None
    "jpeg, png or webp, for every image; None: shrunk images keep their format, or become PNG."
    quality: int = 90

    def apply(self, data: bytes, height: int, width: int) -> tuple[bytes, int, int]:
        """The bytes that are stored for an image, their height and width. Without `format` an image
        that is small enough keeps its bytes. Bad where it does not decode.
        """
        scale = min(1.0, (self.longest or math.inf) / max(height, width))
        if scale == 1 and self.format is None:
            return data, height, width
        new = max(1, round(height * scale)), max(1, round(width * scale))
        with (
            lock_large_images() if height * width > LARGE_PIXELS else nullcontext(),
            open_image(data) as image,
        ):
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
    return pillow.alpha_composite(pillow.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
