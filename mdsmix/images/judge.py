"""Judges whether an image can be trained on, and reads its size. Pillow reads the header and
decodes the whole image; the mark of the image's end must be there. If a recipe sets it, images are
also shrunk or written in another format: turned as EXIF requires, without EXIF, in 8 bits a
channel.

A full decode finds damage after the header, and takes 3 to 4 ms for a JPEG of 1,120 x 1,120 pixels.
`decode: header` leaves out the full decode, and still finds images whose end is missing. An image
is judged by its bytes alone, never by the memory of a machine: the same image is good or bad
everywhere. Reason codes: README.md in this folder.
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
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.frozen import frozen
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
        "it is AVIF, which Pillow reads from 11.3 on: install Pillow>=11.3; if it is installed, "
        "the file is damaged",
    ),
    (rb"....ftyp", f"it is HEIC or a video: {READABLE} are read"),
    (rb"\0*$", "it contains only zeros, as after an unfinished download or copy"),
)
"(pattern of a file's beginning, message) for files that are mistaken for images."


class _LengthField(NamedTuple):
    """Where the header of an image format has the length of the file."""

    begin: bytes
    "Pattern of the beginning of files of this format."
    offset: int
    "The byte at which the length begins: 4 bytes, little-endian."
    not_counted: int
    "How many bytes at the file's beginning the length does not count."


_LENGTH_FIELDS = (
    _LengthField(rb"RIFF....WEBP", offset=4, not_counted=8),
    _LengthField(rb"BM....\0{4}", offset=2, not_counted=0),
)
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""Format -> the mark at the end of an image. The mark must come after the header, because a
thumbnail in the header has such a mark too. For GIF and TIFF only a decode shows whether the end is
missing.
"""
NO_PILLOW = (
    "images are read by Pillow, which is not installed: "
    "install mdsmix with its extra, pip install 'mdsmix[images]'"
)


@frozen(kw_only=True)
class Rules:
    """A stream's rules for its images, as the recipe sets them."""

    decode: str = "full"
    "`full`: an image is decoded; `header`: only its header and its end are read."
    max_pixels: int = 178_956_970
    "The most pixels of an image."


class ImageSize(NamedTuple):
    """Height and width of an image in pixels, after turning it as its EXIF requires."""

    height: int
    width: int


def require_pillow() -> None:
    """Raise RecipeError if Pillow is not installed.

    Also remove Pillow's own limit of pixels, since the recipe has a limit (max_pixels).
    """
    try:
        from PIL import Image
    except ImportError:
        raise RecipeError(NO_PILLOW) from None
    Image.MAX_IMAGE_PIXELS = None


def judge_image(data: bytes, rules: Rules) -> ImageSize:
    """Judge an image by its bytes, and return its size.

    Raises BadImage if a model cannot be trained on the image.

    Args:
        data: the bytes of the file.
        rules: the recipe's rules for images: the most pixels, and whether to decode the image.
    """
    if not data:
        raise BadImage("image_empty", "the file has no bytes")
    _check_length(data)
    with open_image(data) as image:
        # Check what the header says.
        width, height = image.size
        if width * height > rules.max_pixels:
            raise BadImage(
                "image_too_large", f"{width} x {height} pixels are more than {rules.max_pixels}"
            )
        # Of an MPO, a JPEG with further images after the first, only the first is used.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise BadImage("image_animated", "it has more than one frame")
        if image.mode.startswith(DEEP_MODES):
            raise BadImage("image_depth", f"it has more than 8 bits a channel (mode {image.mode})")

        # The mark of the end must come after the header, which is what Pillow has read so far.
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
    """Raised for an image that a model cannot be trained on."""

    def __init__(self, reason: str, why: str, stamp: tuple[int, str] | None = None) -> None:
        """Set the reason.

        Args:
            reason: a reason code, such as `image_truncated`.
            why: the detail, which the quarantine (the file of bad records) stores.
            stamp: for a file that is too large to be read: its size, and a value that changes when
                the file is written, such as its mtime. The next run compares them. Otherwise None.
        """
        super().__init__(reason, why)
        self.reason = reason
        self.why = why[:200]
        self.stamp = stamp


@cache
def _list_formats() -> tuple[str, ...]:
    """Return the names of the formats that Pillow may open here: FORMATS, and AVIF if this release
    of Pillow decodes it.
    """
    from PIL import features

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older releases warn about a name that they do not know
        reads_avif = features.check("avif")
    return (*FORMATS, AVIF) if reads_avif else FORMATS


@contextmanager
def open_image(data: bytes) -> Iterator[Image]:
    """Open an image without decoding it.

    Pillow's errors, also those inside the `with` block, become BadImage.
    """
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=_list_formats()) as image:
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
    """Decode all bytes of the image, to find damage.

    A large image waits until no other process of this user decodes a large image: each takes
    hundreds of MB. A large JPEG of several scans takes as much even if it is decoded to few pixels.

    Args:
        image: the open image.
        data: the bytes of its file.

    Raises an error of Pillow if the image is damaged; `open_image` turns it into BadImage.
    """
    is_large = image.size[0] * image.size[1] > LARGE_PIXELS
    with lock_large_images() if is_large else nullcontext():
        if image.format not in ("JPEG", "MPO"):
            image.load()
        elif not _decodes_small(image):
            # Decoding all bytes to a small image failed, so open the image again and decode it
            # fully, a large image at a fraction of its sides.
            with open_image(data) as again:
                if is_large:
                    again.draft(None, (1, 1))  # the smallest fraction that the decoder offers
                again.load()
        if is_large:
            image.close()  # free its pixels before the lock is released


