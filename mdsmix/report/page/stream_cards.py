"""The cards of the streams on the page, and their samples to search and page through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from markupsafe import escape

from mdsmix.report.bad_records import BadRecords, Reason, bad_record_lines
from mdsmix.report.inspection import Chosen, Inspection
from mdsmix.report.length_bars import by_power
from mdsmix.report.page import svg
from mdsmix.report.page.gather import MOST_BAD, NOT_YET, OneStream
from mdsmix.report.page.spans import (
    SpanRun,
    Thumbnail,
    TokenText,
    by_document,
    thumbnail,
    token_text,
)
from mdsmix.report.targets import TRAINED
from mdsmix.shards.manifest import Manifest
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


UNSEEN = "Not known: what could not be looked at is said at the top."
"The page says a failure once, at its top, and this in all other places."


def drawn(stream: OneStream, css: str) -> dict[str, Any]:
    """A stream's drawings and figures."""
    found = stream.found
    manifest = found.stream.trusted_manifest if found else None
    sizes = [shard.stored.bytes for shard in found.stream.index.shards] if found else []
    name = stream.place.name
    return {
        "one": stream,
        "name": name,
        "css": css,
        "loader": "" if stream.place.loader == TRAINED else stream.place.loader,
        "problem": NOT_YET if stream.problem == NOT_YET else UNSEEN,
        "index": found.stream.index if found else None,
        "manifest": manifest,
        "lengths": _lengths(name, manifest, css) if manifest else None,
        "fate": _fate(name, manifest, css) if manifest and not manifest.mixed else None,
        "smallest": min(sizes, default=0),
        "largest": max(sizes, default=0),
        "bad": _bad(stream.bad) if stream.bad else [],
        "bad_is_cut": bool(stream.bad and stream.bad.count >= MOST_BAD),
    }


def _bad(found: BadRecords) -> list[tuple[Reason, list[tuple[str, list[str]]]]]:
    """Each reason, with the places of its first records and what they hold."""
    return [(reason, list(map(_bad_record, reason.records))) for reason in found.reasons]


def _bad_record(record: dict[str, Any]) -> tuple[str, list[str]]:
    place, *lines = bad_record_lines(record)
    return place, lines


def _lengths(name: str, manifest: Manifest, css: str) -> dict[str, Any]:
    totals, limit = manifest.totals, manifest.encoding.max_seq_len
    counts = by_power(totals.lengths)
    rows = [(f"{1 << k:,}", f"{min((2 << k) - 1, totals.longest):,}", n) for k, n in counts.items()]
    label = f"{name}: {plural(totals.samples, 'sample')} by length, the longest {totals.longest:,} tokens"
    return {
        "drawing": svg.histogram(label, counts, totals.longest, limit, bool(totals.cut_rows), css),
        "rows": rows,
    }


def _fate(name: str, manifest: Manifest, css: str) -> dict[str, Any]:
    """How many records were written, filtered and quarantined, as a ribbon."""
    records = manifest.records
    of = max(1, records.read)
    parts = [("written", css, records.written)]
    parts += [(f"filtered: {reason}", "filtered", n) for reason, n in records.filtered.items()]
    parts += [(f"quarantined: {reason}", "bad", n) for reason, n in records.quarantined.items()]
    said = [f"{what}: {count:,} ({count / of:.1%})" for what, _, count in parts]
    label = f"{name}: {plural(records.read, 'record')} read: {', '.join(said)}"
    drawn = [(css, n / of, text) for (_, css, n), text in zip(parts, said, strict=True)]
    return {
        "drawing": svg.ribbon(label, drawn, 18),
        "parts": [(what, css, n, n / of) for what, css, n in parts],
        "records": records,
    }
