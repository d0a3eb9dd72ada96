"""Shares and a budget -> whole samples of each stream, in exact arithmetic.

Streaming takes `choose` as it stands. It rounds every other weight down, or gives the samples left
over by rounding to random streams. Manifests count the tokens of a stream, so a share of tokens
comes to a number of samples. The number is worked out here in fractions and rounded by largest
remainder: the same on every machine. Code that renders, checks or draws a mix sees `choose` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Context
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.recipe.amounts import Budget, Unit
from mdsmix.table import Column, Table, Tree, about, as_json
from mdsmix.words import listed, percent

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
    "Both means were counted; else they are estimated from the first samples of the stream."
    written: Fraction | None
    "The share that the recipe gives this stream; None where it gives none."
    asked: Fraction = Fraction(0)
    "The share that this stream is to have, 0 to 1."
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
    "None: the largest epoch in which no stream is taken more than once."
    is_absolute: bool
    parts: Shares

    @property
    def is_exact(self) -> bool:
        return all(part.is_exact for part in self.parts)

    def weight(self, stream: str) -> dict[str, int | float]:
        """A stream's weight as the recipe gives it: its share, where it has one, and the budget or
        passes, such as {"share": 0.3}.
        """
        said = {"share": next(part.written for part in self.parts if part.stream == stream)}
        if self.budget:
            said["budget" if self.budget.unit else "passes"] = self.budget.amount
        return {
            k: int(n) if n.denominator == 1 else float(n) for k, n in said.items() if n is not None
        }


def set_asked_shares(
    parts: Sequence[StreamShare], temperature: Fraction = Fraction(1), is_absolute: bool = False
) -> Shares:
    """The parts with `asked` set. Streams without a written share divide the rest by size ** (1 /
    `temperature`). Shares sum to 1 unless they are absolute.
    """
    sizes = [part.size if part.written is None else Fraction(0) for part in parts]
    largest = max(sizes) or 1
    weights = [_root(size / largest, temperature) for size in sizes]
    left = (1 - sum(part.written or 0 for part in parts)) / (sum(weights) or Fraction(1))
    shares = [
        left * weight if part.written is None else part.written
        for part, weight in zip(parts, weights, strict=True)
    ]
    by = 1 if is_absolute else sum(shares) or 1
    return tuple(replace(part, asked=n / by) for part, n in zip(parts, shares, strict=True))


def _root(size: Fraction, temperature: Fraction) -> Fraction:
    if temperature == 1 or not size:
        return size
    power = PRECISE.divide(temperature.denominator, temperature.numerator)
    return Fraction(PRECISE.power(PRECISE.divide(size.numerator, size.denominator), power))


def choose_samples(
    parts: Shares, budget: Budget | None, unit: Unit, most: Fraction, is_absolute: bool = False
) -> Shares:
    """The parts with `choose` and `reached` set. `most`: the most passes over a stream.

    MixRefused where a stream cannot fill its share, or where its share comes to no whole sample.
    """
    ideal = compute_ideal_samples(parts, budget, most)
    if budget:
        _refuse_many(parts, ideal, budget, unit, most)
    counts = round_to_whole(ideal, is_absolute)
    reached = [p.asked * n / (of or 1) for p, n, of in zip(parts, counts, ideal, strict=True)]
    whole = 1 if is_absolute else sum(reached) or 1
    for part, n in zip(parts, counts, strict=True):
        if part.asked and not n:
            raise MixRefused(
                f"the share of {part.stream}, {percent(part.asked)}, comes to no whole sample of about {float(part.counted):,.0f} {unit}: set a "
                "larger budget, raise max_repeat, or give it a larger share."
            )
    return tuple(
        replace(part, choose=n, reached=share / whole)
        for part, n, share in zip(parts, counts, reached, strict=True)
    )


def compute_ideal_samples(
    parts: Shares, budget: Budget | None, most: Fraction = Fraction(1)
) -> list[Fraction]:
    """Samples of each stream, unrounded. A budget sets the size of the epoch; without one, the
    epoch is the largest that takes no stream more than once, nor more than `most` times.
    """
    # Samples of an epoch of 1 unit, such as 1 token; with absolute shares, of as many units as the
    # shares sum to.
    samples = [part.asked / part.counted if part.asked else Fraction(0) for part in parts]
    pairs = [*zip(parts, samples, strict=True)]
    if budget is None:
        times = min(part.samples / n for part, n in pairs if n) * min(Fraction(1), most)
    elif budget.unit:
        held = sum(n * part.budgeted for part, n in pairs)
        times = budget.amount * sum(part.asked for part in parts) / held
    else:
        over, in_one = next((part, n) for part, n in pairs if part.stream == budget.stream)
        if not in_one:
            raise MixRefused(
                f"budget is {budget}, and the share of {budget.stream} is 0, so its passes say nothing of the others: count passes "
                "of another stream."
            )
        times = budget.amount * over.samples / in_one
    return [n * times for n in samples]


def round_to_whole(ideal: Sequence[Fraction], is_absolute: bool = False) -> list[int]:
    """Whole numbers by largest remainder: each is its floor or one more, and all sum to the rounded
    sum of `ideal`.

    Absolute counts are rounded one by one, so that the count of a stream does not depend on the
    other streams.
    """
    half = Fraction(1, 2)
    if is_absolute:
        return [math.floor(number + half) for number in ideal]
    whole = [math.floor(number) for number in ideal]
    largest_first = sorted(range(len(ideal)), key=lambda i: whole[i] - ideal[i])
    for i in largest_first[: math.floor(sum(ideal, half)) - sum(whole)]:
        whole[i] += 1
    return whole


def _refuse_many(
    parts: Shares, ideal: Sequence[Fraction], budget: Budget, unit: Unit, most: Fraction
) -> None:
    """MixRefused where a stream cannot fill its share within max_repeat. The message names the
    scarcest stream and the budget that fits.
    """
    every = [n / max(1, part.samples) for part, n in zip(parts, ideal, strict=True)]
    passes = max(every)
    if passes <= most:
        return
    scarce, step = parts[every.index(passes)], 1 if budget.unit else 1000  # thousandths of a pass
    fits = replace(budget, amount=Fraction(math.floor(budget.amount * most / passes * step), step))
    raise MixRefused(
        f"the share of {scarce.stream}, {percent(scarce.asked)} under a budget of {budget}, comes to "
        f"{float(passes * scarce.size):,.0f} {unit}, and the stream holds {float(scarce.size):,.0f}: "
        f"{float(passes):,.2f} passes an epoch do not fit in max_repeat: {float(most):g}. The largest budget that fits is {fits}; "
        "set that, lower the share, or raise max_repeat."
    )


SHARES = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("choose"),
    Column("passes", "times"),
    Column("share asked", "fine", key="asked"),
    Column("reached", "fine"),
)


def make_shares_table(found: Apportioned) -> Table:
    """A row for each stream: the share asked, and the share that whole samples reach."""
    rows = [
        (
            part.stream,
            part.samples,
            part.choose,
            part.passes,
            float(part.asked),
            about(float(part.reached), part.is_exact),
        )
        for part in found.parts
    ]
    guessed = [part.stream for part in found.parts if not part.is_exact]
    note = f"~ {listed(guessed)}: not counted, taken from the first samples (--estimate)"
    return Table(columns=SHARES, rows=rows, notes=[note] * bool(guessed))


def shares_to_json(found: Apportioned) -> Tree:
    return {
        "count": found.count,
        "is_absolute": found.is_absolute,
        "is_exact": found.is_exact,
        "budget": found.budget and str(found.budget),
        **as_json(make_shares_table(found)),
    }


def describe_shares(found: Apportioned) -> str:
    """The line above the table: the unit of the shares, and the budget."""
    whole = "the budget" if found.is_absolute else "an epoch"
    return f"shares of {whole}'s {found.count}; " + (
        f"budget: {found.budget}"
        if found.budget
        else "no budget: the largest epoch in which no stream is taken more than once"
    )
