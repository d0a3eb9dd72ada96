"""Images that are made smaller or written anew, against Pillow's own whole decode; and what is decoded alone on its machine."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from PIL import Image, ImageOps

from mdsmix.images import judge
from mdsmix.images.judge import Rewriting, Rules, opened, size_of
from tests.jpegs import saved
from tests.pictures import drawing


def changed(data: bytes, asked: Rewriting) -> tuple[Image.Image, tuple[int, int]]:
    made, *size = asked.apply(data, *size_of(data, Rules()))
    assert tuple(size) == size_of(made, Rules())
    return Image.open(io.BytesIO(made)), (size[0], size[1])


def smooth(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Two ramps: a decode into fewer pixels than asked for shows."""
    across, down = np.meshgrid(np.linspace(0, 20, size[0]), np.linspace(0, 9, size[1]))
    waves = np.stack([np.sin(across), np.cos(down), np.sin(across + down)], axis=-1)
    return Image.fromarray((128 + 120 * waves).astype(np.uint8)).convert(mode)


def test_the_longest_side_is_as_asked_and_the_pixels_are_those_as_seen() -> None:
    for case in product(("JPEG", "PNG", "WEBP"), (1, 6), ((400, 300), (300, 400))):
        format, orientation, size = case
        exif = Image.Exif()
        exif[0x0112] = orientation
        quality = {} if format == "PNG" else {"quality": 95}
        data = saved(smooth(size), format, exif=exif, **quality)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        wanted = upright.resize((upright.width // 4, upright.height // 4), Image.Resampling.LANCZOS)
        found, (height, width) = changed(data, Rewriting(longest=100, quality=95))
        assert ((width, height), found.format) == (wanted.size, format), case
        assert not found.getexif().get(0x0112)
        pixels = (np.asarray(image.convert("RGB"), int) for image in (found, wanted))
        assert np.abs(next(pixels) - next(pixels)).mean() < 4, case


def test_one_that_is_small_enough_keeps_its_bytes_and_a_thin_one_a_pixel() -> None:
    data = drawing(size=(40, 30))
    size = size_of(data, Rules())
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
    entered = list[str]()

    @contextmanager
    def alone() -> Iterator[None]:
        entered.append("")
        yield

    monkeypatch.setattr(judge, "alone", alone)
    data = drawing(size=(40, 30))
    for most, times in ((1 << 20, 0), (100, 1)):
        monkeypatch.setattr(judge, "LARGE_PIXELS", most)
        size = size_of(data, Rules())
        assert len(entered) == times
        Rewriting(longest=20).apply(data, *size)
        assert len(entered) == 2 * times


def test_want_of_memory_is_no_fault_of_an_image() -> None:
    with pytest.raises(MemoryError), opened(drawing()):
        raise MemoryError
