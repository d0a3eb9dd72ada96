"""The images of a sample that is shown: size, bytes, and where each stands in the tokens. Nothing is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsmix.errors import Unreachable
from mdsmix.kinds import stored_pieces
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.token_ids import has_images
from mdsmix.words import plural

FORMATS = {
    b"\xff\xd8": ("JPEG", "jpg"),
    b"\x89PNG": ("PNG", "png"),
    b"RIFF": ("WebP", "webp"),
    b"GIF8": ("GIF", "gif"),
    b"BM": ("BMP", "bmp"),
    b"II*": ("TIFF", "tif"),
    b"MM": ("TIFF", "tif"),
}
"First bytes -> name of the format, suffix of a file. Conversions store no other format."


@dataclass(frozen=True, slots=True)
class Picture:
    height: int
    width: int
    "Height and width as they are stored: after the turn that EXIF asks for."
    data: bytes
    place: int | None
    "Index of its token in the sample; None without a manifest, which names the token of images."
    tokens: int
    "Of the sample, as stored."

    @property
    def format(self) -> tuple[str, str]:
        return next(
            (f for start, f in FORMATS.items() if self.data.startswith(start)), ("unknown", "bin")
        )

    def __str__(self) -> str:
        at = "" if self.place is None else f", token {self.place:,} of {self.tokens:,}"
        return f"{self.width:,} x {self.height:,} {self.format[0]}, {plural(len(self.data), 'byte')}{at}"

    def as_json(self) -> dict[str, Any]:
        return {
            "height": self.height,
            "width": self.width,
            "bytes": len(self.data),
            "format": self.format[0],
            "token": self.place,
        }


def pictures_of(sample: Mapping[str, Any], manifest: Manifest | None) -> list[Picture]:
    """The images of a decoded sample; [] for a stream without images."""
    if not has_images(sample) or not isinstance(sample["images"], list):
        return []
    tokens = [token for ids, _ in stored_pieces(sample) for token in ids]
    mark = manifest.encoding.images.get("id") if manifest else None
    places: list[int | None] = [at for at, token in enumerate(tokens) if token == mark]
    places += [None] * (len(sample["images"]) - len(places))
    each = zip(sample["sizes"], sample["images"], places, strict=False)
    return [Picture(h, w, data, place, len(tokens)) for (h, w), data, place in each]


def write_pictures(folder: Path, name: str, pictures: Sequence[Picture]) -> Iterator[Path]:
    """Writes each as it is stored, `name-0.jpg` and so on; Unreachable where that cannot be."""
    for number, picture in enumerate(pictures):
        path = folder / f"{name}-{number}.{picture.format[1]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.data)
        except OSError as error:
            raise Unreachable(
                f"cannot write {path} ({error.strerror}): name a folder that can be written by --images."
            ) from None
        yield path
