"""The table at the end of a conversion, and the sentences under it that a user should read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdsmix.convert.outcome import Outcome
from mdsmix.shards.manifest import Manifest

BAD_SHARE = 0.01
"More bad records than this are warned of."
HEADINGS = (
    "stream", "read", "written", "filtered", "quarantined",
    "tokens", "shards", "bytes", "seconds", "tokens/s",
)  # fmt: skip


def print_summary(outcomes: Sequence[Outcome]) -> None:
    """One row per stream, the sum where there are several, then what became of the other records."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "stream" else "right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    if len(outcomes) > 1:
        table.add_section()
        table.add_row(*_total(outcomes))
    # A narrow terminal wraps the table rather than loses digits.
    whole = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, whole)
    console.print(table)
    for sentence in (s for outcome in outcomes for s in _sentences(outcome)):
        console.print(sentence, markup=False)
    if peak := max(outcome.peak for outcome in outcomes):
        console.print(f"peak memory: {peak / 1e6:,.0f} MB")


def _row(outcome: Outcome) -> list[str]:
    return [outcome.stream, *_figures([outcome])]


def _total(outcomes: Sequence[Outcome]) -> list[str]:
    return ["all", *_figures(outcomes)]


def _figures(outcomes: Sequence[Outcome]) -> list[str]:
    manifests = [outcome.manifest for outcome in outcomes]
    seconds = sum(outcome.seconds for outcome in outcomes)
    tokens = sum(m.totals.tokens for m in manifests)
    made = sum(outcome.new_tokens for outcome in outcomes)
    counts = (
        sum(m.records.read for m in manifests),
        sum(m.records.written for m in manifests),
        sum(m.records.dropped for m in manifests),
        sum(m.records.bad for m in manifests),
        tokens,
        sum(p.shards for m in manifests for p in m.parts),
        sum(outcome.bytes for outcome in outcomes),
    )
    if not any(outcome.done for outcome in outcomes):
        return [*map(_grouped, counts), "up to date", ""]
    return [*map(_grouped, counts), f"{seconds:.1f}", _grouped(int(made / max(seconds, 1e-3)))]


def _sentences(outcome: Outcome) -> list[str]:
    manifest = outcome.manifest
    said = [f"{outcome.stream}: {outcome.state}, {outcome.target}"]
    for what, reasons in (
        ("filtered", manifest.records.filtered),
        ("quarantined", manifest.records.quarantined),
    ):
        if reasons:
            said.append(f"  {what}: {', '.join(f'{n} {reason}' for reason, n in reasons.items())}")
    said += [f"  {note}" for note in (*_notes(manifest, outcome), *outcome.notes)]
    return said


def _notes(manifest: Manifest, outcome: Outcome) -> list[str]:
    totals, records = manifest.totals, manifest.records
    notes = []
    if records.bad:
        notes.append(f"the bad records lie in {outcome.target}/quarantine/")
    if records.bad > BAD_SHARE * records.read:
        notes.append(f"WARNING: {records.bad / records.read:.1%} of the records are bad")
    if totals.lost_tokens:
        notes.append(
            f"{_grouped(totals.lost_tokens)} tokens are in no sample (less than a row, or cut off)"
        )
    if totals.specials:
        rule = manifest.encoding.special_tokens_in_text
        notes.append(f"{totals.specials} records hold the text of a special token; rule: {rule}")
    return notes


def _grouped(number: Any) -> str:
    return f"{number:,}"
