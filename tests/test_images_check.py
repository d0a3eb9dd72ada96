"""An image is judged by its bytes: what is missing, cut off, damaged or too much of it has its reason."""

from __future__ import annotations

import builtins
import io
import struct
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from mdsmix.errors import RecipeError
from mdsmix.images import judge
from mdsmix.images.judge import Rules, decode, opened, require_pillow
from tests.jpegs import differing, judged, kinds
from tests.pictures import Looked, drawing, look

FULL, HEADER = Rules(), Rules(decode="header")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


@pytest.fixture(autouse=True)
def _pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    require_pillow()


def saved(image: Image.Image, format: str, **more: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **more)
    return out.getvalue()


def noise(width: int = 64, height: int = 48) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rules", [FULL, HEADER])
def test_a_whole_image_is_good_and_has_its_size(format: str, rules: Rules) -> None:
    found = look(saved(noise(), format), rules)
    assert (found.reason, found.height, found.width) == ("", 48, 64)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("part", [0.3, 0.9, 1.0])
def test_an_image_that_was_cut_off_is_bad(format: str, part: float) -> None:
    data = saved(noise(), format)
    cut = data[: min(int(part * len(data)), len(data) - 8)]
    assert look(cut, FULL).reason in ("image_truncated", "image_damaged", "not_an_image")
    if format not in ("GIF", "TIFF"):
        assert look(cut, HEADER).reason in ("image_truncated", "image_damaged", "not_an_image")


def test_the_thumbnail_of_a_jpeg_that_was_cut_off_does_not_end_it() -> None:
    """Its end mark stands in the header, before the pixels."""
    exif = b"Exif\0\0" + saved(noise(16, 16), "JPEG")
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    data = saved(noise(), "JPEG")
    whole = data[:2] + segment + data[2:]
    assert b"\xff\xd9" in whole[: len(whole) // 2]
    assert look(whole[:-200], HEADER).reason == "image_truncated"
    assert look(whole + b"a trailer of the camera's", HEADER).reason == ""


@pytest.mark.parametrize("rules", [FULL, HEADER])
@pytest.mark.parametrize("format", ["WEBP", "BMP"])
def test_a_webp_or_bmp_that_was_cut_off_is_told_by_its_header(format: str, rules: Rules) -> None:
    data = saved(noise(), format)
    found = {look(data[:end], rules) for end in (60, len(data) // 2, len(data) - 1)}
    why = "it has fewer bytes than its header says"
    assert found == {Looked(reason="image_truncated", why=why)}


def test_as_many_pixels_as_are_allowed_are_not_too_many() -> None:
    data = saved(noise(), "PNG")
    found = look(data, FULL)
    most = found.height * found.width
    assert [look(data, Rules(max_pixels=n)).reason for n in (most, most - 1)] == ["", "image_too_large"]  # fmt: skip


@pytest.mark.parametrize(
    ("orientation", "size"),
    [*((n, (48, 64)) for n in (1, 2, 3, 4)), *((n, (64, 48)) for n in (5, 6, 7, 8))],
)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_sizes_are_those_after_the_turn_that_exif_asks_for(
    format: str, orientation: int, size: tuple[int, int]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(noise(), format, exif=exif)
    for rules in (FULL, HEADER):
        found = look(data, rules)
        assert (found.height, found.width) == size


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "image_empty"),
        (b"<html>404</html>", "not_an_image"),
        (b"\xff\xd8\xff", "not_an_image"),
        (
            saved(noise(), "GIF", save_all=True, append_images=[noise().rotate(90)]),
            "image_animated",
        ),
        (
            saved(noise(), "WEBP", save_all=True, append_images=[noise().rotate(90)]),
            "image_animated",
        ),
        (saved(Image.fromarray(np.full((9, 9), 4000, np.uint16)), "PNG"), "image_depth"),
        (saved(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF"), "image_depth"),
        (saved(noise(), "ICO"), "not_an_image"),
    ],
)
def test_what_cannot_be_trained_on_has_its_reason(data: bytes, reason: str) -> None:
    assert look(data, FULL).reason == reason


@pytest.mark.parametrize("mode", ["CMYK", "L", "P", "RGBA", "1"])
def test_what_every_processor_converts_is_good(mode: str) -> None:
    format = "JPEG" if mode in ("CMYK", "L") else "PNG"
    assert look(saved(noise().convert(mode), format), FULL).reason == ""


@pytest.mark.parametrize("format", [each for each in FORMATS if each != "TIFF"])
def test_what_stands_behind_the_end_of_an_image_is_none_of_it(format: str) -> None:
    for behind in (b"\r\n", bytes(100), b"; and more"):
        assert look(saved(noise(), format) + behind, FULL).reason == ""


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"root:x:0:0:root:/root:/bin/sh", "it begins as none of JPEG, PNG, WebP, GIF, BMP and"),
        (b"%PDF-1.7", "it begins as none of JPEG"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>404</html>", "it is HTML, "),
        (b'<?xml version="1.0"?>\n<!-- x -->\n<svg>', "it is HTML, SVG or XML"),
        (saved(noise(), "AVIF") if features.check("avif") else b"\0\0\0 ftypavif", "it is AVIF, "),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "it is AVIF, HEIC or a video: "),
        (b"\xff\xd8\xff", "or its header cannot be read"),
        (b'<?xml version="1.0"?><Error><Code>NoSuchKey', "as servers send without an image"),
        (bytes(99), "it holds zeros"),
    ],
)
def test_what_is_no_image_is_told_without_a_byte_of_it(data: bytes, why: str) -> None:
    found = look(data, FULL)
    assert found.reason == "not_an_image"
    assert why in found.why
    assert not any(word in found.why for word in ("root", "secret", "\\x", "404"))


