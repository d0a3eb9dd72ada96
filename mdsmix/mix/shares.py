"""A recipe's shares and budget, held against the streams that are there: samples of each, how near they come, how sure that is.

Streaming draws samples, and people think in tokens, in finetuning in trained tokens. How many of these a stream holds is counted
in its manifest, so a share of them is a number of samples; `apportion.py` works it out. It is done once, when all streams are
open, and what comes of it is a `choose` of each stream: whatever renders, checks or draws a mix sees that number alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

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
    is_seen_alike,
    losses_per_sample,
    per_sample,
    row_length,
    token_samples,
)
from mdsmix.mix.streams import Loader, Stream
from mdsmix.recipe import Recipe
from mdsmix.recipe.budget import Budget, Unit
from mdsmix.recipe.mix_rules import budget_of, written_shares
from mdsmix.table import Column, Estimate, Table, as_json
from mdsmix.words import listed

NEAR = Fraction(1, 1000)
"A tenth of a percentage point: how far from the share that was asked for whole samples may be."


def apportion(recipe: Recipe, loader: Loader, may_estimate: bool = False) -> Apportioned:
    """How many samples of each stream an epoch draws. `loader`: the recipe's, with its streams opened.

    Raises:
        MixRefused: the streams cannot give what is asked, or nobody counted what they hold.
    """
    budget, unit = budget_of(recipe), unit_of(recipe)
    measures = [_measured(s, loader, unit, budget, may_estimate) for s in loader.streams]
    streams = [measured for measured, _ in measures]
    asked = _asked(recipe, streams, unit)
    ideal = _ideal(recipe, asked, streams, budget)
    _refuse_too_few(ideal, streams, budget)
    _refuse_too_many(recipe, asked, ideal, streams, budget, unit)
    chosen = rounded(ideal, recipe.absolute)
    whole = sum((n * s.counted for n, s in zip(ideal, streams, strict=True)), Fraction(0))
    total = whole / sum(asked.values()) if recipe.absolute else None
    got = reached(chosen, streams, total)
    _refuse_far(asked, chosen, got, ideal, streams, unit)
    held = total or sum((n * s.counted for n, s in zip(chosen, streams, strict=True)), Fraction(0))
    deviations = _deviations(loader, unit, chosen, got, float(held), recipe.absolute)
    return Apportioned(
        count=unit,
        budget=str(budget) if budget else None,
        is_absolute=recipe.absolute,
        is_fixed=loader.dataset.get("sampling_method") == "fixed",
        parts=tuple(
            Part(
                stream=s.name,
                samples=s.samples,
                choose=chosen[i],
                asked=float(asked[s.name]),
                reached=float(got[i]),
                deviation=deviations[i],
                is_exact=measures[i][1],
            )
            for i, s in enumerate(streams)
        ),
    )


def unit_of(recipe: Recipe) -> Unit:
    """What shares count: as the recipe says, else what the budget counts, else tokens."""
    budget = budget_of(recipe)
    return recipe.count or (budget and budget.unit) or "tokens"


def _measured(
    stream: Stream, loader: Loader, unit: Unit, budget: Budget | None, may_estimate: bool
) -> tuple[Measured, bool]:
    """The stream's means, and whether they were counted."""
    counted, is_exact = _mean(stream, loader, unit, may_estimate)
    other = (budget and budget.unit) or unit
    budgeted, is_exact_too = (
        (counted, True) if other == unit else _mean(stream, loader, other, may_estimate)
    )
    measured = Measured(
        name=stream.name, samples=stream.index.samples, counted=counted, budgeted=budgeted
    )
    return measured, is_exact and is_exact_too


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
    if found.is_exact and (manifest := stream.trusted_manifest):
        totals = manifest.totals
        held = totals.seen_tokens if unit == "tokens" else totals.loss_tokens
        return Fraction(held, totals.samples), is_exact
    return Fraction(found.tokens), is_exact


def _why(stream: Stream) -> str:
    if stream.manifest is None:
        return "it has no manifest"
    if stream.trusted_manifest is None:
        return "its manifest is of another index"
    return "its manifest counts them for another max_seq_len or other targets"


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
                f"{stream.name} is to be {_percent(asked[stream.name])} of an epoch's {unit}, and holds none: take its share "
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


def _refuse_too_few(
    ideal: Sequence[Fraction], streams: Sequence[Measured], budget: Budget | None
) -> None:
    if budget and sum(ideal, Fraction(0)) < 1:
        least = min(s.budgeted for s, n in zip(streams, ideal, strict=True) if n)
        holds = f", and a sample holds {float(least):,.0f} or more" if budget.unit else ""
        raise MixRefused(
            f"budget is {budget}, less than one sample{holds}: nothing would be drawn; raise it."
        )


def _refuse_too_many(
    recipe: Recipe,
    asked: dict[str, Fraction],
    ideal: Sequence[Fraction],
    streams: Sequence[Measured],
    budget: Budget | None,
    unit: Unit,
) -> None:
    """What the data cannot fill within max_repeat; the scarcest stream is told, and what fits all."""
    most = Fraction(str(recipe.max_repeat))
    passes = {s.name: n / s.samples for s, n in zip(streams, ideal, strict=True) if n}
    over = sorted((n for n in passes if passes[n] > most), key=lambda name: -passes[name])
    if not over or budget is None:
        return
    scarce = next(s for s in streams if s.name == over[0])
    wanted = passes[scarce.name] * scarce.size
    fits = budget.amount * most / passes[scarce.name]
    others = f" (so do those of {listed(over[1:])})" if over[1:] else ""
    raise MixRefused(
        f"the share of {scarce.name}, {_percent(asked[scarce.name])} of {budget}, is {float(wanted):,.0f} {unit}, and "
        f"{scarce.name} holds {float(scarce.size):,.0f}: {float(passes[scarce.name]):,.2f} passes an epoch, and max_repeat is "
        f"{recipe.max_repeat}{others}. The largest budget that fits is {_floored(fits, budget)}; set that, lower the share, or "
        "raise max_repeat."
    )


