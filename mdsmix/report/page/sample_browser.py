"""The samples of a page, token by token, with small images. They are the samples that
`mdsmix inspect --random` shows.

Most tokens consist of whole characters. Several tokens that make up one character are one span,
marked as such. Joined together the spans are the text of the sample.

Long samples are shortened, and images are at most 144 pixels wide and high, so that a page stays
below 2 MB: it opens at once and can be sent. Anyone may have made the images, so they are opened
with the same care as by `convert`. An image that cannot be shown is replaced by a sentence.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence

from mdsmix.errors import RecipeError
from mdsmix.frozen import frozen
from mdsmix.images.judge import NO_PILLOW, BadImage, Rules, judge_image, open_image, require_pillow
from mdsmix.messages import WRITTEN, join_names, make_printable, plural
from mdsmix.report.inspection import Inspection, cut_text
from mdsmix.report.page.gather import Gathered
from mdsmix.report.shown_samples import Chosen, Picture, Segment, shorten
from mdsmix.table import Tree
from mdsmix.tokenizer.decoder import Decoder

ALL_TOKENS, MOST_TOKENS, LEAST_TOKENS = 30_000, 640, 64
"Tokens of the page, and the most and fewest of a sample. A token takes about 40 bytes of markup."
ALL_IMAGES, MOST_IMAGES = 240, 12
"Images of the page, and the most of a sample."
MOST_TEXT = 4000
"Characters of a column without tokens to show at most."
MOST_VALUE = 80
"Characters of a string in a column besides the tokens to show at most."
MOST_NAMES = 4
BROKEN = "\ufffd"
"The character that a decoder writes for bytes that are not a whole character."
MOST_JOINED = 8
"Tokens to join into one character at most. A character has up to 4 bytes, a token at least one."
SIDE, QUALITY = 144, 70
"The longer side of a small image in pixels, and its WebP quality."
MOST_PIXELS = 1 << 25
"An image with more pixels is not decoded for a page: it would take over 100 MB."
NO_TOKENIZER = (
    "; only ids are shown, since the tokenizer is not on this machine: name one with --tokenizer"
)


@frozen(slots=True)
class TokenSpan:
    """One token, or several tokens that together make up a character."""

    text: str
    ids: tuple[int, ...]
    form: str
    """`text`; `line`: it ends a line; `control`: a special token, recognised by its id; `split`:
    several tokens of one character; `bytes`: bytes of an incomplete character; `id`: only the id,
    because the tokenizer is not known.
    """


@frozen
class Thumbnail:
    """A small image, or a sentence instead of it."""

    caption: str
    "The image's size and bytes, and the reason if it is not shown."
    data: str = ""
    "The image as a data: URI; empty if it is not shown."
    width: int = 0
    height: int = 0


def list_samples(page: Gathered) -> list[Tree]:
    """Return the samples of all streams, as the template needs them. The more samples there are,
    the less is shown of each.
    """
    inspected = list[tuple[str, Inspection]]()
    for stream in page.streams:
        if stream.inspection:
            inspected.append((stream.named.name, stream.inspection))
    count = max(1, sum(len(inspection.samples) for _, inspection in inspected))
    tokens = min(MOST_TOKENS, LEAST_TOKENS + ALL_TOKENS // count)
    images = min(MOST_IMAGES, 1 + ALL_IMAGES // count)

    trees = list[Tree]()
    for name, inspection in inspected:
        for sample in inspection.samples:
            tree = {
                "stream": name,
                "css": page.colours[name],
                "number": sample.number,
                "name": join_names([str(id) for id in sample.ids], MOST_NAMES),
                "images": [make_thumbnail(picture) for picture in sample.pictures[:images]],
                "more_images": max(0, len(sample.pictures) - images),
            }
            trees.append(tree | _describe_sample(sample, inspection.decoder, tokens))
    return trees


def _describe_sample(chosen: Chosen, decoder: Decoder | None, max_tokens: int) -> Tree:
    """Return a sample's caption, and its columns or the spans of at most `max_tokens` tokens."""
    if isinstance(chosen.sample, Mapping):
        columns = {
            name: cut_text(value, MOST_TEXT, WRITTEN) for name, value in chosen.sample.items()
        }
        return {"caption": "has no token ids: the loader tokenizes it", "columns": columns}
    count = sum(len(segment.ids) for segment in chosen.sample)
    trained = sum(len(segment.ids) for segment in chosen.sample if segment.is_trained)
    caption = f"{plural(count, 'token')}, {trained:,} trained"
    if decoder is None:
        caption += NO_TOKENIZER
    if chosen.pictures:
        caption += f", {plural(len(chosen.pictures), 'image')}"
    for name, value in chosen.values.items():
        caption += f", {name}: {cut_text(value, MOST_VALUE, WRITTEN)}"
    segments = shorten(chosen.sample, max_tokens)
    runs = [(segment, list(cut_into_spans(segment, decoder))) for segment in segments]
    return {"caption": caption, "columns": None, "runs": runs}