def test_a_phones_jpeg_with_a_second_picture_is_no_animation() -> None:
    data = saved(noise(), "MPO", save_all=True, append_images=[noise().rotate(90)])
    assert look(data, FULL).reason == ""


def test_a_bomb_is_known_by_its_header() -> None:
    """Pillow itself would raise, or warn, before it is asked; here the recipe's limit holds."""
    data = saved(noise(9, 9), "PNG")
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + data[24:29]
    data = data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    found = look(data, FULL)
    assert found.reason == "image_too_large"
    assert "20000 x 20000" in found.why


def test_damage_behind_a_good_header_shows_in_a_decode_alone() -> None:
    data = bytearray(saved(noise(), "PNG"))
    data[len(data) // 2] ^= 0xFF
    assert look(bytes(data), HEADER).reason == ""
    assert look(bytes(data), FULL).reason == "image_damaged"


def test_a_large_jpeg_is_decoded_smaller_and_a_large_png_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge, "LARGE_PIXELS", 1000)
    data = saved(noise(256, 256), "JPEG")
    assert look(data, FULL).reason == ""
    png = bytearray(saved(noise(256, 256), "PNG"))
    assert look(bytes(png), FULL).reason == ""
    png[len(png) // 2] ^= 0xFF
    assert look(bytes(png), FULL).reason == "image_damaged"


def test_a_jpeg_is_decoded_into_a_sixty_fourth_of_its_pixels() -> None:
    """So it takes half of the time, and 3 bytes where it took 256."""
    data = saved(noise(), "JPEG")
    with opened(data) as image:
        decode(image, data)
        assert (image.size, image.mode) == ((8, 6), "L")


@pytest.mark.parametrize("name", sorted(kinds()))
def test_every_kind_of_jpeg_is_good(name: str) -> None:
    """Arithmetic coding, CMYK, several scans, restart marks, MPO, what follows the end, of one pixel or more."""
    ours, whole = judged(kinds()[name])
    assert ours == whole
    assert ours.reason == ""


def test_a_damaged_jpeg_is_judged_as_a_decode_into_all_pixels_judges_it() -> None:
    found = Counter[str]()
    assert list(differing(1500, 1, found)) == []
    assert min(found[what] for what in ("good", "image_damaged", "image_truncated")) > 100


def test_who_says_no_to_a_jpeg_is_a_decode_into_all_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_is_whole", lambda _: False)
    data = saved(noise(), "JPEG")
    assert look(data, FULL).reason == ""
    assert look(data[: len(data) // 2] + b"\xff\xd9", FULL).reason == ""
    assert look(data[:-2], FULL).reason == "image_truncated"


def test_without_pillow_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RecipeError, match=r"mdsmix\[images\]"):
        require_pillow()


def test_a_drawing_of_the_tests_is_whole() -> None:
    assert look(drawing(), FULL).reason == ""
