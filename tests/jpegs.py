"""JPEGs of every kind, and damage to them: what judges images is held against a decode into all pixels.

`python -m tests.jpegs COUNT [SEED]` judges as many damaged files both ways, prints how many were good and bad, and ends with 1 where one was judged
differently: about 1,000 a second.
"""

import io
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

from PIL import Image

from mdsmix.images import judge
from mdsmix.images.judge import Rules, require_pillow
from tests.pictures import Looked, look

KEPT = Path(__file__).parent / "golden" / "jpegs"
"""What Pillow does not write: arithmetic coding, a scan for each component, RGB without a transform, odd sampling. Made of `kinds`' own picture of
33 x 31 by libjpeg-turbo's cjpeg and jpegtran."""
SIZES = ((1, 1), (7, 5), (33, 31), (97, 64))
_START, _SCAN = b"\xff\xd8", 0xDA


def kinds() -> dict[str, bytes]:
    """Name -> a good JPEG."""
    found = {path.stem: path.read_bytes() for path in KEPT.glob("*.jpg")}
    for size, mode in product(SIZES, ("RGB", "L", "CMYK")):
        picture = _picture(size).convert(mode)
        for progressive, restart in product((False, True), (0, 3)):
            more = {"progressive": progressive, "restart_marker_blocks": restart}
            found[f"{mode} {size} {progressive} {restart}"] = saved(picture, **more)
    for size, sampling in product(SIZES, (0, 1)):
        found[f"{size} sampling={sampling}"] = saved(_picture(size), subsampling=sampling)
    plain = found["RGB (33, 31) False 0"]
    found["trailer"] = plain + b"a trailer of the camera's"
    found["two"] = plain + plain
    again = _picture(SIZES[2])
    found["MPO"] = saved(again, "MPO", save_all=True, append_images=[again.rotate(90)])
    found["profile"] = saved(again, icc_profile=bytes(300), comment=b"a drawing")
    return found


def saved(image: Image.Image, format: str = "JPEG", **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **more)
    return out.getvalue()


def _picture(size: tuple[int, int]) -> Image.Image:
    """Colours that change fast enough to fill every coefficient."""
    rng = random.Random(size[0])
    coarse = Image.frombytes("RGB", (9, 9), rng.randbytes(9 * 9 * 3))
    return Image.blend(
        coarse.resize(size), Image.frombytes("RGB", size, rng.randbytes(size[0] * size[1] * 3)), 0.1
    )


def damaged(data: bytes, rng: random.Random) -> bytes:
    """In one to three ways: cut, flipped, filled, with bytes or marks in between, with another header."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(data) > 4:
            data = rng.choice(WAYS)(bytearray(data), rng)
    return data


def _cut(data: bytearray, rng: random.Random) -> bytes:
    lost = rng.randrange(1, min(len(data), rng.choice((40, len(data)))))
    return bytes(data[:-lost]) + rng.choice((b"", b"\xff\xd9"))


def _flip(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 20))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _replace(data: bytearray, rng: random.Random) -> bytes:
    """Bytes left out, put in, or filled."""
    at, length = rng.randrange(len(data)), rng.choice((0, rng.randrange(1, 200)))
    new = rng.choice((b"", rng.randbytes(rng.randrange(1, 20)), *(b * length for b in FILLS)))
    data[at : at + length] = new
    return bytes(data)


def _mark(data: bytearray, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    marks = (0xD9, _SCAN, 0xD0, 0xD3, 0xD7, 0xC0, 0xC2, 0xC4, 0xDB, 0xDC, 0xDD, 0x00, 0xFF, 0xFE)
    data[at : at + 2] = bytes((0xFF, rng.choice(marks)))
    return bytes(data)


def _another_field(data: bytearray, rng: random.Random) -> bytes:
    """In a segment of the header: a size, a sampling, a table, a component, a spectral range."""
    segments = list(_segments(data))
    if segments:
        at, length = rng.choice(segments)
        place = min(at + rng.randrange(length), len(data) - 1)
        data[place] = rng.choice((0, 1, 2, 3, 4, 8, 255, data[place] ^ 1, rng.randrange(256)))
    return bytes(data)


def _another_header(data: bytearray, rng: random.Random) -> bytes:
    """A segment twice, or not at all."""
    segments = list(_segments(data))
    if segments:
        at, length = rng.choice(segments)
        into, _ = rng.choice(segments)
        kept = data[at : at + length]
        if rng.random() < 0.5:
            data[into:into] = kept
        else:
            del data[at : at + length]
    return bytes(data)


FILLS = (b"\0", b"\xff", b"\x55")
WAYS = (_cut, _cut, _flip, _replace, _replace, _mark, _another_field, _another_header)


def _segments(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Place and length of each segment of the header, its mark included."""
    at = len(_START)
    while at + 4 <= len(data) and data[at] == 0xFF:
        length = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield at, length
        if data[at + 1] == _SCAN:
            return
        at += length


def judged(data: bytes) -> tuple[Looked, Looked]:
    """As mdsmix judges it, and by a decode into all pixels."""
    rules = Rules(max_pixels=1 << 22)
    with mock.patch.object(judge, "_is_whole", return_value=False):
        whole = look(data, rules)
    return look(data, rules), whole


def differing(count: int, seed: int, found: Counter[str]) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each damaged file that is judged differently; `found` counts reasons."""
    rng, good = random.Random(seed), kinds()
    names = sorted(good)
    for _ in range(count):
        name = rng.choice(names)
        data = damaged(good[name], rng)
        ours, whole = judged(data)
        found[whole.reason or "good"] += 1
        if ours != whole:
            yield name, data


def main() -> None:
    require_pillow()
    count, seed = int(sys.argv[1]), int((*sys.argv, 0)[2])
    found = Counter[str]()
    different = list(differing(count, seed, found))
    print(f"{count:,} damaged files: {dict(found)}; judged differently: {len(different)}")
    for name, data in different[:10]:
        print(name, *judged(data), data[:2000].hex())
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
