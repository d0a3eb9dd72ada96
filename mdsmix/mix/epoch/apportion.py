"""Shares and a budget -> whole samples of each stream, in exact arithmetic.

Streaming takes `choose` unchanged. It rounds every other weight down, or gives the samples left
over by rounding to random streams. Manifests count the tokens of a stream, so a share of tokens
comes to a number of samples. The number is computed here in fractions and rounded by largest
remainder: the same on every machine. Code that renders, checks or draws a mix sees only `choose`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Context
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.messages import format_percent, join_names
from mdsmix.recipe.amounts import Budget, Unit
from mdsmix.table import Column, Table, Tree, mark_estimate, table_to_json

PRECISE = Context(prec=50, Emin=-400, Emax=400)
"""The context of roots. Every machine rounds them alike, unlike powers of floats. Numbers below
10^-400 become 0.
"""


@dataclass(frozen=True, kw_only=True)
class StreamShare:
    """One stream's part of an epoch."""

    stream: str
    samples: int
    "Samples in the stream."
    counted: Fraction
    "Units that shares count, for each sample on average: its tokens, its trained tokens, or 1."
    budgeted: Fraction
    "Units that the budget counts, for each sample on average."
    is_exact: bool
    "Both means were counted, not estimated from the first samples of the stream."
    written: Fraction | None
    "The share that the recipe gives this stream; None if it gives none."
    asked: Fraction = Fraction(0)
    "The share that this stream should have, 0 to 1."
    choose: int = 0
    "Samples that an epoch draws."
    reached: Fraction = Fraction(0)
    "The average share that `choose` samples come to."

    @property
    def size(self) -> Fraction:
        return self.samples * self.counted

    @property
    def passes(self) -> float:
        return self.choose / self.samples if self.samples else 0.0


Shares = tuple[StreamShare, ...]


@dataclass(frozen=True, kw_only=True)
class Apportioned:
    """All streams of a mix with the samples that their shares come to."""

    count: Unit
    "The unit that shares count."
    budget: Budget | None
    "If None, the epoch is the largest in which no stream is taken more than once."
    is_absolute: bool
    parts: Shares

    @property
    def is_exact(self) -> bool:
        return all(part.is_exact for part in self.parts)

    def weight(self, stream: str) -> dict[str, int | float]:
        """Return a stream's weight as the recipe gives it: its share, if any, and the budget or
        passes, such as {"share": 0.3, "budget": 1000000}.
        """
        numbers = dict[str, Fraction]()
        share = next(part.written for part in self.parts if part.stream == stream)
        if share is not None:
            numbers["share"] = share
        if self.budget:
            numbers["budget" if self.budget.unit else "passes"] = self.budget.amount
        return {
            name: int(number) if number.denominator == 1 else float(number)
            for name, number in numbers.items()
        }


def set_asked_shares(
    parts: Sequence[StreamShare], temperature: Fraction = Fraction(1), is_absolute: bool = False
) -> Shares:
    """Return the parts with `asked` set. Streams without a written share divide the rest by
    size ** (1 / `temperature`). Shares sum to 1 unless they are absolute.
    """
    sizes = [part.size if part.written is None else Fraction(0) for part in parts]
    largest = max(sizes) or 1
    weights = [_root(size / largest, temperature) for size in sizes]
    rest = 1 - sum(part.written or 0 for part in parts)
    per_weight = rest / (sum(weights) or Fraction(1))
    shares = [
        per_weight * weight if part.written is None else part.written
        for part, weight in zip(parts, weights, strict=True)
    ]
    total = 1 if is_absolute else sum(shares) or 1
    return tuple(
        replace(part, asked=share / total) for part, share in zip(parts, shares, strict=True)
    )


def _root(size: Fraction, temperature: Fraction) -> Fraction:
    """Return size ** (1 / temperature), in 50 digits."""
    if temperature == 1 or not size:
        return size
    power = PRECISE.divide(temperature.denominator, temperature.numerator)
    return Fraction(PRECISE.power(PRECISE.divide(size.numerator, size.denominator), power))


def choose_samples(
    parts: Shares, budget: Budget | None, unit: Unit, most: Fraction, is_absolute: bool = False
) -> Shares:
    """Return the parts with `choose` and `reached` set.

    Args:
        most: the most passes over a stream.

    Raises MixRefused if a stream cannot fill its share, or if its share comes to no whole sample.
    """
    ideal = compute_ideal_samples(parts, budget, most)
    if budget:
        _refuse_many(parts, ideal, budget, unit, most)
    counts = round_to_whole(ideal, is_absolute)
    reached = list[Fraction]()
    for part, count, exact in zip(parts, counts, ideal, strict=True):
        if part.asked and not count:
            raise MixRefused(
                f"the share of {part.stream}, {format_percent(part.asked)}, comes to no whole sample of "
                f"about {float(part.counted):,.0f} {unit}: set a larger budget, raise max_repeat, "
                "or give it a larger share."
            )
        reached.append(part.asked * count / (exact or 1))
    total = 1 if is_absolute else sum(reached) or 1
    return tuple(
        replace(part, choose=count, reached=share / total)
        for part, count, share in zip(parts, counts, reached, strict=True)
    )


