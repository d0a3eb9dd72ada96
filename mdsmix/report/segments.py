"""A sample as runs of tokens of one sort (trained, control), and its images as files and thumbnails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mdsmix.encode.decoder import Decoder
from mdsmix.errors import Unreachable
from mdsmix.kinds import Piece, kind_of, stored_pieces
from mdsmix.kinds.kind import runs
from mdsmix.report.show import Run
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.token_ids import PACKED, documents_of, has_images, layout_of
from mdsmix.words import WRITTEN, plural, printable

TRAINED, CONTROL, DOCUMENT = "⟦⟧", "⟨⟩", "⟪⟫"
"Brackets around trained tokens, around a control token, and around the heading of a document of a packed row."
_MARKS = str.maketrans({mark: ascii(mark)[1:-1] for mark in TRAINED + CONTROL + DOCUMENT})


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that are all trained, or all not."""

    ids: list[int]
    is_trained: bool
    document: int | None = None
    "Of a packed row: the number of its document, the first is 0."


Sample = list[Segment] | Mapping[str, Any]
"A sample of token ids, or one of other columns (raw text, bytes) as it is."


def as_shown(sample: Mapping[str, Any], manifest: Manifest | None) -> Sample:
    """The segments of a decoded sample; a sample without ids as it is."""
    if not _has_tokens(sample):
        return sample
    if layout_of(sample) == PACKED:
        return [
            replace(segment, document=number)
            for number, document in enumerate(documents_of(sample))
            for segment in segments(runs(*document))
        ]
    if manifest is None:  # by LLM-Foundry's default policies
        return segments(stored_pieces(sample))
    return segments(kind_of(manifest.encoding).pieces(sample))


def _has_tokens(sample: Mapping[str, Any]) -> bool:
    """Whether its columns hold token ids as mdsmix writes them. Bytes and raw text are shown as they are."""
    names = layout_of(sample)
    return bool(names) and not any(isinstance(sample[name], bytes) for name in names)


def segments(pieces: Iterable[Piece]) -> list[Segment]:
    """The segments of the pieces of a stored sample."""
    tokens = [(int(token), trained) for ids, trained in pieces for token in ids]
    flags = [trained and place > 0 for place, (_, trained) in enumerate(tokens)]
    paired = zip((token for token, _ in tokens), flags, strict=True)
    return [Segment([t for t, _ in run], flag) for flag, run in groupby(paired, lambda p: p[1])]


def runs_of(sample: Sample, decoder: Decoder | None) -> list[Run]:
    """The sample as text. Characters that steer a terminal are escaped, since samples come from anyone."""
    if isinstance(sample, Mapping):
        return [(printable(str(sample), WRITTEN), "text")]
    return list(marked(sample, decoder))


def marked(parts: Sequence[Segment], decoder: Decoder | None) -> Iterator[Run]:
    """The trained tokens in ⟦ ⟧, every control token in ⟨ ⟩; ids where there is no tokenizer to decode them. A text that
    holds such a bracket shows it as `\\u27e8`, so that none is mistaken for a mark."""
    for document, run in groupby(parts, lambda part: part.document):
        of = list(run)
        if document is not None:
            tokens = plural(sum(len(part.ids) for part in of), "token")
            said = f"document {document}, {tokens}".join(DOCUMENT)
            yield "\n" * (of[0] is not parts[0]) + said + "\n", "mark"
        yield from _marked(of, decoder)


def _marked(parts: Sequence[Segment], decoder: Decoder | None) -> Iterator[Run]:
    before = None
    for part in parts:
        inside = _decoded(part.ids, before, decoder) if decoder else _as_ids(part.ids)
        before = part.ids[-1]
        yield from (
            [(TRAINED[0], "mark"), *inside, (TRAINED[1], "mark")] if part.is_trained else inside
        )


def _decoded(ids: list[int], before: int | None, decoder: Decoder) -> Iterator[Run]:
    for is_control, run in groupby(ids, decoder.control.__contains__):
        tokens = list(run)
        for some in [[token] for token in tokens] if is_control else [tokens]:
            text = printable(decoder.text(some, before), WRITTEN).translate(_MARKS)
            yield (text.join(CONTROL), "control") if is_control else (text, "text")
            before = some[-1]


def _as_ids(ids: list[int]) -> Iterator[Run]:
    yield " ".join(map(str, ids)) + " ", "text"


def sample_json(sample: Sample, decoder: Decoder | None) -> Any:
    """The sample for programs: its segments with ids, text and the places of control tokens in `ids`, or its columns."""
    if isinstance(sample, Mapping):
        return {
            name: value if isinstance(value, str) else repr(value) for name, value in sample.items()
        }
    return list(_segments_json(sample, decoder))


def _segments_json(parts: Sequence[Segment], decoder: Decoder | None) -> Iterator[dict[str, Any]]:
    before, known = None, decoder.control if decoder else frozenset[int]()
    for place, part in enumerate(parts):
        if part.document != parts[place - 1].document:
            before = None
        yield {
            **({} if part.document is None else {"document": part.document}),
            "ids": part.ids,
            "trained": part.is_trained,
            "text": decoder.text(part.ids, before) if decoder else None,
            "control": [i for i, token in enumerate(part.ids) if token in known]
            if decoder
            else None,
        }
        before = part.ids[-1]


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
