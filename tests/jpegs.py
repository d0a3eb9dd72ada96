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
MARKS = (0xD9, 0xDA, 0xD0, 0xD3, 0xD7, 0xC0, 0xC2, 0xC4, 0xDB, 0xDC, 0xDD, 0x00, 0xFF, 0xFE)


def kinds() -> dict[str, bytes]:
    """Name -> a good JPEG."""
    found = {path.stem: path.read_bytes() for path in KEPT.glob("*.jpg")}
    for size, mode, progressive, restart in product(
        SIZES, ("RGB", "L", "CMYK"), (False, True), (0, 3)
    ):
        more = {"progressive": progressive, "restart_marker_blocks": restart}
        found[f"{mode} {size} {more}"] = saved(_picture(size).convert(mode), **more)
    for size, sampling in product(SIZES, (0, 1)):
        found[f"{size} sampling={sampling}"] = saved(_picture(size), subsampling=sampling)
    picture = _picture(SIZES[2])
    found["trailer"] = saved(picture) + b"a trailer of the camera's"
    found["two"] = saved(picture) * 2
    found["MPO"] = saved(picture, "MPO", save_all=True, append_images=[picture.rotate(90)])
    found["profile"] = saved(picture, icc_profile=bytes(300), comment=b"a drawing")
    return found


def saved(image: Image.Image, format: str = "JPEG", **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **more)
    return out.getvalue()


def _picture(size: tuple[int, int]) -> Image.Image:
    """Colours that change fast enough to fill every coefficient."""
    rng = random.Random(size[0])
    coarse = Image.frombytes("RGB", (9, 9), rng.randbytes(9 * 9 * 3)).resize(size)
    return Image.blend(
        coarse, Image.frombytes("RGB", size, rng.randbytes(size[0] * size[1] * 3)), 0.1
    )


def damaged(good: bytes, rng: random.Random) -> bytes:
    """In one to three ways: cut, flipped, filled, with bytes or marks in between, with another header."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(data) <= 4:
            break
        at, length = rng.randrange(len(data)), rng.choice((0, rng.randrange(1, 200)))
        how = rng.choice(("cut", "cut", "flip", "replace", "replace", "mark", "field", "segment"))
        header = list(_segments(data)) if how in ("field", "segment") else []
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


def _segments(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Place and length of each segment of the header, its mark included."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        length = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield at, length
        if data[at + 1] == 0xDA:
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
    found = Counter[str]()
    different = list(differing(int(sys.argv[1]), int((*sys.argv, 0)[2]), found))
    print(f"{sys.argv[1]} damaged files: {dict(found)}; judged differently: {len(different)}")
    for name, data in different[:10]:
        print(name, *judged(data), data[:2000].hex())
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
