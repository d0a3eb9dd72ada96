"""Every kind of JPEG, and damage to it, is judged as by a decode into all pixels."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

from PIL import Image

from mdsmix.images import judge
from mdsmix.images.judge import Rules, require_pillow
from tests.pictures import Looked, look, saved

DAMAGED, SEED = 600, 1
"How many damaged files are tried, and which: about 1,000 take a second."
KEPT = Path(__file__).parent / "golden" / "jpegs"
"""What Pillow does not write: arithmetic coding, a scan for each component, RGB without a transform, odd sampling. Made of `kinds`' own picture of
33 x 31 by libjpeg-turbo's cjpeg and jpegtran."""
SIZES = ((1, 1), (7, 5), (33, 31), (97, 64))
MARKS = (0xD9, 0xDA, 0xD0, 0xD3, 0xD7, 0xC0, 0xC2, 0xC4, 0xDB, 0xDC, 0xDD, 0x00, 0xFF, 0xFE)


def kinds() -> dict[str, bytes]:
    """Name -> a good JPEG."""
    found = {path.stem: path.read_bytes() for path in KEPT.glob("*.jpg")}
    for size, mode, progressive, restart in product(SIZES, ("RGB", "L", "CMYK"), (False, True), (0, 3)):  # fmt: skip
        more = {"progressive": progressive, "restart_marker_blocks": restart}
        found[f"{mode} {size} {more}"] = saved(picture(size).convert(mode), **more)
    for size, sampling in product(SIZES, (0, 1)):
        found[f"{size} sampling={sampling}"] = saved(picture(size), subsampling=sampling)
    one = picture(SIZES[2])
    found["trailer"] = saved(one) + b"a trailer of the camera's"
    found["two"] = saved(one) * 2
    found["MPO"] = saved(one, "MPO", save_all=True, append_images=[one.rotate(90)])
    found["profile"] = saved(one, icc_profile=bytes(300), comment=b"a drawing")
    return found


def picture(size: tuple[int, int]) -> Image.Image:
    """Colours that change fast enough to fill every coefficient."""
    rng = random.Random(size[0])
    coarse = Image.frombytes("RGB", (9, 9), rng.randbytes(9 * 9 * 3)).resize(size)
    fine = Image.frombytes("RGB", size, rng.randbytes(size[0] * size[1] * 3))
    return Image.blend(coarse, fine, 0.1)


def damaged(good: bytes, rng: random.Random) -> bytes:
    """In one to three ways: cut, flipped, filled, with bytes or marks in between, with another header."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(data) <= 4:
            break
        at, length = rng.randrange(len(data)), rng.choice((0, rng.randrange(1, 200)))
        how = rng.choice(("cut", "cut", "flip", "replace", "replace", "mark", "field", "segment"))
        header = list(segments(data)) if how in ("field", "segment") else []
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
        elif header:
            at, length = rng.choice(header)
            if how == "field":  # a size, a sampling, a table, a component, a spectral range
                place = min(at + rng.randrange(length), len(data) - 1)
                data[place] = rng.choice((0, 1, 2, 3, 4, 8, 255, data[place] ^ 1))
            elif rng.random() < 0.5:
                del data[at : at + length]
            else:
                into, _ = rng.choice(header)
                data[into:into] = data[at : at + length]
    return bytes(data)


def segments(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Place and length of each segment of the header, its mark included."""
    at, is_last = 2, False
    while at + 4 <= len(data) and data[at] == 0xFF and not is_last:
        length = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield at, length
        is_last = data[at + 1] == 0xDA
        at += length


def judged(data: bytes) -> tuple[Looked, Looked]:
    """As mdsmix judges it, and by a decode into all pixels."""
    rules = Rules(max_pixels=1 << 22)
    with mock.patch.object(judge, "_is_whole", return_value=False):
        whole = look(data, rules)
    return look(data, rules), whole


def test_every_kind_of_jpeg_and_damage_is_judged_as_by_a_whole_decode() -> None:
    """Arithmetic coding, CMYK, several scans, restart marks, MPO, what follows the end, of one pixel or more."""
    with mock.patch.object(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS):
        require_pillow()
        good, rng, found = kinds(), random.Random(SEED), Counter[str]()
        for name, data in good.items():
            ours, whole = judged(data)
            assert (ours, ours.reason) == (whole, ""), name
        for _ in range(DAMAGED):
            name = rng.choice(sorted(good))
            data = damaged(good[name], rng)
            ours, whole = judged(data)
            assert ours == whole, (name, data.hex())
            found[whole.reason or "good"] += 1
    assert min(found[what] for what in ("good", "image_damaged", "image_truncated")) > 40
