"""A sample's tokens as HTML, and its images as thumbnails."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mdsmix.encode.decoder import Decoder
from mdsmix.errors import RecipeError
from mdsmix.images.judge import WITHOUT, Bad, Rules, opened, require_pillow, size_of
from mdsmix.report.segments import Picture, Sample, Segment
from mdsmix.words import WRITTEN, printable

BROKEN = "\ufffd"
"A decoder writes this for bytes that are no character."
MOST_PARTS = 8
"Tokens that make up one character: UTF-8 has 4 bytes, and a token holds one at least; some are whole behind others."
MOST_TEXT = 4000
"Characters of a column that is no tokens."


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """One token, or those that make up a character together."""

    text: str
    ids: tuple[int, ...]
    form: str
    """`text`; `line`: ends a line; `control`: a special token, by its id; `split`: several tokens, one character; `bytes`: a part of a
    character whose rest is not there; `id`: no tokenizer is known here."""


@dataclass(frozen=True, slots=True)
class SpanRun:
    """Neighbouring spans that are all trained, or all not; or a gap where tokens are left out."""

    spans: Sequence[TokenSpan]
    is_trained: bool
    document: int | None = None
    gap: int = 0
    "Tokens that are left out here; then there are no spans."


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A sample for a page."""

    runs: Sequence[SpanRun] = ()
    tokens: int = 0
    trained: int = 0
    columns: Mapping[str, str] | None = None
    "Of a sample that holds no tokens: name -> text, cut."


def token_text(sample: Sample, decoder: Decoder | None, most: int) -> TokenText:
    """The sample, of a long one the first and last tokens, `most` in all."""
    if isinstance(sample, Mapping):
        return TokenText(columns={name: _cut(value) for name, value in sample.items()})
    count = sum(len(part.ids) for part in sample)
    trained = sum(len(part.ids) for part in sample if part.is_trained)
    return TokenText(runs=list(_runs(sample, decoder, count, most)), tokens=count, trained=trained)


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    more = len(text) - MOST_TEXT
    return printable(text[:MOST_TEXT], WRITTEN) + (f" ... ({more:,} characters more)" * (more > 0))


def _runs(
    sample: Sequence[Segment], decoder: Decoder | None, count: int, most: int
) -> Iterator[SpanRun]:
    half, at, before = most // 2, 0, None
    for part in sample:
        ids, start = part.ids, at
        at += len(ids)
        head = ids if count <= most else ids[: max(0, half - start)]
        tail = [] if count <= most else ids[max(len(head), count - half - start) :]
        if head:
            yield SpanRun(list(spans(head, before, decoder)), part.is_trained, part.document)
        if count > most and start <= half < at:
            yield SpanRun((), False, gap=count - 2 * half)
        if tail:
            first = ids[len(ids) - len(tail) - 1] if len(tail) < len(ids) else before
            yield SpanRun(list(spans(tail, first, decoder)), part.is_trained, part.document)
        before = ids[-1] if ids else before


def spans(ids: Sequence[int], before: int | None, decoder: Decoder | None) -> Iterator[TokenSpan]:
    """The spans of these tokens; `before`: the id in front of them."""
    if decoder is None:
        yield from (TokenSpan(str(token), (token,), "id") for token in ids)
        return
    at = 0
    while at < len(ids):
        span = _span(ids, at, before, decoder)
        yield span
        at += len(span.ids)
        before = span.ids[-1]


def _span(ids: Sequence[int], at: int, before: int | None, decoder: Decoder) -> TokenSpan:
    token = ids[at]
    text = decoder.text([token], before)
    if token in decoder.control:
        return TokenSpan(printable(text), (token,), "control")
    if BROKEN not in text:
        return TokenSpan(_written(text), (token,), "line" if text.endswith("\n") else "text")
    for stop in range(at + 2, min(at + MOST_PARTS, len(ids)) + 1):
        part = list(ids[at:stop])
        whole = decoder.text(part, before)
        if any(each in decoder.control for each in part):
            break
        if BROKEN not in whole:
            return TokenSpan(_written(whole), tuple(part), "split")
    return TokenSpan(text, (token,), "bytes")


def _written(text: str) -> str:
    """A token's text. One that is a joiner and no more, as between two emoji, is named: nothing would be seen of it."""
    return printable(text, WRITTEN if text.strip("\u200c\u200d") else "")


def by_document(runs: Sequence[SpanRun]) -> Iterator[tuple[int | None, list[SpanRun]]]:
    """The runs of each document of a packed row; of any other row all of them, under None."""
    for document, some in groupby(runs, lambda run: run.document):
        yield document, list(some)


SIDE = 144
QUALITY = 70
MOST_PIXELS = 1 << 25
"An image of more is not decoded for a page: it would take more than 100 MB."


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """An image made small, or a sentence in place of it."""

    said: str
    "Its size, bytes and place among the tokens."
    data: str = ""
    "A data: URI; empty where there is none."
    width: int = 0
    height: int = 0
    problem: str = ""


def thumbnail(picture: Picture) -> Thumbnail:
    """Never raises for what an image holds."""
    said = str(picture)
    try:
        require_pillow()
    except RecipeError:
        return Thumbnail(said, problem=f"not shown: {WITHOUT}")
    try:
        size_of(picture.data, Rules(decode="header", max_pixels=MOST_PIXELS))
        return _small(picture, said)
    except Bad as bad:
        return Thumbnail(said, problem=f"not shown: {bad.reason}, {bad.why}")


def _small(picture: Picture, said: str) -> Thumbnail:
    from PIL import ImageOps

    with opened(picture.data) as image:
        image.draft("RGB", (2 * SIDE, 2 * SIDE))  # of a JPEG no more is decoded
        small = ImageOps.exif_transpose(image).convert("RGBA")
        small.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        small.save(out, "WEBP", quality=QUALITY)
        width, height = small.size
    data = base64.b64encode(out.getvalue()).decode()
    return Thumbnail(said, f"data:image/webp;base64,{data}", width, height)
