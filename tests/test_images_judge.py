"""An image is judged by its bytes, every kind of JPEG and damage to it as by Pillow's decode into
all pixels: what is missing, damaged or too much of it has its reason; and what is made smaller or
written anew.
"""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections import Counter
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from mdsmix.images import judge
from mdsmix.images.judge import BadImage, Rewriting, Rules, judge_image, require_pillow
from mdsmix.shapes.image_parts import read_image
from tests.pictures import drawing, saved

FULL, HEADER = Rules(), Rules(decode="header")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
CUT = ("image_truncated", "image_damaged", "not_an_image")


@pytest.fixture(autouse=True)
def _pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    require_pillow()


class Looked(NamedTuple):
    """What an image was judged to be: its size, or why it is bad."""

    height: int = 0
    width: int = 0
    reason: str = ""
    why: str = ""


def look(data: bytes, rules: Rules) -> Looked:
    try:
        return Looked(*judge_image(data, rules))
    except BadImage as bad:
        return Looked(reason=bad.reason, why=bad.why)


def noise(width: int = 64, height: int = 48) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def frames(format: str) -> bytes:
    return saved(noise(), format, save_all=True, append_images=[noise().rotate(90)])


def turned(image: Image.Image, format: str, orientation: int, **more: Any) -> bytes:
    """As EXIF asks for."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, format, exif=exif, **more)


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
        data, size = turned(noise(), format, orientation), (48, 64)
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
        (
            b"root:x:0:0:root:/root:/bin/sh",
            "it is not JPEG, PNG, WebP, GIF, BMP, TIFF or",
        ),
        (b"%PDF-1.7", "it is not JPEG"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>404</html>", "it is HTML, "),
        (b'<?xml version="1.0"?>\n<!-- x -->\n<svg>', "it is HTML, SVG or XML"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "it is HEIC or a video: "),
        (b"\xff\xd8\xff", "or its header cannot be read"),
        (b'<?xml version="1.0"?><Error><Code>NoSuchKey', "as servers send without an image"),
        (bytes(99), "it contains only zeros"),
    ):
        found = look(data, FULL)
        assert found.reason == "not_an_image"
        assert why in found.why
        assert not any(word in found.why for word in ("root", "secret", "\\x", "404"))


def test_a_decode_finds_damage_behind_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large image too: a JPEG is decoded smaller, a PNG alone."""
    for most in (judge.LARGE_PIXELS, 1000):
        monkeypatch.setattr(judge, "LARGE_PIXELS", most)
        assert look(saved(noise(256, 256), "JPEG"), FULL).reason == ""
        data = bytearray(saved(noise(256, 256), "PNG"))
        assert look(bytes(data), FULL).reason == ""
        data[len(data) // 2] ^= 0xFF
        found = [look(bytes(data), rules).reason for rules in (HEADER, FULL)]
        assert found == ["", "image_damaged"]


def changed(data: bytes, asked: Rewriting) -> tuple[Image.Image, tuple[int, int]]:
    made, *size = asked.apply(data, *judge_image(data, Rules()))
    assert tuple(size) == judge_image(made, Rules())
    return Image.open(io.BytesIO(made)), (size[0], size[1])


def smooth(size: tuple[int, int]) -> Image.Image:
    """Two ramps: a decode into fewer pixels than asked for shows."""
    across, down = np.meshgrid(np.linspace(0, 20, size[0]), np.linspace(0, 9, size[1]))
    waves = np.stack([np.sin(across), np.cos(down), np.sin(across + down)], axis=-1)
    return Image.fromarray((128 + 120 * waves).astype(np.uint8))


def test_the_longest_side_is_as_asked_and_the_pixels_are_those_as_seen() -> None:
    for case in product(("JPEG", "PNG", "WEBP"), (1, 6), ((400, 300), (300, 400))):
        format, orientation, size = case
        quality = {} if format == "PNG" else {"quality": 95}
        data = turned(smooth(size), format, orientation, **quality)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        wanted = upright.resize((upright.width // 4, upright.height // 4), Image.Resampling.LANCZOS)
        found, (height, width) = changed(data, Rewriting(longest=100, quality=95))
        assert ((width, height), found.format) == (wanted.size, format), case
        assert not found.getexif().get(0x0112)
        pixels = (np.asarray(image.convert("RGB"), int) for image in (found, wanted))
        assert np.abs(next(pixels) - next(pixels)).mean() < 4, case


def test_one_that_is_small_enough_keeps_its_bytes_and_a_thin_one_a_pixel() -> None:
    data = drawing(size=(40, 30))
    size = judge_image(data, Rules())
    assert Rewriting(longest=40).apply(data, *size) == (data, *size)
    _, size = changed(saved(smooth((900, 2)), "PNG"), Rewriting(longest=100))
    assert size == (1, 100)


def test_written_anew_it_has_the_format_the_quality_and_a_white_ground() -> None:
    data = saved(smooth((64, 48)), "PNG")
    low, high = (Rewriting(format="JPEG", quality=q).apply(data, 48, 64)[0] for q in (10, 90))
    assert 3 * len(low) < 2 * len(high)
    clear = saved(Image.new("RGBA", (20, 10), (0, 0, 0, 0)), "PNG")
    found, size = changed(clear, Rewriting(format="JPEG"))
    assert (found.format, size, found.getpixel((3, 3))) == ("JPEG", (10, 20), (255, 255, 255))


def test_a_large_image_is_decoded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, data = Mock(side_effect=nullcontext), drawing(size=(40, 30))
    monkeypatch.setattr(judge, "lock_large_images", alone)
    for most, times in ((1 << 20, 0), (100, 1)):
        monkeypatch.setattr(judge, "LARGE_PIXELS", most)
        size = judge_image(data, Rules())
        assert alone.call_count == times
        Rewriting(longest=20).apply(data, *size)
        assert alone.call_count == 2 * times


DAMAGED, SEED = 600, 1
"How many damaged files are tried, and which: about 1,000 take a second."
KEPT = Path(__file__).parent / "golden" / "jpegs"
"""What Pillow does not write: arithmetic coding, a scan for each component, RGB without a
transform, odd sampling. Made of a picture of 33 x 31 by libjpeg-turbo's cjpeg and jpegtran.
"""
SIZES = ((1, 1), (7, 5), (33, 31), (97, 64))
MARKS = (0xD9, 0xDA, 0xD0, 0xD3, 0xD7, 0xC0, 0xC2, 0xC4, 0xDB, 0xDC, 0xDD, 0x00, 0xFF, 0xFE)


def kinds() -> dict[str, bytes]:
    """Name -> a good JPEG."""
    found = {path.stem: path.read_bytes() for path in KEPT.glob("*.jpg")}
    for size, mode, progressive, restart in product(SIZES, ("RGB", "L", "CMYK"), (False, True), (0, 3)):  # fmt: skip
        more = {"progressive": progressive, "restart_marker_blocks": restart}
        found[f"{mode} {size} {more}"] = saved(noise(*size).convert(mode), **more)
    for size, sampling in product(SIZES, (0, 1)):
        found[f"{size} sampling={sampling}"] = saved(noise(*size), subsampling=sampling)
    one = noise(*SIZES[2])
    found["trailer"] = saved(one) + b"a trailer of the camera's"
    found["two"] = saved(one) * 2
    found["MPO"] = saved(one, "MPO", save_all=True, append_images=[one.rotate(90)])
    found["profile"] = saved(one, icc_profile=bytes(300), comment=b"a drawing")
    return found


def damaged(good: bytes, rng: random.Random) -> bytes:
    """In one to three ways, half of them in the header: cut, flipped, filled, with bytes, numbers
    or marks in between.
    """
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(data) <= 4:
            break
        at, length = rng.randrange(len(data)), rng.choice((0, rng.randrange(1, 200)))
        if rng.random() < 0.5:
            at = rng.randrange(min(len(data), 700))
        how = rng.choice(("cut", "cut", "flip", "replace", "replace", "mark", "number"))
        if how == "cut":
            del data[-rng.randrange(1, min(len(data), rng.choice((40, len(data))))) :]
            data += rng.choice((b"", b"\xff\xd9"))
        elif how == "flip":
            for _ in range(rng.choice((1, 1, 2, 20))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif how == "replace":  # left out, put in, or filled
            new = (b"", rng.randbytes(rng.randrange(1, 20)), b"\0" * length, b"\xff" * length)
            data[at : at + length] = rng.choice(new)
        elif how == "mark":
            data[at : at + 2] = bytes((0xFF, rng.choice(MARKS)))
        else:  # of a size, a sampling, a table, a component, a spectral range
            data[at] = rng.choice((0, 1, 2, 3, 4, 8, 255, data[at] ^ 1))
    return bytes(data)


def test_every_kind_of_jpeg_and_damage_is_judged_as_by_a_whole_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arithmetic coding, CMYK, several scans, restart marks, MPO, what follows the end, of one
    pixel or more.
    """
    good, rng, found, rules = (
        kinds(),
        random.Random(SEED),
        Counter[str](),
        Rules(max_pixels=1 << 22),
    )
    assert {look(data, rules).reason for data in good.values()} == {""}
    tried = [damaged(good[name], rng) for name in rng.choices(sorted(good), k=DAMAGED)]
    for data in (*good.values(), *tried):
        ours = look(data, rules)
        with monkeypatch.context() as patch:
            patch.setattr(judge, "_decodes_small", lambda image: False)
            assert ours == look(data, rules), data.hex()
        found[ours.reason] += 1
    assert min(found[""] - len(good), found["image_damaged"], found["image_truncated"]) > 40


AVIF = features.check("avif")


@pytest.mark.skipif(not AVIF, reason="this Pillow has no decoder of AVIF")
def test_avif_is_read_where_pillow_reads_it() -> None:
    for orientation in (1, 6):
        data = turned(noise(), "AVIF", orientation)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert look(data, FULL) == Looked(upright.height, upright.width)
        _, size = changed(data, Rewriting(longest=32))
        assert max(size) == 32
    assert look(data[:-20], FULL).reason in CUT
    assert look(frames("AVIF"), FULL).reason == "image_animated"
    text = base64.b64encode(data).decode()
    assert read_image(text) == read_image(f"data:image/avif;base64,{text}") == data


def test_avif_without_its_decoder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_formats", lambda: judge.FORMATS)
    data = saved(noise(), "AVIF") if AVIF else b"\0\0\0 ftypavif"
    found = look(data, FULL)
    assert found.reason == "not_an_image"
    assert "it is AVIF, which Pillow reads from 11.3 on" in found.why
