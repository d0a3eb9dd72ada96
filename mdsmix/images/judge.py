"""Judges whether an image can be trained on, and reads its size: header, mark of the end, and a
full decode, by Pillow. Shrinks images, or writes them in another format, if a recipe sets that:
turned as EXIF requires, without EXIF, in 8 bits a channel.

A full decode finds damage after the header, and takes 3 to 4 ms for a JPEG of 1,120 x 1,120 pixels.
`decode: header` leaves it out, and still finds images whose end is missing. An image is judged by
its bytes alone, never by the memory of a machine: the same image is good or bad everywhere. Reason
codes: README.md in this folder.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.messages import flatten_error

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that Pillow may open here, and that every processor opens. Pillow's other decoders
are seldom used, and some start programs.
"""
AVIF = "AVIF"
"A further format that Pillow may open here if it can: from 11.3 on, built with its decoder."
DEEP_MODES = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits a channel: convert('RGB') turns such an
image white.
"""
LARGE_PIXELS = 1 << 25
"""33 Mpx. A larger image takes over 134 MB to decode, so this machine decodes one such image at a
time.
"""
_SWAPPING_ORIENTATIONS = (5, 6, 7, 8)
"Orientations of EXIF that swap height and width."
_ORIENTATION, _WIDTH, _HEIGHT = 0x0112, 0x0100, 0x0101
_PNG_EXIF = (b"eXIf", b"Raw profile type exif", b"tiff:Orientation")
READABLE = "JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF"
_OTHER_CONTENT = (
    (
        rb"version https://git-lfs",
        "it is a pointer of Git LFS: git lfs pull fetches the file itself",
    ),
    (
        rb"\s*<",
        f"it is HTML, SVG or XML, as servers send without an image: {READABLE} are read",
    ),
    (
        rb"....ftypavi[fs]",
        "it is AVIF, which Pillow reads from 11.3 on: install Pillow>=11.3, or it is damaged",
    ),
    (rb"....ftyp", f"it is HEIC or a video: {READABLE} are read"),
    (rb"\0*$", "it contains only zeros, as after an unfinished download or copy"),
)
"Beginning of a file that is mistaken for an image -> the message on it."


class _LengthField(NamedTuple):
    """The file's length in the header of a format."""

    begin: bytes
    "Pattern of the beginning of such a file."
    offset: int
    "Offset of the number: 4 bytes, little-endian."
    not_counted: int
    "Bytes at the beginning that the number leaves out."


_LENGTH_FIELDS = (
    _LengthField(rb"RIFF....WEBP", offset=4, not_counted=8),
    _LengthField(rb"BM....\0{4}", offset=2, not_counted=0),
)
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""The mark at a format's end. It must come after the header, where a thumbnail has such a mark too.
For GIF and TIFF only a decode shows whether the end is missing.
"""
NO_PILLOW = (
    "images are read by Pillow, which is not installed: "
    "install mdsmix with its extra, pip install 'mdsmix[images]'"
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A stream's rules for its images."""

    decode: str = "full"
    "full or header."
    max_pixels: int = 178_956_970
    "The most pixels of an image."


class ImageSize(NamedTuple):
    """Pixels of an image, after the turn that EXIF requires."""

    height: int
    width: int


def require_pillow() -> None:
    """Raise RecipeError if Pillow is not installed.

    Removes Pillow's own limit of pixels, since the recipe has one (max_pixels).
    """
    try:
        from PIL import Image
    except ImportError:
        raise RecipeError(NO_PILLOW) from None
    Image.MAX_IMAGE_PIXELS = None


def judge_image(data: bytes, rules: Rules) -> ImageSize:
    """Judge an image by its bytes, and return its size.

    Raises BadImage if it cannot be trained on.
    """
    if not data:
        raise BadImage("image_empty", "the file has no bytes")
    _check_length(data)
    with open_image(data) as image:
        width, height = image.size
        if width * height > rules.max_pixels:
            raise BadImage(
                "image_too_large", f"{width} x {height} pixels are more than {rules.max_pixels}"
            )
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise BadImage("image_animated", "it has more than one frame")
        if image.mode.startswith(DEEP_MODES):
            raise BadImage("image_depth", f"it has more than 8 bits a channel (mode {image.mode})")
        # The mark of the end must come after what Pillow has read so far, the header.
        end = _ENDS.get(str(image.format))
        if end and data.rfind(end) <= image.fp.tell():  # type: ignore[attr-defined]
            raise BadImage("image_truncated", "the mark of its end is missing")
        swaps_sides = _swaps_sides(image, data)
        if rules.decode == "full":
            decode_image(image, data)
    return ImageSize(width, height) if swaps_sides else ImageSize(height, width)


def _check_length(data: bytes) -> None:
    """Raise BadImage if the image has fewer bytes than its header states."""
    for field in _LENGTH_FIELDS:
        number = data[field.offset : field.offset + 4]
        length = field.not_counted + int.from_bytes(number, "little")
        if re.match(field.begin, data, re.DOTALL) and length > len(data):
            raise BadImage("image_truncated", "it has fewer bytes than its header says")


class BadImage(Exception):
    """An image that cannot be trained on."""

    def __init__(self, reason: str, why: str, stamp: tuple[int, str] | None = None) -> None:
        """Set the reason.

        Args:
            reason: a reason code.
            why: the detail, which the quarantine stores.
            stamp: size and stamp of a file that is too large to be read.
        """
        super().__init__(reason, why)
        self.reason = reason
        self.why = why[:200]
        self.stamp = stamp


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
    """Open an image without decoding it. Inside the block, Pillow's errors become BadImage."""
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=_formats()) as image:
                yield image
        except UnidentifiedImageError:
            raise BadImage("not_an_image", _describe_other_content(data)) from None
        except (BadImage, MemoryError):
            raise
        except Exception as error:  # decoders raise nearly any exception on damaged bytes
            why = flatten_error(error) or type(error).__name__
            reason = "image_truncated" if "truncated" in why.lower() else "image_damaged"
            raise BadImage(reason, why) from None


