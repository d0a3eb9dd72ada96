"""An image is judged by its bytes: what is missing, cut off, damaged or too much of it has its reason."""

import builtins
import struct
import zlib
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from mdsmix.errors import RecipeError
from mdsmix.images import judge
from mdsmix.images.judge import Rules, decode, opened, require_pillow
from tests.jpegs import differing, judged, kinds, saved
from tests.pictures import Looked, drawing, look

FULL, HEADER = Rules(), Rules(decode="header")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
CUT = ("image_truncated", "image_damaged", "not_an_image")


@pytest.fixture(autouse=True)
def _pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    require_pillow()


def noise(width: int = 64, height: int = 48) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def frames(format: str) -> bytes:
    return saved(noise(), format, save_all=True, append_images=[noise().rotate(90)])


def test_a_whole_image_is_good_and_one_that_was_cut_off_is_bad() -> None:
    """What stands behind the end of an image is none of it."""
    for format in FORMATS:
        data = saved(noise(), format)
        for rules in (FULL, HEADER):
            assert look(data, rules) == Looked(48, 64), format
        for behind in (b"\r\n", bytes(100), b"; and more"):
            assert format == "TIFF" or look(data + behind, FULL).reason == "", format
        for part in (0.3, 0.9, 1.0):
            cut = data[: min(int(part * len(data)), len(data) - 8)]
            assert look(cut, FULL).reason in CUT, (format, part)
            assert format in ("GIF", "TIFF") or look(cut, HEADER).reason in CUT, (format, part)
    why = "it has fewer bytes than its header says"
    for format, rules in product(("WEBP", "BMP"), (FULL, HEADER)):
        data = saved(noise(), format)
        found = {look(data[:end], rules) for end in (60, len(data) // 2, len(data) - 1)}
        assert found == {Looked(reason="image_truncated", why=why)}


def test_the_thumbnail_of_a_jpeg_that_was_cut_off_does_not_end_it() -> None:
    """Its end mark stands in the header, before the pixels."""
    exif = b"Exif\0\0" + saved(noise(16, 16), "JPEG")
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    data = saved(noise(), "JPEG")
    whole = data[:2] + segment + data[2:]
    assert b"\xff\xd9" in whole[: len(whole) // 2]
    assert look(whole[:-200], HEADER).reason == "image_truncated"
    assert look(whole + b"a trailer of the camera's", HEADER).reason == ""


def test_as_many_pixels_as_are_allowed_are_not_too_many() -> None:
    """A bomb is known by its header: Pillow itself would raise, or warn, before it is asked."""
    data = saved(noise(), "PNG")
    reasons = [look(data, Rules(max_pixels=64 * 48 - n)).reason for n in (0, 1)]
    assert reasons == ["", "image_too_large"]
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + data[24:29]
    bomb = data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    found = look(bomb, FULL)
    assert (found.reason, "20000 x 20000" in found.why) == ("image_too_large", True)


def test_sizes_are_those_after_the_turn_that_exif_asks_for() -> None:
    for format, orientation in product(("JPEG", "PNG", "WEBP", "TIFF"), range(1, 9)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data, size = saved(noise(), format, exif=exif), (48, 64)
        for rules in (FULL, HEADER):
            found = look(data, rules)[:2]
            assert found == (size if orientation < 5 else size[::-1]), (format, orientation)


def test_what_cannot_be_trained_on_has_its_reason_and_what_processors_convert_is_good() -> None:
    for data, reason in (
        (b"", "image_empty"),
        (frames("GIF"), "image_animated"),
        (frames("WEBP"), "image_animated"),
        (frames("MPO"), ""),  # a phone's JPEG with a second picture
        (saved(Image.fromarray(np.full((9, 9), 4000, np.uint16)), "PNG"), "image_depth"),
        (saved(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF"), "image_depth"),
        (saved(noise(), "ICO"), "not_an_image"),
        *((saved(noise().convert(mode), "JPEG"), "") for mode in ("CMYK", "L")),
        *((saved(noise().convert(mode), "PNG"), "") for mode in ("P", "RGBA", "1")),
        (drawing(), ""),
    ):
        assert look(data, FULL).reason == reason, data[:20]


def test_what_is_no_image_is_told_without_a_byte_of_it() -> None:
    for data, why in (
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
    ):
        found = look(data, FULL)
        assert found.reason == "not_an_image"
        assert why in found.why
        assert not any(word in found.why for word in ("root", "secret", "\\x", "404"))


def test_damage_behind_a_good_header_shows_in_a_decode_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a large image too: a JPEG is decoded smaller, a PNG alone."""
    for most in (judge.LARGE_PIXELS, 1000):
        monkeypatch.setattr(judge, "LARGE_PIXELS", most)
        assert look(saved(noise(256, 256), "JPEG"), FULL).reason == ""
        data = bytearray(saved(noise(256, 256), "PNG"))
        assert look(bytes(data), FULL).reason == ""
        data[len(data) // 2] ^= 0xFF
        found = [look(bytes(data), rules).reason for rules in (HEADER, FULL)]
        assert found == ["", "image_damaged"]


def test_a_jpeg_is_decoded_into_a_sixty_fourth_of_its_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it takes half of the time, and 3 bytes where it took 256. Who says no to one is a decode into all pixels."""
    data = saved(noise(), "JPEG")
    with opened(data) as image:
        decode(image, data)
        assert (image.size, image.mode) == ((8, 6), "L")
    monkeypatch.setattr(judge, "_is_whole", lambda _: False)
    assert look(data, FULL).reason == ""
    assert look(data[: len(data) // 2] + b"\xff\xd9", FULL).reason == ""
    assert look(data[:-2], FULL).reason == "image_truncated"


def test_every_kind_of_jpeg_and_damage_is_judged_as_by_a_whole_decode() -> None:
    """Arithmetic coding, CMYK, several scans, restart marks, MPO, what follows the end, of one pixel or more."""
    for name, data in kinds().items():
        ours, whole = judged(data)
        assert (ours, ours.reason) == (whole, ""), name
    found = Counter[str]()
    assert list(differing(600, 1, found)) == []
    assert min(found[what] for what in ("good", "image_damaged", "image_truncated")) > 40


def test_without_pillow_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RecipeError, match=r"mdsmix\[images\]"):
        require_pillow()
