"""The samples of a page. `mdsmix inspect --random` shows the same ones; here they are cut, so that the page stays small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import escape

from mdsmix.report.inspection import Inspection
from mdsmix.report.page.gather import OneStream
from mdsmix.report.page.spans import SpanRun, TokenText, by_document, token_text
from mdsmix.report.page.thumbnails import Thumbnail, thumbnail
from mdsmix.report.which_samples import Chosen
from mdsmix.words import listed, plural

PAGE_BYTES = 1_200_000
"For all samples together. A page below 2 MB opens at once and can be sent."
SPAN_BYTES = 26
"The markup of a token."
MOST_TOKENS, LEAST_TOKENS = 640, 64
MOST_IMAGES = 12
MOST_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSample:
    """A sample of the browser."""

    stream: str
    css: str
    number: int
    name: str
    "Of its record, or records; empty where the source names none."
    shown: TokenText
    limit: int | None
    "max_seq_len, where the loader cuts what is longer and nothing but tokens is in a row."
    images: Sequence[Thumbnail]
    more_images: int

    @property
    def documents(self) -> list[tuple[int | None, list[SpanRun]]]:
        return list(by_document(self.shown.runs))

    @property
    def said(self) -> str:
        """Its tokens, trained tokens and images, in a line."""
        if self.shown.columns is not None:
            return "holds no tokens: the loader reads it"
        gap = sum(run.gap for run in self.shown.runs)
        left = f", {gap:,} of them not shown" if gap else ""
        tokens = f"{plural(self.shown.tokens, 'token')}{left}, {self.shown.trained:,} trained"
        if any(span.form == "id" for run in self.shown.runs for span in run.spans):
            tokens += "; ids alone, since no tokenizer of it is known here: --tokenizer names one"
        if self.limit and self.shown.tokens > self.limit:
            tokens += f"; longer than max_seq_len ({self.limit:,}): the loader cuts it"
        return (
            f"{tokens}, {plural(len(self.images) + self.more_images, 'image')}" * bool(self.images)
            or tokens
        )

    @property
    def size(self) -> int:
        """About how many bytes of the page it takes."""
        texts = [span for run in self.shown.runs for span in run.spans]
        own = sum(SPAN_BYTES + 6 * (len(s.ids) - 1) + len(escape(s.text).encode()) for s in texts)
        columns = sum(len(escape(text).encode()) for text in (self.shown.columns or {}).values())
        return 400 + own + columns + sum(len(image.data) + 200 for image in self.images)


def samples_of(
    streams: Sequence[OneStream], colours: Sequence[str]
) -> tuple[list[OneSample], list[str]]:
    """The samples of all streams in turn, and sentences on those that were left out since the page would be too large."""
    most = max(
        LEAST_TOKENS, min(MOST_TOKENS, PAGE_BYTES // max(1, len(streams)) // SPAN_BYTES // 2)
    )
    made = [
        [
            _sample(stream.place.name, css, stream.found, chosen, most)
            for chosen in stream.found.samples
        ]
        for stream, css in zip(streams, colours, strict=True)
        if stream.found
    ]
    kept = _within(PAGE_BYTES, made)
    notes = [
        f"{every[0].stream}: {plural(len(every) - len(some), 'sample')} more would make the page too large: mdsmix inspect shows them"
        for every, some in zip(made, kept, strict=True)
        if len(some) < len(every)
    ]
    return [sample for some in kept for sample in some], notes


def _within(budget: int, made: Sequence[list[OneSample]]) -> list[list[OneSample]]:
    """The first samples of each stream that fit its part of the budget, and one in any case."""
    each = budget // max(1, len(made))
    ends = [list(accumulate(sample.size for sample in samples)) for samples in made]
    return [
        samples[: max(1, sum(end <= each for end in of))]
        for samples, of in zip(made, ends, strict=True)
    ]


def _sample(name: str, css: str, found: Inspection, chosen: Chosen, most: int) -> OneSample:
    pictures = list(chosen.pictures)
    named = found.ids.get(chosen.number)
    names = named if isinstance(named, list) else [] if named is None else [named]
    return OneSample(
        stream=name,
        css=css,
        number=chosen.number,
        name=listed(list(map(str, names)), MOST_NAMES),
        shown=token_text(chosen.sample, found.decoder, most),
        limit=None if pictures else _limit(found),
        images=list(map(thumbnail, pictures[:MOST_IMAGES])),
        more_images=max(0, len(pictures) - MOST_IMAGES),
    )


def _limit(found: Inspection) -> int | None:
    """None of encoder-decoder rows, whose two sides are cut each for itself."""
    encoding = found.stream.manifest.encoding if found.stream.manifest else None
    return encoding.max_seq_len if encoding and encoding.decoder_only_format else None