def cut_into_spans(segment: Segment, decoder: Decoder | None) -> Iterator[TokenSpan]:
    """Yield the tokens of a segment (neighbouring tokens that are all trained or all not trained)
    as spans. A span is one token, or several that together are one character.
    """
    if decoder is None:
        yield from (TokenSpan(str(token), (token,), "id") for token in segment.ids)
        return
    start = 0
    before = segment.before
    while start < len(segment.ids):
        span = _find_first_span(segment.ids[start : start + MOST_JOINED], before, decoder)
        yield span
        start += len(span.ids)
        before = span.ids[-1]


def _find_first_span(ids: Sequence[int], before: int | None, decoder: Decoder) -> TokenSpan:
    """Return the span of the first token. If this token is only a part of a character, the span
    also has the tokens that complete the character.

    Args:
        ids: the next tokens of the segment, at most MOST_JOINED.
        before: the token in front of them.
    """
    first = decoder.text(ids[:1], before)
    if ids[0] in decoder.control:
        return TokenSpan(make_printable(first), (ids[0],), "control")
    if BROKEN not in first:  # the token is whole characters
        form = "line" if first.endswith("\n") else "text"
        return TokenSpan(make_printable(first, WRITTEN), (ids[0],), form)
    # Add tokens until the character is complete.
    for stop in range(2, len(ids) + 1):
        text = decoder.text(ids[:stop], before)
        if ids[stop - 1] in decoder.control:
            break
        if BROKEN not in text:
            return TokenSpan(make_printable(text, WRITTEN), tuple(ids[:stop]), "split")
    return TokenSpan(first, (ids[0],), "bytes")


def make_thumbnail(picture: Picture) -> Thumbnail:
    """Return a small image of a picture. No content of an image raises an error."""
    caption = str(picture)
    try:
        require_pillow()
        judge_image(picture.data, Rules(decode="header", max_pixels=MOST_PIXELS))
        return _shrink(picture, caption)
    except RecipeError:
        return Thumbnail(f"{caption}; not shown: {NO_PILLOW}")
    except BadImage as bad:
        return Thumbnail(f"{caption}; not shown: {bad.reason}, {bad.why}")


def _shrink(picture: Picture, caption: str) -> Thumbnail:
    """Return a picture scaled down to SIDE pixels. Raises BadImage if it cannot be decoded."""
    from PIL import ImageOps

    with open_image(picture.data) as image:
        image.draft("RGB", (2 * SIDE, 2 * SIDE))  # a JPEG is decoded at a reduced scale
        small = ImageOps.exif_transpose(image).convert("RGBA")
        small.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        small.save(file, "WEBP", quality=QUALITY)
        width, height = small.size
    data = base64.b64encode(file.getvalue()).decode()
    return Thumbnail(caption, f"data:image/webp;base64,{data}", width, height)
