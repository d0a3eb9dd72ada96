"""An image is judged by its bytes: every kind of JPEG, damaged or not, as by Pillow's decode of all
pixels. An image that is incomplete, damaged or too large has its reason. Images are shrunk and
rewritten as the recipe asks.
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


class Judgement(NamedTuple):
    """The size of a good image, or the reason why it is bad."""

    height: int = 0
    width: int = 0
    reason: str = ""
    why: str = ""


def judge_as(data: bytes, rules: Rules) -> Judgement:
    try:
        return Judgement(*judge_image(data, rules))
    except BadImage as bad:
        return Judgement(reason=bad.reason, why=bad.why)


def noise(width: int = 64, height: int = 48) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def frames(format: str) -> bytes:
    return saved(noise(), format, save_all=True, append_images=[noise().rotate(90)])


def turned(image: Image.Image, format: str, orientation: int, **options: Any) -> bytes:
    """Return an image whose EXIF has this orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, format, exif=exif, **options)


def test_a_complete_image_is_good_and_a_truncated_one_is_bad() -> None:
    """Bytes after the end of an image are ignored."""
    for format in FORMATS:
        data = saved(noise(), format)
        for rules in (FULL, HEADER):
            assert judge_as(data, rules) == Judgement(48, 64), format
        for trailer in (b"\r\n", bytes(100), b"; and more"):
            assert format == "TIFF" or judge_as(data + trailer, FULL).reason == "", format
        for share in (0.3, 0.9, 1.0):
            cut = data[: min(int(share * len(data)), len(data) - 8)]
            assert judge_as(cut, FULL).reason in CUT, (format, share)
            assert format in ("GIF", "TIFF") or judge_as(cut, HEADER).reason in CUT, (format, share)
    why = "it has fewer bytes than its header says"
    for format, rules in product(("WEBP", "BMP"), (FULL, HEADER)):
        data = saved(noise(), format)
        judgements = {judge_as(data[:end], rules) for end in (60, len(data) // 2, len(data) - 1)}
        assert judgements == {Judgement(reason="image_truncated", why=why)}


def test_an_image_of_exactly_max_pixels_is_good_and_one_pixel_more_is_bad() -> None:
    """A decompression bomb is recognised by its header, although Pillow itself would raise or warn
    first.
    """
    data = saved(noise(), "PNG")
    reasons = [judge_as(data, Rules(max_pixels=64 * 48 - n)).reason for n in (0, 1)]
    assert reasons == ["", "image_too_large"]
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + data[24:29]
    bomb = data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    judgement = judge_as(bomb, FULL)
    assert (judgement.reason, "20000 x 20000" in judgement.why) == ("image_too_large", True)


def test_sizes_are_those_after_the_turn_that_exif_requires() -> None:
    for format, orientation in product(("JPEG", "PNG", "WEBP", "TIFF"), range(1, 9)):
        data, size = turned(noise(), format, orientation), (48, 64)
        for rules in (FULL, HEADER):
            judged_size = judge_as(data, rules)[:2]
            assert judged_size == (size if orientation < 5 else size[::-1]), (format, orientation)


def test_images_that_processors_convert_are_good_and_others_have_a_reason() -> None:
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
        assert judge_as(data, FULL).reason == reason, data[:20]


def test_the_message_on_a_file_that_is_not_an_image_quotes_none_of_its_bytes() -> None:
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
        judgement = judge_as(data, FULL)
        assert judgement.reason == "not_an_image"
        assert why in judgement.why
        assert not any(word in judgement.why for word in ("root", "secret", "\\x", "404"))


def test_a_decode_finds_damage_after_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a large image: a JPEG is decoded at a smaller size, a PNG while no other is."""
    for limit in (judge.LARGE_PIXELS, 1000):
        monkeypatch.setattr(judge, "LARGE_PIXELS", limit)
        assert judge_as(saved(noise(256, 256), "JPEG"), FULL).reason == ""
        data = bytearray(saved(noise(256, 256), "PNG"))
        assert judge_as(bytes(data), FULL).reason == ""
        data[len(data) // 2] ^= 0xFF
        reasons = [judge_as(bytes(data), rules).reason for rules in (HEADER, FULL)]
        assert reasons == ["", "image_damaged"]


def changed(data: bytes, rewriting: Rewriting) -> tuple[Image.Image, tuple[int, int]]:
    stored, *size = rewriting.apply(data, *judge_image(data, Rules()))
    assert tuple(size) == judge_image(stored, Rules())
    return Image.open(io.BytesIO(stored)), (size[0], size[1])


def smooth(size: tuple[int, int]) -> Image.Image:
    """Return smooth waves: a decode to fewer pixels than requested would change them visibly."""
    across, down = np.meshgrid(np.linspace(0, 20, size[0]), np.linspace(0, 9, size[1]))
    waves = np.stack([np.sin(across), np.cos(down), np.sin(across + down)], axis=-1)
    return Image.fromarray((128 + 120 * waves).astype(np.uint8))


def test_a_shrunk_image_has_the_longest_side_and_the_pixels_of_the_upright_image() -> None:
    for case in product(("JPEG", "PNG", "WEBP"), (1, 6), ((400, 300), (300, 400))):
        format, orientation, size = case
        quality = {} if format == "PNG" else {"quality": 95}
        data = turned(smooth(size), format, orientation, **quality)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        expected = upright.resize(
            (upright.width // 4, upright.height // 4), Image.Resampling.LANCZOS
        )
        image_changed, (height, width) = changed(data, Rewriting(longest=100, quality=95))
        assert ((width, height), image_changed.format) == (expected.size, format), case
        assert not image_changed.getexif().get(0x0112)
        pixels = (np.asarray(image.convert("RGB"), int) for image in (image_changed, expected))
        assert np.abs(next(pixels) - next(pixels)).mean() < 4, case


def test_a_small_image_keeps_its_bytes_and_a_thin_one_keeps_a_pixel() -> None:
    data = drawing(size=(40, 30))
    size = judge_image(data, Rules())
    assert Rewriting(longest=40).apply(data, *size) == (data, *size)
    _, size = changed(saved(smooth((900, 2)), "PNG"), Rewriting(longest=100))
    assert size == (1, 100)


def test_a_rewritten_image_has_the_format_the_quality_and_a_white_background() -> None:
    data = saved(smooth((64, 48)), "PNG")
    low, high = (Rewriting(format="JPEG", quality=q).apply(data, 48, 64)[0] for q in (10, 90))
    assert 3 * len(low) < 2 * len(high)
    clear = saved(Image.new("RGBA", (20, 10), (0, 0, 0, 0)), "PNG")
    image_changed, size = changed(clear, Rewriting(format="JPEG"))
    assert (image_changed.format, size, image_changed.getpixel((3, 3))) == (
        "JPEG",
        (10, 20),
        (255, 255, 255),
    )


def test_a_large_image_is_decoded_while_no_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, data = Mock(side_effect=nullcontext), drawing(size=(40, 30))
    monkeypatch.setattr(judge, "lock_large_images", lock)
    for limit, times in ((1 << 20, 0), (100, 1)):
        monkeypatch.setattr(judge, "LARGE_PIXELS", limit)
        size = judge_image(data, Rules())
        assert lock.call_count == times
        Rewriting(longest=20).apply(data, *size)
        assert lock.call_count == 2 * times


DAMAGED, SEED = 600, 1
"How many damaged files are tried, and which: about 1,000 take a second."
KEPT = Path(__file__).parent / "golden" / "jpegs"
"""What Pillow does not write: arithmetic coding, a scan for each component, RGB without a
transform, odd sampling. Made of a picture of 33 x 31 by libjpeg-turbo's cjpeg and jpegtran.
"""
SIZES = ((1, 1), (7, 5), (33, 31), (97, 64))
MARKS = (0xD9, 0xDA, 0xD0, 0xD3, 0xD7, 0xC0, 0xC2, 0xC4, 0xDB, 0xDC, 0xDD, 0x00, 0xFF, 0xFE)


def kinds() -> dict[str, bytes]:
    """Return name -> a good JPEG, of every kind."""
    images = {path.stem: path.read_bytes() for path in KEPT.glob("*.jpg")}
    for size, mode, progressive, restart in product(
        SIZES, ("RGB", "L", "CMYK"), (False, True), (0, 3)
    ):
        options = {"progressive": progressive, "restart_marker_blocks": restart}
        images[f"{mode} {size} {options}"] = saved(noise(*size).convert(mode), **options)
    for size, sampling in product(SIZES, (0, 1)):
        images[f"{size} sampling={sampling}"] = saved(noise(*size), subsampling=sampling)
    image = noise(*SIZES[2])
    images["trailer"] = saved(image) + b"a trailer of the camera's"
    images["two"] = saved(image) * 2
    images["MPO"] = saved(image, "MPO", save_all=True, append_images=[image.rotate(90)])
    images["profile"] = saved(image, icc_profile=bytes(300), comment=b"a drawing")
    return images


def damaged(good: bytes, rng: random.Random) -> bytes:
    """Damage an image in one to three ways, half of them in the header: truncate it, flip bits,
    replace bytes, or write a mark or a number into it.
    """
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(data) <= 4:
            break
        position, length = rng.randrange(len(data)), rng.choice((0, rng.randrange(1, 200)))
        if rng.random() < 0.5:
            position = rng.randrange(min(len(data), 700))
        damage = rng.choice(("cut", "cut", "flip", "replace", "replace", "mark", "number"))
        if damage == "cut":
            del data[-rng.randrange(1, min(len(data), rng.choice((40, len(data))))) :]
            data += rng.choice((b"", b"\xff\xd9"))
        elif damage == "flip":
            for _ in range(rng.choice((1, 1, 2, 20))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif damage == "replace":  # left out, put in, or filled
            new = (b"", rng.randbytes(rng.randrange(1, 20)), b"\0" * length, b"\xff" * length)
            data[position : position + length] = rng.choice(new)
        elif damage == "mark":
            data[position : position + 2] = bytes((0xFF, rng.choice(MARKS)))
        else:  # of a size, a sampling, a table, a component, a spectral range
            data[position] = rng.choice((0, 1, 2, 3, 4, 8, 255, data[position] ^ 1))
    return bytes(data)


def test_every_jpeg_damaged_or_not_is_judged_as_by_a_full_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with arithmetic coding, CMYK, several scans, restart marks, MPO or bytes after the end,
    and of a single pixel.
    """
    good, rng, reasons, rules = (
        kinds(),
        random.Random(SEED),
        Counter[str](),
        Rules(max_pixels=1 << 22),
    )
    assert {judge_as(data, rules).reason for data in good.values()} == {""}
    tried = [damaged(good[name], rng) for name in rng.choices(sorted(good), k=DAMAGED)]
    for data in (*good.values(), *tried):
        ours = judge_as(data, rules)
        with monkeypatch.context() as patch:
            patch.setattr(judge, "_decodes_small", lambda image: False)
            assert ours == judge_as(data, rules), data.hex()
        reasons[ours.reason] += 1
    assert min(reasons[""] - len(good), reasons["image_damaged"], reasons["image_truncated"]) > 40


AVIF = features.check("avif")


@pytest.mark.skipif(not AVIF, reason="this Pillow has no decoder of AVIF")
def test_avif_is_read_if_pillow_reads_it() -> None:
    for orientation in (1, 6):
        data = turned(noise(), "AVIF", orientation)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert judge_as(data, FULL) == Judgement(upright.height, upright.width)
        _, size = changed(data, Rewriting(longest=32))
        assert max(size) == 32
    assert judge_as(data[:-20], FULL).reason in CUT
    assert judge_as(frames("AVIF"), FULL).reason == "image_animated"
    text = base64.b64encode(data).decode()
    assert read_image(text) == read_image(f"data:image/avif;base64,{text}") == data


def test_avif_without_its_decoder_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_list_formats", lambda: judge.FORMATS)
    data = saved(noise(), "AVIF") if AVIF else b"\0\0\0 ftypavif"
    judgement = judge_as(data, FULL)
    assert judgement.reason == "not_an_image"
    assert "it is AVIF, which Pillow reads from 11.3 on" in judgement.why
