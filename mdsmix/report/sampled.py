"""Sentences on a stream that takes a sample of its source: how large the sample is, and whether it fills its share of a budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mdsmix.convert.budget_share import said_of_mean
from mdsmix.convert.outcome import Outcome
from mdsmix.shards.manifest import Manifest
from mdsmix.words import percent, plural


def said_of_sample(manifest: Manifest) -> Iterator[str]:
    """The sample that the recipe asks for, and how many records it has."""
    if share := manifest.encoding.sample:
        records = manifest.records
        part = records.sampled / max(records.read, 1)
        yield f"sample: {percent(share)}: {records.sampled:,} of {records.read:,} records ({part:.3%}) are in it, by what they say"


def said_of_budget(outcome: Outcome) -> Iterator[str]:
    """The tokens that the budget wants and those of the stream; the tokens of a record, if they are far from expected_mean_tokens."""
    wanted, manifest = outcome.wanted, outcome.manifest
    came = manifest.totals.seen_tokens
    if wanted and not (missing := wanted.missing(manifest)):
        yield f"budget: {wanted.said}: {came:,} came"
    elif wanted:
        ways = (
            f"write sample: {percent(wanted.next_share(manifest))} under this stream, which adds to what is there"
            if wanted.share < 1
            else "there is no more of it: the mix repeats it up to max_repeat times, or give it a smaller share"
        )
        yield (
            f"WARNING: budget: {wanted.said}: {came:,} came, {missing:,} ({missing / wanted.tokens:.1%}) too few for its share; {ways}"
        )
    mean = _mean(manifest)
    if far := said_of_mean(mean, outcome.expected_mean):
        yield f"a record holds {mean:,.1f} tokens on average of {plural(manifest.records.written, 'record')}, {far}"


def budget_json(outcome: Outcome) -> dict[str, Any] | None:
    """The same as JSON; None without a budget."""
    wanted, manifest = outcome.wanted, outcome.manifest
    if wanted is None:
        return None
    return {
        "wanted_tokens": wanted.tokens,
        "missing_tokens": wanted.missing(manifest),
        "estimated_source_tokens": round(wanted.source.tokens),
        "places_looked_at": wanted.source.places,
        "margin": wanted.margin,
    }


def _mean(manifest: Manifest) -> float:
    """Tokens of a written record on average, before truncation."""
    totals = manifest.totals
    return (totals.tokens + totals.lost_tokens) / max(1, manifest.records.written)
