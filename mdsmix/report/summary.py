"""The table at the end of a conversion, and the sentences under it that a user should read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdsmix.convert.outcome import Outcome
from mdsmix.report.table import Column, Row, Table, as_json, print_table
from mdsmix.shards.manifest import Manifest

BAD_SHARE = 0.01
"More bad records than this are warned of."
COLUMNS = (
    Column("stream", "text"),
    *map(Column, ("read", "written", "filtered", "quarantined", "tokens", "shards", "bytes")),
    Column("seconds", "seconds"),
    Column("tokens/s", key="tokens_per_second"),
)


def summary(outcomes: Sequence[Outcome]) -> Table:
    """One row per stream, and the sum where there are several."""
    rows: list[Row] = [(outcome.stream, *_figures([outcome])) for outcome in outcomes]
    total = ("all", *_figures(outcomes)) if len(outcomes) > 1 else None
    notes = [sentence for outcome in outcomes for sentence in _sentences(outcome)]
    peak = max((outcome.peak for outcome in outcomes), default=0)
    notes += [f"peak memory: {peak / 1e6:,.0f} MB"] if peak else []
    return Table(columns=COLUMNS, rows=rows, total=total, notes=notes)


def print_summary(outcomes: Sequence[Outcome]) -> None:
    """The table, then what became of the other records."""
    from rich.console import Console

    console, table = Console(soft_wrap=True, highlight=False), summary(outcomes)
    print_table(table, console)
    for sentence in table.notes:
        console.print(sentence, markup=False)


def summary_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The same for programs, with each stream's reasons and place."""
    found = as_json(summary(outcomes))
    for row, outcome in zip(found["rows"], outcomes, strict=True):
        records = outcome.manifest.records
        row |= {"target": outcome.target, "state": outcome.state}
        row |= {"reasons": {"filtered": records.filtered, "quarantined": records.quarantined}}
        row |= {"index_hash": outcome.manifest.index_hash, "peak_bytes": outcome.peak}
    return found


def _figures(outcomes: Sequence[Outcome]) -> Row:
    manifests = [outcome.manifest for outcome in outcomes]
    seconds = sum(outcome.seconds for outcome in outcomes)
    made = sum(outcome.new_tokens for outcome in outcomes)
    counts = (
        sum(m.records.read for m in manifests),
        sum(m.records.written for m in manifests),
        sum(m.records.dropped for m in manifests),
        sum(m.records.bad for m in manifests),
        sum(m.totals.tokens for m in manifests),
        sum(p.shards for m in manifests for p in m.parts),
        sum(outcome.bytes for outcome in outcomes),
    )
    if not any(outcome.done for outcome in outcomes):
        return (*counts, "up to date", "")
    return (*counts, seconds, int(made / max(seconds, 1e-3)))


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
    if manifest.encoding.rewritten_history == "each":
        notes.append(f"{totals.samples:,} rows of {records.written:,} records")
    if totals.lost_tokens:
        notes.append(
            f"{totals.lost_tokens:,} tokens are in no sample (less than a row, or cut off)"
        )
    if totals.specials:
        rule = manifest.encoding.special_tokens_in_text
        notes.append(f"{totals.specials} records hold the text of a special token; rule: {rule}")
    return notes
