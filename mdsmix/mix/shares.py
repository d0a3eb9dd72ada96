"""A recipe's shares and budget, held against the streams that are there: how much each holds of what shares count."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.mix.apportion import Apportioned, StreamShare, asked, drawn, percent
from mdsmix.mix.stream_counts import eos_of, is_seen_alike, tokens_of, trained_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.recipe import Recipe
from mdsmix.recipe.amounts import Unit
from mdsmix.recipe.rules import budget_of, written_shares
from mdsmix.table import Estimate, is_known


def apportion(recipe: Recipe, loader: Loader, may_estimate: bool = False) -> Apportioned:
    """How many samples of each stream an epoch draws. `loader`: the recipe's, with its streams opened.

    Raises:
        MixRefused: the streams cannot give what is asked, or nobody counted what they hold.
    """
    budget, written = budget_of(recipe), written_shares(recipe)
    unit: Unit = recipe.count or (budget and budget.unit) or "tokens"
    units = (unit, (budget and budget.unit) or unit)
    measured = [
        replace(_measured(s, loader, units, may_estimate), written=written[s.name])
        for s in loader.streams
    ]
    parts = asked(measured, Fraction(str(recipe.temperature)), recipe.absolute)
    no_share = not any(part.asked for part in parts)
    for part in parts:
        if (part.asked or no_share) and not part.size:
            raise MixRefused(
                f"{part.stream} is to be {percent(part.asked)} of an epoch's {unit}, and holds none: convert it, or take its share "
                "out, or look at what was filtered when it was converted."
            )
    return Apportioned(
        count=unit,
        budget=budget,
        is_absolute=recipe.absolute,
        parts=drawn(parts, budget, unit, Fraction(str(recipe.max_repeat)), recipe.absolute),
    )


def _measured(
    stream: StreamInMix, loader: Loader, units: tuple[Unit, Unit], may_estimate: bool
) -> StreamShare:
    (counted, is_exact), (budgeted, too) = (_mean(stream, loader, u, may_estimate) for u in units)
    return StreamShare(
        stream=stream.name,
        samples=stream.index.samples,
        counted=counted,
        budgeted=budgeted,
        is_exact=is_exact and too,
    )


def _mean(
    stream: StreamInMix, loader: Loader, unit: Unit, may_estimate: bool
) -> tuple[Fraction, bool]:
    """What a sample of the stream holds of the unit, and whether that was counted."""
    samples = stream.index.samples
    if unit == "samples" or not samples:
        return Fraction(bool(samples)), True
    held = tokens_of(stream, loader)[0] if unit == "tokens" else trained_of(stream, loader)
    other = "convert the stream, or write count: samples and a budget of samples."
    if not is_known(held):
        raise MixRefused(
            f"the {unit} of {stream.name} are not known, since the loader itself tokenizes it, so no share of them can be worked out: {other}"
        )
    is_exact = not isinstance(held, Estimate) and is_seen_alike(stream, loader)
    if not is_exact and not may_estimate:
        raise MixRefused(
            f"the {unit} of {stream.name} were not counted (it has no manifest, or one that is of another index, another max_seq_len, other "
            f"targets, or a padding token that is not EOS): its first samples suggest {held / samples:,.1f} a sample; pass --estimate to take "
            f"that for all of them, {other}"
        )
    added = eos_of(stream, loader) if unit == "tokens" else 0
    return (Fraction(held) + Fraction(added)) / samples, is_exact