def _floored(amount: Fraction, budget: Budget) -> str:
    """Rounded down, so that it fits: to whole tokens or samples, to thousandths of a pass."""
    step = 1 if budget.unit else 1000
    return f"{math.floor(amount * step) / step:,.{0 if budget.unit else 3}f} {str(budget).partition(' ')[2]}"


def _refuse_far(
    asked: dict[str, Fraction],
    chosen: Sequence[int],
    got: Sequence[Fraction],
    ideal: Sequence[Fraction],
    streams: Sequence[Measured],
    unit: Unit,
) -> None:
    """Shares that whole samples do not come near: a stream of few, or of long ones."""
    for stream, n, share in zip(streams, chosen, got, strict=True):
        wanted = asked[stream.name]
        if wanted and not n:
            raise MixRefused(
                f"the share of {stream.name}, {_percent(wanted)}, rounds to 0 of its samples{_of_about(stream, unit)}: it would "
                f"never be drawn; {_more(streams, ideal, unit)}, or a larger share."
            )
        if abs(share - wanted) > NEAR:
            raise MixRefused(
                f"the share of {stream.name} is to be {_percent(wanted)}, and the nearest whole number of samples, "
                f"{n:,}{_of_about(stream, unit)}, comes to {_percent(share)}: more than 0.1 percentage points away, since an epoch has "
                f"too few of them; {_more(streams, ideal, unit)}, or the shares that these come to: "
                f"{', '.join(f'{s.name} {_percent(g)}' for s, g in zip(streams, got, strict=True))}."
            )


def _of_about(stream: Measured, unit: Unit) -> str:
    return "" if unit == "samples" else f" of about {float(stream.counted):,.0f} {unit}"


def _more(streams: Sequence[Measured], ideal: Sequence[Fraction], unit: Unit) -> str:
    """An epoch in which a sample more or less of any stream is less than 0.1 points."""
    drawn = [s for s, n in zip(streams, ideal, strict=True) if n]
    enough = math.ceil(max(s.counted for s in drawn) * len(drawn) / NEAR)
    return f"give a budget of some {enough:,} {unit}"


def _percent(share: Fraction) -> str:
    return f"{float(share):.2%}"


def _deviations(
    loader: Loader,
    unit: Unit,
    chosen: Sequence[int],
    got: Sequence[Fraction],
    held: float,
    is_absolute: bool,
) -> list[float]:
    """Standard deviation of each share from one epoch to another; to first order, since all are parts of one sum."""
    of = [
        spread.of_draw(_of_sample(s, loader, unit), n, s.index.samples) / (held or 1)
        for s, n in zip(loader.streams, chosen, strict=True)
    ]
    if is_absolute:
        return of
    others = [sum(d**2 for d in of) - each**2 for each in of]
    return [
        math.sqrt(((1 - float(p)) * own) ** 2 + float(p) ** 2 * max(0.0, other))
        for own, other, p in zip(of, others, got, strict=True)
    ]


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


EPOCHS = (1, 2, 4)
"For which it is said how much of a stream was never drawn."
SHARES = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("choose"),
    Column("passes", "times"),
    Column("share asked", "fine", key="asked"),
    Column("reached", "fine"),
    Column("± at most", "finest", key="deviation_at_most"),
    *(
        Column(f"unseen in {n}" if n > 1 else "unseen in 1 epoch", "share", key=f"unseen_in_{n}")
        for n in EPOCHS
    ),
)


def shares_table(found: Apportioned) -> Table:
    """A row a stream: the share asked, what whole samples come to, and what of it is never seen."""
    rows = [
        (
            part.stream,
            part.samples,
            part.choose,
            part.passes,
            part.asked,
            part.reached if part.is_exact else Estimate(part.reached),
            part.deviation if part.is_exact else Estimate(part.deviation),
            *(found.unseen(part, epochs) for epochs in EPOCHS),
        )
        for part in found.parts
    ]
    return Table(columns=SHARES, rows=rows, notes=list(_notes(found)))


def shares_json(found: Apportioned) -> dict[str, Any]:
    keys = ("count", "budget", "is_absolute", "is_fixed", "is_exact")
    return {key: getattr(found, key) for key in keys} | as_json(shares_table(found))


def title(found: Apportioned) -> str:
    """Above the table: what the shares are of."""
    of = f"of the budget's {found.count}" if found.is_absolute else f"of an epoch's {found.count}"
    if found.budget:
        return f"shares {of}; budget: {found.budget}"
    whole = listed([part.stream for part in found.parts if part.choose == part.samples])
    return (
        f"shares {of}; no budget: the largest epoch in which no stream is taken more than once"
        + (f" ({whole}: whole)" if whole else "")
    )


def _notes(found: Apportioned) -> Iterator[str]:
    guessed = [part.stream for part in found.parts if not part.is_exact]
    if guessed:
        yield f"~ {listed(guessed)}: not counted, taken from the first samples (--estimate)"
    if any(part.deviation for part in found.parts):
        yield (
            "±: the standard deviation of the share in one epoch, since rows of unequal length are drawn at random; at most, since "
            "lengths are counted by powers of two"
        )
    if any(found.unseen(part, 1) for part in found.parts):
        yield (
            "unseen: sampling_method: fixed draws the same part of a stream in every epoch"
            if found.is_fixed
            else "unseen: every epoch draws a part of a stream anew; sampling_method: fixed would draw the same one"
        )
