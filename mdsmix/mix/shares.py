"""A recipe's shares and budget, held against the streams that are there: samples of each, how near they come, how sure that is.

Streaming draws samples, and people think in tokens, in finetuning in trained tokens. How many of these a stream holds is counted
in its manifest, so a share of them is a number of samples; `apportion.py` works it out. It is done once, when all streams are
open, and what comes of it is a `choose` of each stream: whatever renders, checks or draws a mix sees that number alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.kinds import kind_of
from mdsmix.mix import spread
from mdsmix.mix.apportion import (
    Apportioned,
    Measured,
    Part,
    of_budget,
    of_epoch,
    of_passes,
    reached,
    rounded,
    shares,
)
from mdsmix.mix.first_samples import (
    added_eos,
    is_seen_alike,
    losses_per_sample,
    per_sample,
    row_length,
    token_samples,
)
from mdsmix.mix.streams import Loader, Stream
from mdsmix.mix.unfit import Wanted, percent, refuse_counts, refuse_few, refuse_many
from mdsmix.recipe import Recipe
from mdsmix.recipe.budget import Budget, Unit
from mdsmix.recipe.mix_rules import budget_of, written_shares
from mdsmix.training.keys import whole


def apportion(recipe: Recipe, loader: Loader, may_estimate: bool = False) -> Apportioned:
    """How many samples of each stream an epoch draws. `loader`: the recipe's, with its streams opened.

    Raises:
        MixRefused: the streams cannot give what is asked, or nobody counted what they hold.
    """
    budget, unit = budget_of(recipe), unit_of(recipe)
    streams = [_measured(s, loader, unit, budget, may_estimate) for s in loader.streams]
    asked = _asked(recipe, streams, unit)
    wanted = Wanted(
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
    deviations = _deviations(loader, wanted, chosen, total)
    return Apportioned(
        count=unit,
        budget=str(budget) if budget else None,
        is_absolute=recipe.absolute,
        is_fixed=loader.dataset.get("sampling_method") == "fixed",
        granularity=whole(loader.dataset.get("sampling_granularity")) or 1,
        parts=tuple(_parts(recipe, wanted, chosen, got, deviations)),
    )


def _parts(
    recipe: Recipe,
    wanted: Wanted,
    chosen: Sequence[int],
    got: Sequence[Fraction],
    deviations: Sequence[float],
) -> Iterator[Part]:
    written = written_shares(recipe)
    for i, stream in enumerate(wanted.streams):
        yield Part(
            stream=stream.name,
            samples=stream.samples,
            choose=chosen[i],
            asked=float(wanted.shares[i]),
            reached=float(got[i]),
            deviation=deviations[i],
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
    stream: Stream, loader: Loader, unit: Unit, budget: Budget | None, may_estimate: bool
) -> Measured:
    units = (unit, (budget and budget.unit) or unit)
    means = {u: _mean(stream, loader, u, may_estimate) for u in units}
    return Measured(
        name=stream.name,
        samples=stream.index.samples,
        counted=means[units[0]][0],
        budgeted=means[units[1]][0],
        is_exact=all(is_exact for _, is_exact in means.values()),
        adds_eos="tokens" in units and added_eos(stream, loader) > 0,
    )


def _mean(stream: Stream, loader: Loader, unit: Unit, may_estimate: bool) -> tuple[Fraction, bool]:
    """What a sample of the stream holds of the unit, and whether that was counted."""
    if unit == "samples" or not stream.index.samples:
        return Fraction(bool(stream.index.samples)), True
    found = (per_sample if unit == "tokens" else losses_per_sample)(stream, loader)
    if found is None:
        raise MixRefused(
            f"the {unit} of {stream.name} are not known, since the loader itself tokenizes it, so no share of them can be worked "
            "out: convert the stream, or write count: samples and a budget of samples."
        )
    is_exact = found.is_exact and is_seen_alike(stream, loader)
    if not is_exact and not may_estimate:
        raise MixRefused(
            f"the {unit} of {stream.name} were not counted ({_why(stream)}): its first samples suggest {found.tokens:,.1f} a "
            "sample; pass --estimate to take that for all of them, convert the stream, or write count: samples and a budget of "
            "samples."
        )
    added = Fraction(added_eos(stream, loader)) if unit == "tokens" else Fraction(0)
    if found.is_exact and (manifest := stream.trusted_manifest):
        totals = manifest.totals
        held = totals.seen_tokens if unit == "tokens" else totals.loss_tokens
        return Fraction(held, totals.samples) + added, is_exact
    return Fraction(found.tokens) + added, is_exact


def _why(stream: Stream) -> str:
    if stream.manifest is None:
        return "it has no manifest"
    if stream.trusted_manifest is None:
        return "its manifest is of another index"
    return "its manifest counts them for another max_seq_len, other targets, or a padding token that is not EOS"


def _asked(recipe: Recipe, streams: Sequence[Measured], unit: Unit) -> dict[str, Fraction]:
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
    streams: Sequence[Measured],
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


def _deviations(
    loader: Loader, wanted: Wanted, chosen: Sequence[int], total: Fraction | None
) -> list[float]:
    """Standard deviation of each share from one epoch to another: of a fixed whole, or, to first order, of what is drawn."""
    of = [
        spread.of_draw(_of_sample(stream, loader, wanted.unit), n, stream.index.samples)
        for stream, n in zip(loader.streams, chosen, strict=True)
    ]
    if total is not None:
        return [each / float(total) for each in of]
    held = [float(n * s.counted) for s, n in zip(wanted.streams, chosen, strict=True)]
    return spread.of_shares(held, of)


def _of_sample(stream: Stream, loader: Loader, unit: Unit) -> float:
    """The largest standard deviation that a sample may have; of streams without a manifest that of the first ones."""
    if unit == "samples":
        return 0.0
    if (manifest := stream.trusted_manifest) is None:
        found = [sample.length for sample in token_samples(stream, loader)]
        return 0.0 if row_length(stream) else math.sqrt(_variance(found))
    kind = kind_of(manifest.encoding)
    if unit == "tokens":
        return spread.most_of_tokens(manifest.totals, manifest.encoding)
    return spread.most_of_losses(manifest.totals, manifest.encoding, kind.has_targets)


def _variance(values: Sequence[int]) -> float:
    mean = sum(values) / max(1, len(values))
    return sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
