"""A recipe's shares and budget, held against the streams that are there: samples of each, how near they come, how sure that is.

Streaming draws samples, and people think in tokens, in finetuning in trained tokens. How many of these a stream holds is counted
in its manifest, so a share of them is a number of samples; `apportion.py` works it out. It is done once, when all streams are
open, and what comes of it is a `choose` of each stream: whatever renders, checks or draws a mix sees that number alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.mix.apportion import (
    Apportioned,
    MeasuredStream,
    StreamShare,
    of_budget,
    of_epoch,
    of_passes,
    reached,
    rounded,
    shares,
)
from mdsmix.mix.stream_counts import eos_of, is_seen_alike, tokens_of, trained_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.mix.unfit import WantedShares, percent, refuse_counts, refuse_few, refuse_many
from mdsmix.recipe import Recipe
from mdsmix.recipe.budget import Budget, Unit
from mdsmix.recipe.mix_rules import budget_of, written_shares
from mdsmix.table import Estimate, is_known


def apportion(recipe: Recipe, loader: Loader, may_estimate: bool = False) -> Apportioned:
    """How many samples of each stream an epoch draws. `loader`: the recipe's, with its streams opened.

    Raises:
        MixRefused: the streams cannot give what is asked, or nobody counted what they hold.
    """
    budget, unit = budget_of(recipe), unit_of(recipe)
    streams = [_measured(s, loader, unit, budget, may_estimate) for s in loader.streams]
    asked = _asked(recipe, streams, unit)
    wanted = WantedShares(
        unit=unit,
        budget=budget,
        max_repeat=Fraction(str(recipe.max_repeat)),
        is_absolute=recipe.absolute,
        streams=streams,
        shares=[asked[s.name] for s in streams],
        ideal=_ideal(recipe, asked, streams, budget),
    )
    refuse_few(wanted)
    refuse_many(wanted)
    chosen = rounded(wanted.ideal, recipe.absolute)
    total = wanted.whole if recipe.absolute else None
    got = reached(chosen, streams, total)
    refuse_counts(wanted, chosen, got)
    return Apportioned(
        count=unit,
        budget=str(budget) if budget else None,
        is_absolute=recipe.absolute,
        is_fixed=loader.dataset.get("sampling_method") == "fixed",
        parts=tuple(_parts(recipe, wanted, chosen, got)),
    )


def _parts(
    recipe: Recipe,
    wanted: WantedShares,
    chosen: Sequence[int],
    got: Sequence[Fraction],
) -> Iterator[StreamShare]:
    written = written_shares(recipe)
    for i, stream in enumerate(wanted.streams):
        yield StreamShare(
            stream=stream.name,
            samples=stream.samples,
            choose=chosen[i],
            asked=float(wanted.shares[i]),
            reached=float(got[i]),
            is_exact=stream.is_exact,
            adds_eos=stream.adds_eos,
            weight=_weight(written[stream.name], wanted.budget),
        )


def _weight(share: Fraction | None, budget: Budget | None) -> dict[str, int | float]:
    said = {} if share is None else {"share": share}
    if budget:
        said["budget" if budget.unit else "passes"] = budget.amount
    return {key: _plain(number) for key, number in said.items()}


def _plain(number: Fraction) -> int | float:
    return int(number) if number.denominator == 1 else float(number)


def unit_of(recipe: Recipe) -> Unit:
    """What shares count: as the recipe says, else what the budget counts, else tokens."""
    budget = budget_of(recipe)
    return recipe.count or (budget and budget.unit) or "tokens"


def _measured(
    stream: StreamInMix, loader: Loader, unit: Unit, budget: Budget | None, may_estimate: bool
) -> MeasuredStream:
    units = (unit, (budget and budget.unit) or unit)
    means = {u: _mean(stream, loader, u, may_estimate) for u in units}
    return MeasuredStream(
        name=stream.name,
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


def _asked(recipe: Recipe, streams: Sequence[MeasuredStream], unit: Unit) -> dict[str, Fraction]:
    temperature = Fraction(str(recipe.temperature))
    try:
        asked = shares(written_shares(recipe), streams, temperature, recipe.absolute)
    except ValueError:
        raise MixRefused(
            f"no stream holds {unit}, so no share of them can be drawn: convert the streams, or count others."
        ) from None
    for stream in streams:
        if asked[stream.name] and not stream.size:
            raise MixRefused(
                f"{stream.name} is to be {percent(asked[stream.name])} of an epoch's {unit}, and holds none: take its share "
                "out, or look at what was filtered when it was converted."
            )
    return asked


def _ideal(
    recipe: Recipe,
    asked: dict[str, Fraction],
    streams: Sequence[MeasuredStream],
    budget: Budget | None,
) -> list[Fraction]:
    """Samples of each stream before they are rounded."""
    if budget is None:
        return of_epoch(asked, streams, min(Fraction(1), Fraction(str(recipe.max_repeat))))
    if budget.stream is None:
        return of_budget(asked, streams, budget.amount)
    if not asked[budget.stream]:
        raise MixRefused(
            f"budget is {budget}, and the share of {budget.stream} is 0, so its passes say nothing of the others: count passes "
            "of another stream."
        )
    return of_passes(asked, streams, budget.amount, budget.stream)
