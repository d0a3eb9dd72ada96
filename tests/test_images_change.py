"""Images that are made smaller or written anew, against Pillow's own whole decode; and what is decoded alone on its machine."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image, ImageOps

from mdsmix.images import judge
from mdsmix.images.judge import Rewriting, Rules, opened, size_of
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


def saved(image: Image.Image, format: str, **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **more)  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("size", [(400, 300), (300, 400)])
def test_the_longest_side_is_as_asked_and_the_pixels_are_those_as_seen(
    format: str, orientation: int, size: tuple[int, int]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(smooth(size), format, exif=exif, **({"quality": 95} if format != "PNG" else {}))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    wanted = upright.resize((upright.width // 4, upright.height // 4), Image.Resampling.LANCZOS)
    found, (height, width) = changed(data, Rewriting(longest=100, quality=95))
    assert (width, height) == wanted.size
    assert found.format == format
    assert not found.getexif().get(0x0112)
    far = np.abs(np.asarray(found.convert("RGB"), int) - np.asarray(wanted.convert("RGB"), int))
    assert far.mean() < 4


def test_one_that_is_small_enough_keeps_its_bytes_and_a_thin_one_a_pixel() -> None:
    data = drawing(size=(40, 30))
    size = size_of(data, Rules())
    assert Rewriting(longest=40).apply(data, *size) == (data, *size)
    _, size = changed(saved(smooth((900, 2)), "PNG"), Rewriting(longest=100))
    assert size == (1, 100)


def test_written_anew_it_has_the_format_the_quality_and_a_white_ground() -> None:
    data = saved(smooth((64, 48)), "PNG")
    sizes = [len(Rewriting(format="JPEG", quality=q).apply(data, *size_of(data, Rules()))[0]) for q in (10, 90)]  # fmt: skip
    assert 3 * sizes[0] < 2 * sizes[1]
    clear = saved(Image.new("RGBA", (20, 10), (0, 0, 0, 0)), "PNG")
    found, size = changed(clear, Rewriting(format="JPEG"))
    assert (found.format, size, found.getpixel((3, 3))) == ("JPEG", (10, 20), (255, 255, 255))


@pytest.mark.parametrize("most", [1 << 20, 100])
def test_a_large_image_is_decoded_alone(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = list[str]()

    @contextmanager
    def alone() -> Iterator[None]:
        entered.append("")
        yield

    monkeypatch.setattr(judge, "alone", alone)
    monkeypatch.setattr(judge, "LARGE_PIXELS", most)
    data = drawing(size=(40, 30))
    size = size_of(data, Rules())
    assert len(entered) == (most == 100)
    Rewriting(longest=20).apply(data, *size)
    assert len(entered) == 2 * (most == 100)


def test_want_of_memory_is_no_fault_of_an_image() -> None:
    with pytest.raises(MemoryError), opened(drawing()):
        raise MemoryError
