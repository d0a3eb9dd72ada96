"""The sections of a page: items that a terminal shows too, and drawings (ribbons, and bars as a
column of a table).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mdsmix.messages import plural
from mdsmix.mix.check import describe_coverage
from mdsmix.mix.epoch.apportion import describe_shares, make_shares_table
from mdsmix.report.inspection import (
    LENGTHS,
    length_rows,
    list_untrained_tokens,
    show_bad_records,
    sum_in_words,
    trained_tokens,
)
from mdsmix.report.named_streams import TRAINED
from mdsmix.report.page.gather import MOST_BAD, ROWS, UNSEEN, Gathered, StreamOnPage
from mdsmix.report.planned_run import show_plan
from mdsmix.report.show import Item, SampleText, Title, group_findings
from mdsmix.shards.counts import Records
from mdsmix.table import Column, Table, format_cell, is_known

MEASURES = (("delivered", "samples"), ("tokens", "tokens"), ("trained", "trained tokens"))
"Fields of a StreamInEpoch, each with its words."
SHARDS = (
    Column("stream", "text"),
    Column("shards"),
    Column("bytes", "size"),
    Column("place", "text"),
)


@dataclass(frozen=True)
class Ribbon:
    """A drawing of the shares of a whole, side by side."""

    label: str
    parts: Sequence[tuple[str, str, float]]
    "(words, class of the style sheet, count); the class is the same for a stream everywhere."

    @property
    def rects(self) -> Iterator[tuple[str, str, float, float]]:
        """(words, class, left edge in percent, width in percent)."""
        left, whole = 0.0, sum(count for *_, count in self.parts) or 1
        for words, css, count in self.parts:
            share = count / whole
            yield f"{words}: {share:.1%}", css, 100 * left, 100 * share
            left += share


PageItem = Item | Ribbon
Items = Iterator[PageItem]


@dataclass(frozen=True)
class Section:
    """A section of the page, under a title."""

    id: str
    title: str
    items: Sequence[PageItem]


def sections(page: Gathered) -> list[Section]:
    """All sections but the samples. A section without data says why."""
    plan = page.notes.get("plan")
    every = (
        ("mix", "The mix", plan, _mix(page)),
        ("findings", "What the check says", None, _check(page)),
        ("lengths", "How long samples are", None, _lengths(page)),
        ("rows", "What a row holds", plan, _rows(page)),
        ("records", "What became of the records", None, _records(page)),
        ("shards", "Shards", None, _shards(page)),
        ("plan", "The plan", plan, _plan(page)),
        ("batches", "The first batches", page.notes.get("preview"), _batches(page)),
    )
    return [Section(id, title, [why] if why else list(items)) for id, title, why, items in every]


def _mix(page: Gathered) -> Items:
    """The share of each stream in an epoch, in samples, tokens and trained tokens."""
    assert page.plan
    for key, what in MEASURES:
        parts = [(s.stream, page.colours[s.stream], getattr(s, key)) for s in page.plan.streams]
        total = sum(count for *_, count in parts)
        if is_known(total) and total:
            yield Ribbon(f"{what} of an epoch", parts)
    if page.mix and page.mix.shares:
        yield Title("Asked and reached")
        yield from (describe_shares(page.mix.shares), make_shares_table(page.mix.shares))


def _check(page: Gathered) -> Items:
    yield from group_findings(page.findings)
    if page.mix and not page.findings:
        yield "Nothing: no error, no warning, no note."
    yield describe_coverage(page.mix) if page.mix else UNSEEN


def _named(stream: StreamOnPage) -> Title:
    loader = stream.named.loader
    return Title(stream.named.name + ("" if loader == TRAINED else f", {loader}"))


def _lengths(page: Gathered) -> Items:
    """The samples of each stream, counted by powers of two of their length."""
    for stream in page.streams:
        yield _named(stream)
        if (manifest := stream.manifest) is None:
            yield "No manifest counts its lengths." if stream.found else UNSEEN
            continue
        totals, css = manifest.totals, page.colours[stream.named.name]
        yield f"{plural(totals.samples, 'sample')}, {format_cell(Column('tokens'), trained_tokens(manifest))} tokens, the longest {totals.longest:,}, max_seq_len {manifest.encoding.max_seq_len:,}"
        yield from list_untrained_tokens(manifest)
        most = max(totals.lengths.values(), default=0)
        yield Table(
            columns=(LENGTHS[0], Column("bar", "bar"), *LENGTHS[1:]),
            rows=[
                (of, (count / most, css), count, share) for of, count, share in length_rows(totals)
            ],
        )


def _rows(page: Gathered) -> Items:
    """The shares of trained tokens, other tokens and padding in a step."""
    assert page.plan
    step = page.plan.step
    yield f"{step.how_padded}; a step has {step.positions:,.0f} positions."
    if is_known(step.trained) and step.positions:  # unknown shares are not drawn
        tokens = min(step.tokens, step.positions)
        trained = min(step.trained, tokens)
        parts = (
            ("trained tokens", "trained", trained),
            ("other tokens", "read", tokens - trained),
            ("padding", "padding", step.positions - tokens),
        )
        yield Ribbon("the positions of a step", parts)


def _records(page: Gathered) -> Items:
    """How many records were written, filtered and quarantined, and the first bad ones."""
    for stream in page.streams:
        yield _named(stream)
        if (manifest := stream.manifest) is None:
            yield "No manifest counts its records." if stream.found else UNSEEN
        elif manifest.mixed:
            names = ", ".join(part.name for part in manifest.mixed)
            yield f"Drawn by mdsmix mix from {names}: it has no records of its own."
        else:
            yield from _fate(manifest.records, page.colours[stream.named.name])
        if stream.bad and stream.bad["bad"]:
            yield SampleText([("\n".join(show_bad_records(stream.bad)), "text")])
            if stream.bad["bad"] >= MOST_BAD:
                yield f"Of the quarantine the first {MOST_BAD:,} records were read: the counts of the reasons are of these."


def _fate(records: Records, css: str) -> Items:
    counts = [("written", css, records.written)]
    counts += [(f"filtered, {reason}", "filtered", n) for reason, n in records.filtered.items()]
    counts += [(f"quarantined, {reason}", "bad", n) for reason, n in records.quarantined.items()]
    yield from (
        sum_in_words(records),
        Ribbon("records", [(f"{words}, {n:,}", of, n) for words, of, n in counts]),
    )


def _shards(page: Gathered) -> Items:
    found = [(each.named.name, each.found.stream) for each in page.streams if each.found]
    rows = [(name, len(s.index.shards), s.index.bytes, s.folder.url) for name, s in found]
    yield Table(columns=SHARDS, rows=rows) if rows else "Nothing is published yet."


def _plan(page: Gathered) -> Items:
    assert page.plan
    if page.is_batch_guessed:
        yield f"Nothing says how large a batch is, so {ROWS} rows a device are taken (--batch says others)."
    yield from show_plan(page.plan)


def _batches(page: Gathered) -> Items:
    """The epoch in windows of steps, and what `mdsmix preview` shows."""
    assert page.preview
    from mdsmix.report.previewed_batches import show_preview, windows_table  # imports streaming

    names = page.preview.layout.names
    for steps, *shares in windows_table(page.preview).rows:
        parts = [
            (name, page.colours[name], share) for name, share in zip(names, shares, strict=True)
        ]
        yield Ribbon(f"steps {steps}", parts)
    yield from show_preview(page.preview, page.decoder, with_ids=False)
