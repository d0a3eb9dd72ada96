"""A recipe's shares and budget, held against the streams that are there: how much each holds of what shares count."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.mix.apportion import Apportioned, StreamShare, asked, drawn, percent
from mdsmix.mix.stream_counts import eos_of, is_seen_alike, tokens_of, trained_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.recipe import Recipe
from mdsmix.recipe.amounts import Budget, Unit
from mdsmix.recipe.rules import budget_of, written_shares
from mdsmix.table import Estimate, is_known


def apportion(recipe: Recipe, loader: Loader, may_estimate: bool = False) -> Apportioned:
    """How many samples of each stream an epoch draws. `loader`: the recipe's, with its streams opened.

    Raises:
        MixRefused: the streams cannot give what is asked, or nobody counted what they hold.
    """
    budget, unit = budget_of(recipe), unit_of(recipe)
    written = written_shares(recipe)
    measured = tuple(
        replace(_measured(s, loader, unit, budget, may_estimate), written=written[s.name])
        for s in loader.streams
    )
    try:
        parts = asked(measured, Fraction(str(recipe.temperature)), recipe.absolute)
    except ValueError:
        raise MixRefused(
            f"no stream holds {unit}, so no share of them can be drawn: convert the streams, or count others."
        ) from None
    for part in parts:
        if part.asked and not part.size:
            raise MixRefused(
                f"{part.stream} is to be {percent(part.asked)} of an epoch's {unit}, and holds none: take its share "
                "out, or look at what was filtered when it was converted."
            )
    most = Fraction(str(recipe.max_repeat))
    return Apportioned(
        count=unit,
        budget=budget,
        is_absolute=recipe.absolute,
        is_fixed=loader.dataset.get("sampling_method") == "fixed",
        parts=drawn(parts, budget, unit, most, recipe.absolute),
    )


def unit_of(recipe: Recipe) -> Unit:
    """What shares count: as the recipe says, else what the budget counts, else tokens."""
    budget = budget_of(recipe)
    return recipe.count or (budget and budget.unit) or "tokens"


def _measured(
    stream: StreamInMix, loader: Loader, unit: Unit, budget: Budget | None, may_estimate: bool
) -> StreamShare:
    units = (unit, (budget and budget.unit) or unit)
    means = {u: _mean(stream, loader, u, may_estimate) for u in units}
    return StreamShare(
        stream=stream.name,
        samples=stream.index.samples,
        counted=means[units[0]][0],
        budgeted=means[units[1]][0],
        is_exact=all(is_exact for _, is_exact in means.values()),
        adds_eos="tokens" in units and eos_of(stream, loader) > 0,
    )


def _mean(
    stream: StreamInMix, loader: Loader, unit: Unit, may_estimate: bool
) -> tuple[Fraction, bool]:
    """What a sample of the stream holds of the unit, and whether that was counted."""
    if unit == "samples" or not stream.index.samples:
        return Fraction(bool(stream.index.samples)), True
    held = (tokens_of if unit == "tokens" else trained_of)(stream, loader)
    if not is_known(held):
        raise MixRefused(
            f"the {unit} of {stream.name} are not known, since the loader itself tokenizes it, so no share of them can be worked "
            "out: convert the stream, or write count: samples and a budget of samples."
        )
    is_exact = not isinstance(held, Estimate) and is_seen_alike(stream, loader)
    if not is_exact and not may_estimate:
        raise MixRefused(
            f"the {unit} of {stream.name} were not counted ({_why(stream)}): its first samples suggest "
            f"{held / stream.index.samples:,.1f} a sample; pass --estimate to take that for all of them, convert the stream, or write "
            "count: samples and a budget of samples."
        )
    added = eos_of(stream, loader) if unit == "tokens" else 0
    return (Fraction(held) + Fraction(added)) / stream.index.samples, is_exact


def _why(stream: StreamInMix) -> str:
    if stream.manifest is None:
        return "it has no manifest"
    if stream.trusted_manifest is None:
        return "its manifest is of another index"
    return "its manifest counts them for another max_seq_len, other targets, or a padding token that is not EOS"
