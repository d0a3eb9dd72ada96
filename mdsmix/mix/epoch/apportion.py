"""Shares and a budget -> whole samples of each stream, in exact arithmetic.

Manifests count the tokens of a stream, so a share of tokens can be converted to a number of
samples. The number is computed here in fractions and rounded by largest remainder: the same on
every machine. It is rendered as `choose`, since Streaming takes that weight unchanged. It rounds
every other weight down, or gives the samples left over by rounding to random streams. Code that
renders, checks or draws a mix sees only `choose`.
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
    """One stream's share of an epoch: what the recipe asks for, and what whole samples reach.
    `target` is set by `set_target_shares`; `choose` and `reached` are set by `choose_samples`.
    """

    stream: str
    "The stream's name."
    samples: int
    "Samples in the stream."
    share_units: Fraction
    "Mean of the unit of the shares in a sample: its tokens, its trained tokens, or 1."
    budget_units: Fraction
    "Mean of the unit of the budget in a sample."
    is_exact: bool
    "Both means were counted, not estimated from the first samples of the stream."
    written: Fraction | None
    "The share that the recipe gives this stream; None if it gives none."
    target: Fraction = Fraction(0)
    "The share that this stream should have, 0 to 1."
    choose: int = 0
    "Samples that an epoch draws."
    reached: Fraction = Fraction(0)
    "The share that `choose` samples have on average."

    @property
    def size(self) -> Fraction:
        """Units of the whole stream, such as its tokens."""
        return self.samples * self.share_units

    @property
    def passes(self) -> float:
        return self.choose / self.samples if self.samples else 0.0


Shares = tuple[StreamShare, ...]


@dataclass(frozen=True, kw_only=True)
class Apportioned:
    """The shares of a mix as whole samples of its streams."""

    count: Unit
    "The unit that shares count."
    budget: Budget | None
    "If None, the epoch is the largest that takes no stream more than once."
    is_absolute: bool
    "Shares are of the budget and need not sum to 1."
    streams: Shares

    @property
    def is_exact(self) -> bool:
        return all(share.is_exact for share in self.streams)

    def weight(self, stream: str) -> dict[str, int | float]:
        """Return a stream's weight as the recipe gives it: its share, if any, and the budget or
        passes, such as {"share": 0.3, "budget": 1000000}.
        """
        numbers = dict[str, Fraction]()
        written = next(share.written for share in self.streams if share.stream == stream)
        if written is not None:
            numbers["share"] = written
        if self.budget:
            numbers["budget" if self.budget.unit else "passes"] = self.budget.amount
        return {
            name: int(number) if number.denominator == 1 else float(number)
            for name, number in numbers.items()
        }


def set_target_shares(
    shares: Sequence[StreamShare], temperature: Fraction = Fraction(1), is_absolute: bool = False
) -> Shares:
    """Return the shares with `target` set. Streams without a written share divide the remainder
    in proportion to size ** (1 / `temperature`). Targets sum to 1 unless they are absolute.
    """
    # Divide by the largest size, so that no size to be rooted is above 1.
    sizes = [share.size if share.written is None else Fraction(0) for share in shares]
    largest = max(sizes) or 1
    weights = [_root(size / largest, temperature) for size in sizes]
    remainder = 1 - sum(share.written or 0 for share in shares)
    per_weight = remainder / (sum(weights) or Fraction(1))
    targets = [
        per_weight * weight if share.written is None else share.written
        for share, weight in zip(shares, weights, strict=True)
    ]
    total = 1 if is_absolute else sum(targets) or 1
    return tuple(
        replace(share, target=target / total) for share, target in zip(shares, targets, strict=True)
    )


def _root(size: Fraction, temperature: Fraction) -> Fraction:
    """Return size ** (1 / temperature), in 50 digits."""
    if temperature == 1 or not size:
        return size
    power = PRECISE.divide(temperature.denominator, temperature.numerator)
    return Fraction(PRECISE.power(PRECISE.divide(size.numerator, size.denominator), power))


def choose_samples(
    shares: Shares,
    budget: Budget | None,
    unit: Unit,
    max_passes: Fraction,
    is_absolute: bool = False,
) -> Shares:
    """Return the shares with `choose` and `reached` set: how many whole samples an epoch draws of
    each stream, and which share these are.

    Args:
        budget: the size of the epoch. If None, it is the largest that takes no stream more than
            once.
        unit: the unit of the shares, for messages.
        max_passes: how often an epoch may take a stream at most.
        is_absolute: whether the shares are of the budget, and need not sum to 1.

    Raises MixRefused if a stream cannot fill its share, or if its share is less than one sample.
    """
    ideal = compute_ideal_samples(shares, budget, max_passes)
    if budget:
        _refuse_many_passes(shares, ideal, budget, unit, max_passes)
    counts = round_to_whole(ideal, is_absolute)
    reached = list[Fraction]()
    for share, count, exact in zip(shares, counts, ideal, strict=True):
        if share.target and not count:
            raise MixRefused(
                f"the share of {share.stream}, {format_percent(share.target)}, is less than one "
                "sample of "
                f"about {float(share.share_units):,.0f} {unit}: set a larger budget, raise "
                "max_repeat, or give it a larger share."
            )
        # The target in the proportion of whole to ideal samples. If none are ideal, the count is 0.
        reached.append(share.target * count / (exact or 1))
    total = 1 if is_absolute else sum(reached) or 1
    return tuple(
        replace(share, choose=count, reached=amount / total)
        for share, count, amount in zip(shares, counts, reached, strict=True)
    )


def compute_ideal_samples(
    shares: Shares, budget: Budget | None, max_passes: Fraction = Fraction(1)
) -> list[Fraction]:
    """Compute the samples of each stream, unrounded. A budget sets the size of the epoch. Without
    one, it is the largest epoch that takes no stream more than once, nor more than `max_passes`
    times.

    Raises MixRefused if the budget counts passes of a stream whose share is 0.
    """
    # Samples of an epoch of 1 unit, such as 1 token; with absolute shares, of as many units as the
    # shares sum to.
    per_unit = [
        share.target / share.share_units if share.target else Fraction(0) for share in shares
    ]
    if budget is None:
        all_once = min(
            share.samples / samples
            for share, samples in zip(shares, per_unit, strict=True)
            if samples
        )
        units = all_once * min(Fraction(1), max_passes)
    elif budget.unit:
        budgeted = sum(
            samples * share.budget_units for share, samples in zip(shares, per_unit, strict=True)
        )
        # `budgeted` is what the epoch of `per_unit` has of the unit of the budget.
        units = budget.amount * sum(share.target for share in shares) / budgeted
    else:
        # The budget is a number of passes of one stream.
        position = next(i for i, share in enumerate(shares) if share.stream == budget.stream)
        if not per_unit[position]:
            raise MixRefused(
                f"budget is {budget}, and the share of {budget.stream} is 0, so its passes do not "
                "set the size of the other streams: count passes of another stream."
            )
        units = budget.amount * shares[position].samples / per_unit[position]
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
    # By remainder, the largest first: `counts[i] - ideal[i]` is its negative.
    largest_first = sorted(range(len(ideal)), key=lambda i: counts[i] - ideal[i])
    for i in largest_first[: math.floor(sum(ideal, half)) - sum(counts)]:
        counts[i] += 1
    return counts


def _refuse_many_passes(
    shares: Shares, ideal: Sequence[Fraction], budget: Budget, unit: Unit, max_passes: Fraction
) -> None:
    """Raise MixRefused if a stream cannot fill its share within max_repeat. The message names the
    scarcest stream and the largest budget that fits.
    """
    all_passes = [exact / max(1, share.samples) for share, exact in zip(shares, ideal, strict=True)]
    passes = max(all_passes)
    if passes <= max_passes:
        return
    scarcest = shares[all_passes.index(passes)]
    step = 1 if budget.unit else 1000  # thousandths of a pass
    largest = Fraction(math.floor(budget.amount * max_passes / passes * step), step)
    raise MixRefused(
        f"the share of {scarcest.stream}, {format_percent(scarcest.target)} under a budget of "
        f"{budget}, "
        f"comes to {float(passes * scarcest.size):,.0f} {unit}, and the stream has "
        f"{float(scarcest.size):,.0f}: {float(passes):,.2f} passes an epoch exceed "
        f"max_repeat: {float(max_passes):g}. The largest budget that fits is "
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
            share.stream,
            share.samples,
            share.choose,
            share.passes,
            float(share.target),
            mark_estimate(float(share.reached), share.is_exact),
        )
        for share in apportioned.streams
    ]
    estimated = [share.stream for share in apportioned.streams if not share.is_exact]
    notes = list[str]()
    if estimated:
        notes.append(f"~ {join_names(estimated)}: estimated from the first samples (--estimate)")
    return Table(columns=SHARES, rows=rows, notes=notes)


def shares_to_json(apportioned: Apportioned) -> Tree:
    """Return the shares as `--json` prints them."""
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
    budget = "no budget: the largest epoch that takes no stream more than once"
    if apportioned.budget:
        budget = f"budget: {apportioned.budget}"
    return f"shares of {total}'s {apportioned.count}; {budget}"