def _decodes_small(image: Image) -> bool:
    """Return whether a JPEG decodes at an eighth of its height and width, brightness alone.

    Such a decode reads the same bytes as a full decode in half of the time, and agreed with a full
    decode on each of 400,000 damaged files. If it fails, the caller decodes the image fully.
    """
    try:
        image.draft("L", (1, 1))
        image.load()
    except Exception:  # decoders raise nearly any exception on damaged bytes
        return False
    return True


def _swaps_sides(image: Image, data: bytes) -> bool:
    """Return whether height and width of `image.size` must be swapped, because the image's EXIF
    says that it is to be turned by 90 degrees.

    False for a TIFF in newer releases of Pillow, where `image.size` is already the size of the
    turned image.

    Pillow decodes a whole PNG to find its EXIF. So False is returned at once for a PNG whose bytes
    do not contain the name of a chunk with EXIF.

    Args:
        image: the open image.
        data: the bytes of its file.
    """
    if image.format == "PNG" and not any(mark in data for mark in _PNG_EXIF):
        return False
    tags: Any = getattr(image, "tag_v2", {})
    is_turned_already = image.size == (tags.get(_HEIGHT), tags.get(_WIDTH))
    swaps = image.getexif().get(_ORIENTATION) in _SWAPPING_ORIENTATIONS
    return swaps and not is_turned_already


@contextmanager
def lock_large_images() -> Iterator[None]:
    """Wait until no other process of this user decodes a large image. During the `with` block no
    other process begins to decode a large image.

    The lock belongs to a file, so it ends if its process is killed.
    """
    with (Path(tempfile.gettempdir()) / f"mdsmix-large-image-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _describe_other_content(data: bytes) -> str:
    """Return what a file that Pillow does not open probably is, by its first bytes.

    The message quotes no bytes of the file, since a record may name any file of a machine.
    """
    for begin, message in _OTHER_CONTENT:
        if re.match(begin, data[:4096], re.DOTALL | re.IGNORECASE):
            return message
    return f"it is not {READABLE.replace(' and ', ' or ')}, or its header cannot be read"


KEPT_MODES = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "RGBA", "L", "LA", "1"), "WEBP": ("RGB", "RGBA")}
"""Format -> Pillow's modes that are written as they are. An image in any other mode becomes RGB. If
such an image is transparent, it becomes RGBA, or in a JPEG RGB on white.
"""


class StoredImage(NamedTuple):
    """The bytes of an image as they are stored, with its height and width in pixels."""

    data: bytes
    height: int
    width: int


@frozen(kw_only=True)
class Rewriting:
    """How images are shrunk and rewritten before they are stored."""

    longest: int | None = None
    "The most pixels of the longer side; None: no image is shrunk."
    format: str | None = None
    "jpeg, png or webp, for every image; None: shrunk images keep their format, or become PNG."
    quality: int = 90

    def apply(self, data: bytes, height: int, width: int) -> StoredImage:
        """Return the image as it is stored. If no format is set, an image that is small enough is
        not changed.

        Args:
            data: the bytes of the image's file.
            height: the pixels of the image's height, as `width`.

        Raises BadImage if the image does not decode.
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
            height: pixels of the rewritten image's height, as `width`.
            shrinks: whether the image becomes smaller.
        """
        from PIL import Image as pillow  # noqa: N813
        from PIL import ImageOps

        # Choose the format. MPO is a JPEG with further images after the first.
        own_format = "JPEG" if image.format == "MPO" else str(image.format)
        format = own_format if own_format in KEPT_MODES else "PNG"
        if self.format:
            format = self.format.upper()

        # Decode a JPEG at a fraction of its size, with sides at least twice as long as the sides of
        # the result; but not for a large result, of a sixteenth of LARGE_PIXELS or more.
        if shrinks and height * width * 16 < LARGE_PIXELS and own_format == "JPEG":
            least_side = 2 * max(width, height)
            image.draft(None, (least_side, least_side))

        # Turn, convert and resize the image, and write it.
        upright = _convert_mode(ImageOps.exif_transpose(image), format)
        if upright.size != (width, height):
            upright = upright.resize((width, height), pillow.Resampling.LANCZOS)
        settings: dict[str, Any] = {} if format == "PNG" else {"quality": self.quality}
        rewritten = io.BytesIO()
        upright.save(rewritten, format, **settings)
        return rewritten.getvalue()


def _convert_mode(image: Image, format: str) -> Image:
    """Return the image in one of Pillow's modes that can be written in this format (`KEPT_MODES`).

    Args:
        format: `JPEG`, `PNG` or `WEBP`.
    """
    from PIL import Image as pillow  # noqa: N813

    if image.mode in KEPT_MODES[format]:
        return image
    is_transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    if not is_transparent:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    if "RGBA" in KEPT_MODES[format]:
        return rgba
    white = pillow.new("RGBA", rgba.size, "white")
    return pillow.alpha_composite(white, rgba).convert("RGB")
