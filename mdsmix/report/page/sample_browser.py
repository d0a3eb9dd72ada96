"""The samples of a page, token by token, with small images. `mdsmix inspect --random` shows the
same samples.

Most tokens are whole characters. Where several tokens make up one character, they are one span,
which is marked so. The joined spans equal the text of the whole sample.

Long samples are cut, and images are at most 144 pixels a side, so that a page stays below 2 MB: it
opens at once and can be sent. Images come from anyone's data, so they are opened as `convert` opens
them. A sentence stands in place of an image that cannot be shown.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mdsmix.errors import RecipeError
from mdsmix.images.judge import WITHOUT, Bad, Rules, judge_image, open_image, require_pillow
from mdsmix.messages import WRITTEN, join_names, make_printable, plural
from mdsmix.report.inspection import cut_text
from mdsmix.report.page.gather import Gathered
from mdsmix.report.shown_samples import Chosen, Picture, Segment, shorten
from mdsmix.table import Tree
from mdsmix.tokenizer.decoder import Decoder

ALL_TOKENS, MOST_TOKENS, LEAST_TOKENS = 30_000, 640, 64
"Tokens of the page, and the most and fewest of a sample. A token takes about 40 bytes of markup."
ALL_IMAGES, MOST_IMAGES = 240, 12
MOST_TEXT = 4000
"The most characters of a column without tokens."
MOST_NAMES = 4
BROKEN = "\ufffd"
"The character that a decoder writes for bytes that are no character."
MOST_PARTS = 8
"""The most tokens that are joined to make up one character. A character has up to 4 bytes, and a
token at least one.
"""
SIDE, QUALITY = 144, 70
MOST_PIXELS = 1 << 25
"The most pixels of an image that is decoded for a page: more would take over 100 MB."
NO_TOKENIZER = "; ids alone, since no tokenizer of it is known here: --tokenizer names one"


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """One token, or several tokens that together make up a character."""

    text: str
    ids: tuple[int, ...]
    form: str
    """`text`; `line`: ends a line; `control`: a special token, by its id; `split`: several tokens,
    one character; `bytes`: a part of a character whose rest is not there; `id`: no tokenizer is
    known here.
    """


@dataclass(frozen=True)
class Thumbnail:
    """A small image, or a sentence in place of it."""

    said: str
    "The image's size and bytes, and where it is not shown, the reason."
    data: str = ""
    "The image as a data: URI; empty where it is not shown."
    width: int = 0
    height: int = 0


def samples_of(page: Gathered) -> list[Tree]:
    """The samples of all streams in turn, for the template. The more samples there are, the less of
    each is shown.
    """
    streams = [(each.named.name, each.found) for each in page.streams if each.found]
    count = max(1, sum(len(found.samples) for _, found in streams))
    tokens = min(MOST_TOKENS, LEAST_TOKENS + ALL_TOKENS // count)
    images = min(MOST_IMAGES, 1 + ALL_IMAGES // count)
    return [
        {
            "stream": name,
            "css": page.colours[name],
            "number": chosen.number,
            "name": join_names([*map(str, chosen.ids)], MOST_NAMES),
            "images": list(map(thumbnail, chosen.pictures[:images])),
            "more_images": max(0, len(chosen.pictures) - images),
            **_text(chosen, found.decoder, tokens),
        }
        for name, found in streams
        for chosen in found.samples
    ]


def _text(chosen: Chosen, decoder: Decoder | None, most: int) -> Tree:
    """A sample's columns, or the spans of at most `most` of its tokens, with a line above."""
    if isinstance(chosen.sample, Mapping):
        columns = {
            name: cut_text(value, MOST_TEXT, WRITTEN) for name, value in chosen.sample.items()
        }
        return {"said": "holds no tokens: the loader reads it", "columns": columns}
    count = sum(len(part.ids) for part in chosen.sample)
    trained = sum(len(part.ids) for part in chosen.sample if part.is_trained)
    said = f"{plural(count, 'token')}, {trained:,} trained" + ("" if decoder else NO_TOKENIZER)
    said += f", {plural(len(chosen.pictures), 'image')}" * bool(chosen.pictures)
    runs = [(part, list(spans(part, decoder))) for part in shorten(chosen.sample, most)]
    return {"said": said, "columns": None, "runs": runs}


def spans(part: Segment, decoder: Decoder | None) -> Iterator[TokenSpan]:
    """The spans of the tokens of a segment."""
    if decoder is None:
        yield from (TokenSpan(str(token), (token,), "id") for token in part.ids)
        return
    at, before = 0, part.before
    while at < len(part.ids):
        span = _span(part.ids[at : at + MOST_PARTS], before, decoder)
        yield span
        at += len(span.ids)
        before = span.ids[-1]


def _span(ids: Sequence[int], before: int | None, decoder: Decoder) -> TokenSpan:
    """The span of the first token, with the tokens behind it that complete its character."""
    first = decoder.text(ids[:1], before)
    if ids[0] in decoder.control:
        return TokenSpan(make_printable(first), (ids[0],), "control")
    if BROKEN not in first:
        form = "line" if first.endswith("\n") else "text"
        return TokenSpan(make_printable(first, WRITTEN), (ids[0],), form)
    for stop in range(2, len(ids) + 1):
        whole = decoder.text(ids[:stop], before)
        if ids[stop - 1] in decoder.control:
            break
        if BROKEN not in whole:
            return TokenSpan(make_printable(whole, WRITTEN), tuple(ids[:stop]), "split")
    return TokenSpan(first, (ids[0],), "bytes")


def thumbnail(picture: Picture) -> Thumbnail:
    """The small image of a picture. No content of an image raises an error."""
    said = str(picture)
    try:
        require_pillow()
        judge_image(picture.data, Rules(decode="header", max_pixels=MOST_PIXELS))
        return _small(picture, said)
    except RecipeError:
        return Thumbnail(f"{said}; not shown: {WITHOUT}")
    except Bad as bad:
        return Thumbnail(f"{said}; not shown: {bad.reason}, {bad.why}")


def _small(picture: Picture, said: str) -> Thumbnail:
    from PIL import ImageOps

    with open_image(picture.data) as image:
        image.draft("RGB", (2 * SIDE, 2 * SIDE))  # a JPEG is decoded at a reduced scale
        small = ImageOps.exif_transpose(image).convert("RGBA")
        small.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        small.save(out, "WEBP", quality=QUALITY)
        width, height = small.size
    data = base64.b64encode(out.getvalue()).decode()
    return Thumbnail(said, f"data:image/webp;base64,{data}", width, height)