def compute_ideal_samples(
    parts: Shares, budget: Budget | None, most: Fraction = Fraction(1)
) -> list[Fraction]:
    """Compute the samples of each stream, unrounded. A budget sets the size of the epoch. Without
    one, it is the largest epoch that takes no stream more than once, nor more than `most` times.
    """
    # Samples of an epoch of 1 unit, such as 1 token; with absolute shares, of as many units as the
    # shares sum to.
    per_unit = [part.asked / part.counted if part.asked else Fraction(0) for part in parts]
    if budget is None:
        whole_streams = min(
            part.samples / samples for part, samples in zip(parts, per_unit, strict=True) if samples
        )
        units = whole_streams * min(Fraction(1), most)
    elif budget.unit:
        budgeted = sum(
            samples * part.budgeted for part, samples in zip(parts, per_unit, strict=True)
        )
        units = budget.amount * sum(part.asked for part in parts) / budgeted
    else:
        position = next(i for i, part in enumerate(parts) if part.stream == budget.stream)
        if not per_unit[position]:
            raise MixRefused(
                f"budget is {budget}, and the share of {budget.stream} is 0, so its passes do not "
                "decide the size of the others: count passes of another stream."
            )
        units = budget.amount * parts[position].samples / per_unit[position]
    return [samples * units for samples in per_unit]


def round_to_whole(ideal: Sequence[Fraction], is_absolute: bool = False) -> list[int]:
    """Round by largest remainder: each number is its floor or one more, and all sum to the rounded
    sum of `ideal`.

    Absolute counts are rounded one by one, so that the count of a stream does not depend on the
    other streams.
    """
    half = Fraction(1, 2)
    if is_absolute:
        return [math.floor(number + half) for number in ideal]
    counts = [math.floor(number) for number in ideal]
    largest_first = sorted(range(len(ideal)), key=lambda i: counts[i] - ideal[i])
    for i in largest_first[: math.floor(sum(ideal, half)) - sum(counts)]:
        counts[i] += 1
    return counts


def _refuse_many(
    parts: Shares, ideal: Sequence[Fraction], budget: Budget, unit: Unit, most: Fraction
) -> None:
    """Raise MixRefused if a stream cannot fill its share within max_repeat. The message names the
    scarcest stream and the budget that fits.
    """
    all_passes = [exact / max(1, part.samples) for part, exact in zip(parts, ideal, strict=True)]
    passes = max(all_passes)
    if passes <= most:
        return
    scarcest = parts[all_passes.index(passes)]
    step = 1 if budget.unit else 1000  # thousandths of a pass
    largest = Fraction(math.floor(budget.amount * most / passes * step), step)
    raise MixRefused(
        f"the share of {scarcest.stream}, {format_percent(scarcest.asked)} under a budget of {budget}, "
        f"comes to {float(passes * scarcest.size):,.0f} {unit}, and the stream has "
        f"{float(scarcest.size):,.0f}: {float(passes):,.2f} passes an epoch exceed "
        f"max_repeat: {float(most):g}. The largest budget that fits is "
        f"{replace(budget, amount=largest)}; set that, lower the share, or raise max_repeat."
    )


SHARES = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("choose"),
    Column("passes", "times"),
    Column("share asked", "fine", key="asked"),
    Column("reached", "fine"),
)


def make_shares_table(apportioned: Apportioned) -> Table:
    """Return a table with a row for each stream: the share asked, and the share reached by whole
    samples.
    """
    rows = [
        (
            part.stream,
            part.samples,
            part.choose,
            part.passes,
            float(part.asked),
            mark_estimate(float(part.reached), part.is_exact),
        )
        for part in apportioned.parts
    ]
    estimated = [part.stream for part in apportioned.parts if not part.is_exact]
    notes = list[str]()
    if estimated:
        notes.append(f"~ {join_names(estimated)}: estimated from the first samples (--estimate)")
    return Table(columns=SHARES, rows=rows, notes=notes)


def shares_to_json(apportioned: Apportioned) -> Tree:
    return {
        "count": apportioned.count,
        "is_absolute": apportioned.is_absolute,
        "is_exact": apportioned.is_exact,
        "budget": apportioned.budget and str(apportioned.budget),
        **table_to_json(make_shares_table(apportioned)),
    }


def describe_shares(apportioned: Apportioned) -> str:
    """Return the line above the table: the unit of the shares, and the budget."""
    total = "the budget" if apportioned.is_absolute else "an epoch"
    budget = "no budget: the largest epoch in which no stream is taken more than once"
    if apportioned.budget:
        budget = f"budget: {apportioned.budget}"
    return f"shares of {total}'s {apportioned.count}; {budget}"
