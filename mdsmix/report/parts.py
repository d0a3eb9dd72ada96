"""What one part of an array of jobs came to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mdsmix.convert.parts import PartOutcome
from mdsmix.report.summary import loud
from mdsmix.words import plural

MANY_BAD = 0.01


def part_sentences(outcome: PartOutcome) -> Iterator[str]:
    """A line for the stream, and one for what of its records is bad."""
    records = outcome.records
    yield (
        f"{outcome.stream}: part {outcome.part}: {outcome.units:,} of {plural(outcome.units_in_all, 'work unit')}, "
        f"{outcome.reused:,} of their records were there already; {records.read:,} records read, {records.written:,} written, "
        f"{outcome.tokens:,} tokens, {outcome.seconds:.1f} s; into {outcome.target}"
    )
    if records.bad:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in records.quarantined.items())
        loud = "WARNING: " * (records.bad > MANY_BAD * records.sampled)
        yield f"  {loud}{records.bad:,} records are bad ({reasons}); mdsmix quarantine shows them when the stream is published"
    yield from (f"  {note}" for note in outcome.notes)


def part_warnings(outcomes: Iterable[PartOutcome]) -> list[str]:
    """Of these lines those that warn."""
    return [line for o in outcomes for line in loud(o.stream, part_sentences(o))]


def part_json(outcome: PartOutcome) -> dict[str, Any]:
    """The same for programs."""
    records = outcome.records
    return {
        "stream": outcome.stream,
        "target": outcome.target,
        "units": outcome.units,
        "units_in_all": outcome.units_in_all,
        "reused": outcome.reused,
        "read": records.read,
        "written": records.written,
        "filtered": records.filtered,
        "quarantined": records.quarantined,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "peak_bytes": outcome.peak,
    }