def decode_image(image: Image, data: bytes) -> None:
    """Decode all bytes of the image.

    A large one waits until no other process of this user decodes one: it takes hundreds of MB. A
    large JPEG of several scans takes as much even if it is decoded to few pixels.
    """
    is_large = image.size[0] * image.size[1] > LARGE_PIXELS
    with lock_large_images() if is_large else nullcontext():
        if image.format not in ("JPEG", "MPO"):
            image.load()
        elif not _decodes_small(image):
            with open_image(data) as again:
                if is_large:
                    again.draft(None, (1, 1))
                again.load()
        if is_large:
            image.close()


def _decodes_small(image: Image) -> bool:
    """Check whether a JPEG decodes at an eighth of its height and width, brightness alone.

    This reads and decodes the same bytes as a full decode in half of the time, and agreed with it
    on each of 400,000 damaged files. If it fails, the caller decodes the image fully.
    """
    try:
        image.draft("L", (1, 1))
        image.load()
    except Exception:  # decoders raise nearly any exception on damaged bytes
        return False
    return True


def _swaps_sides(image: Image, data: bytes) -> bool:
    """Check whether EXIF swaps height and width.

    False if `image.size` is already that of the turned image, as in newer releases of Pillow for a
    TIFF. Pillow decodes a whole PNG to find its EXIF, so a PNG without a mark of EXIF is not asked.
    """
    if image.format == "PNG" and not any(mark in data for mark in _PNG_EXIF):
        return False
    tags: Any = getattr(image, "tag_v2", {})
    is_turned_already = image.size == (tags.get(_HEIGHT), tags.get(_WIDTH))
    swaps = image.getexif().get(_ORIENTATION) in _SWAPPING_ORIENTATIONS
    return swaps and not is_turned_already


@contextmanager
def lock_large_images() -> Iterator[None]:
    """Wait until no other process of this user decodes a large image. During the block no other
    process begins to.

    The lock is on a file, so it ends with its process.
    """
    with (Path(tempfile.gettempdir()) / f"mdsmix-large-image-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _describe_other_content(data: bytes) -> str:
    """Return a message on bytes that Pillow does not open, by how they begin.

    It quotes none of them, since a record may name any file of a machine.
    """
    for begin, message in _OTHER_CONTENT:
        if re.match(begin, data[:4096], re.DOTALL | re.IGNORECASE):
            return message
    return f"it is not {READABLE.replace(' and ', ' or ')}, or its header cannot be read"


KEPT_MODES = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "RGBA", "L", "LA", "1"), "WEBP": ("RGB", "RGBA")}
"""Format -> Pillow's modes that are written as they are. Any other mode becomes RGB; a transparent
image RGBA, or RGB on white in a JPEG.
"""


class StoredImage(NamedTuple):
    """An image as it is stored."""

    data: bytes
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """How images are shrunk and rewritten before they are stored."""

    longest: int | None = None
    "The most pixels of the longer side; None: no image is shrunk."
    format: str | None = None
    "jpeg, png or webp, for every image; None: shrunk images keep their format, or become PNG."
    quality: int = 90

    def apply(self, data: bytes, height: int, width: int) -> StoredImage:
        """Return the image as it is stored. Without `format` a small enough image is not changed.

        Raises BadImage if it does not decode.
        """
        scale = min(1.0, (self.longest or math.inf) / max(height, width))
        if scale == 1 and self.format is None:
            return StoredImage(data, height, width)
        new_height = max(1, round(height * scale))
        new_width = max(1, round(width * scale))
        is_large = height * width > LARGE_PIXELS
        with lock_large_images() if is_large else nullcontext(), open_image(data) as image:
            rewritten = self._rewrite(image, new_height, new_width, shrinks=scale < 1)
        return StoredImage(rewritten, new_height, new_width)

    def _rewrite(self, image: Image, height: int, width: int, shrinks: bool) -> bytes:
        """Return the bytes of the image in its new size and format, turned upright as EXIF says.

        Args:
            height: pixels of the rewritten image, as `width`.
            shrinks: whether the image becomes smaller.
        """
        from PIL import Image as pillow  # noqa: N813
        from PIL import ImageOps

        own_format = "JPEG" if image.format == "MPO" else str(image.format)
        format = own_format if own_format in KEPT_MODES else "PNG"
        if self.format:
            format = self.format.upper()
        # Decode a JPEG at a fraction of its size if its sides stay twice those of the result.
        if shrinks and height * width * 16 < LARGE_PIXELS and own_format == "JPEG":
            image.draft(None, (2 * max(width, height), 2 * max(width, height)))
        upright = _convert_mode(ImageOps.exif_transpose(image), format)
        if upright.size != (width, height):
            upright = upright.resize((width, height), pillow.Resampling.LANCZOS)
        settings: dict[str, Any] = {} if format == "PNG" else {"quality": self.quality}
        out = io.BytesIO()
        upright.save(out, format, **settings)
        return out.getvalue()


def _convert_mode(image: Image, format: str) -> Image:
    """Return the image in a mode that is written in this format (`KEPT_MODES`)."""
    from PIL import Image as pillow  # noqa: N813

    if image.mode in KEPT_MODES[format]:
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        # The image has no transparency.
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    if "RGBA" in KEPT_MODES[format]:
        return rgba
    return pillow.alpha_composite(pillow.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
