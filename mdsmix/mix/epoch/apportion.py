"""Shares and a budget -> whole samples of each stream, in exact arithmetic.

Manifests count the tokens of a stream, so a share of tokens can be converted to a number of
samples. The number is computed here in fractions and rounded by largest remainder, so it is the
same on every machine. It is rendered as the weight `choose`, since Streaming takes that weight
unchanged. Streaming rounds every other weight down, or gives the samples left over by rounding to
random streams. Code that renders, checks or draws a mix sees only `choose`.
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
"""The decimal context in which roots are computed: every machine rounds them alike, unlike powers
of floats. Numbers below 10^-400 become 0.
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
    """What a sample counts for shares, on average: its tokens, its trained tokens, or 1 if shares
    count samples.
    """
    budget_units: Fraction
    "What a sample counts for the budget, on average. Budget and shares may have different units."
    is_exact: bool
    "`share_units` and `budget_units` were counted, not estimated from the stream's first samples."
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
        """The size of the whole stream in the unit that shares count, such as all its tokens."""
        return self.samples * self.share_units

    @property
    def passes(self) -> float:
        """How often an epoch draws each sample of the stream, on average."""
        return self.choose / self.samples if self.samples else 0.0


Shares = tuple[StreamShare, ...]


@dataclass(frozen=True, kw_only=True)
class Apportioned:
    """The streams of a mix with their shares of an epoch, and how many whole samples an epoch draws
    of each stream to reach its share.
    """

    count: Unit
    "The unit that shares count, such as `tokens`."
    budget: Budget | None
    "The size of the epoch. If None, the epoch is the largest that takes no stream more than once."
    is_absolute: bool
    "Shares are shares of the budget, and need not sum to 1."
    streams: Shares

    @property
    def is_exact(self) -> bool:
        return all(share.is_exact for share in self.streams)

    def weight(self, stream: str) -> dict[str, int | float]:
        """Return the keys of the recipe that decide how many samples are drawn from a stream: its
        share if the recipe gives it one, and the recipe's budget or number of passes. Examples are
        {"share": 0.3, "budget": 1000000} and {"share": 0.3, "passes": 2}.

        Args:
            stream: the stream's name.
        """
        numbers = dict[str, Fraction]()
        written_shares = {share.stream: share.written for share in self.streams}
        written = written_shares[stream]
        if written is not None:
            numbers["share"] = written
        if self.budget and self.budget.unit:
            numbers["budget"] = self.budget.amount
        elif self.budget:
            numbers["passes"] = self.budget.amount
        weight = dict[str, int | float]()
        for name, number in numbers.items():
            is_whole = number.denominator == 1
            weight[name] = int(number) if is_whole else float(number)
        return weight


def set_target_shares(
    shares: Sequence[StreamShare], temperature: Fraction = Fraction(1), is_absolute: bool = False
) -> Shares:
    """Return the shares with `target` set: the share of an epoch, 0 to 1, that each stream should
    have.

    A stream whose share is written in the recipe gets that share. The other streams divide what
    remains in proportion to size ** (1 / temperature), where size is, for example, the stream's
    tokens. Targets sum to 1, unless shares are absolute.

    Args:
        temperature: 1 gives each stream a share in proportion to its size; a higher temperature
            makes the shares more alike.
        is_absolute: whether a share is a part of the budget by itself, so that shares need not sum
            to 1.
    """
    # Divide sizes by the largest size, so that roots are of numbers up to 1.
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
    """Return size ** (1 / temperature), computed in 50 digits."""
    if temperature == 1 or not size:
        return size
    exponent = PRECISE.divide(temperature.denominator, temperature.numerator)
    base = PRECISE.divide(size.numerator, size.denominator)
    return Fraction(PRECISE.power(base, exponent))


def choose_samples(
    shares: Shares,
    budget: Budget | None,
    unit: Unit,
    max_passes: Fraction,
    is_absolute: bool = False,
) -> Shares:
    """Return the shares with `choose` and `reached` set: how many whole samples an epoch draws of
    each stream, and which share of the epoch these samples are.

    Args:
        shares: the shares with `target` set.
        budget: the size of the epoch. If None, the epoch is the largest that takes no stream more
            than once.
        unit: what shares count, such as `tokens`; for messages.
        max_passes: how often an epoch may take a stream at most.
        is_absolute: whether a share is a part of the budget by itself, so that shares need not sum
            to 1.

    Raises MixRefused if a stream has too few samples for its share, or if its share is less than
    one sample.
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
                f"sample of about {float(share.share_units):,.0f} {unit}: set a larger budget, "
                "raise max_repeat, or give the stream a larger share."
            )
        # The share that is reached is to the target as the whole samples are to the exact number.
        reached.append(share.target * count / exact if exact else Fraction(0))
    total = 1 if is_absolute else sum(reached) or 1
    return tuple(
        replace(share, choose=count, reached=amount / total)
        for share, count, amount in zip(shares, counts, reached, strict=True)
    )


def compute_ideal_samples(
    shares: Shares, budget: Budget | None, max_passes: Fraction = Fraction(1)
) -> list[Fraction]:
    """Compute how many samples of each stream an epoch draws, as fractions that are not rounded
    yet.

    Raises MixRefused if the budget is a number of passes of a stream, such as `2 passes of web`,
    and the share of this stream is 0.

    Args:
        shares: the shares with `target` set.
        budget: the size of the epoch. If None, the epoch is the largest that takes no stream more
            than once.
        max_passes: only for an epoch without a budget, and only if below 1: the part of a stream
            that an epoch may take at most.
    """
    # The samples in an epoch of 1 unit, such as 1 token. With absolute shares, in an epoch of as
    # many units as the shares sum to. `units` below is how much larger the epoch is.
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
        position = [share.stream for share in shares].index(str(budget.stream))
        if not per_unit[position]:
            raise MixRefused(
                f"budget is {budget}, but the share of {budget.stream} is 0, so passes of that "
                "stream give no size of the epoch: write a budget in passes of another stream, or "
                "in tokens."
            )
        units = budget.amount * shares[position].samples / per_unit[position]
    return [samples * units for samples in per_unit]


def round_to_whole(ideal: Sequence[Fraction], is_absolute: bool = False) -> list[int]:
    """Round numbers of samples to whole numbers that sum to the rounded sum of `ideal`.

    Each number is rounded down, and the numbers with the largest remainders get one more: 1.5, 2.2
    and 0.3 become 2, 2 and 0. With `is_absolute` each number is rounded by itself, so that the
    samples of a stream do not depend on the other streams.
    """
    half = Fraction(1, 2)
    if is_absolute:
        return [math.floor(number + half) for number in ideal]
    counts = [math.floor(number) for number in ideal]
    # The positions of the numbers, the largest remainder first. `counts[i] - ideal[i]` is the
    # negative of the remainder.
    largest_first = sorted(range(len(ideal)), key=lambda i: counts[i] - ideal[i])
    rounded_sum = math.floor(sum(ideal) + half)
    left_over = rounded_sum - sum(counts)
    for i in largest_first[:left_over]:
        counts[i] += 1
    return counts


def _refuse_many_passes(
    shares: Shares, ideal: Sequence[Fraction], budget: Budget, unit: Unit, max_passes: Fraction
) -> None:
    """Raise MixRefused if an epoch would take a stream more than `max_passes` times. The message
    names the scarcest stream and the largest budget that fits.

    Args:
        ideal: how many samples of each stream an epoch draws, before rounding.
    """
    all_passes = [exact / max(1, share.samples) for share, exact in zip(shares, ideal, strict=True)]
    passes = max(all_passes)
    if passes <= max_passes:
        return
    scarcest = shares[all_passes.index(passes)]
    # Round the largest budget down: to a whole unit, or to a thousandth of a pass.
    parts = 1 if budget.unit else 1000
    amount = Fraction(math.floor(budget.amount * max_passes / passes * parts), parts)
    raise MixRefused(
        f"the share of {scarcest.stream}, {format_percent(scarcest.target)} under a budget of "
        f"{budget}, comes to {float(passes * scarcest.size):,.0f} {unit}, but the stream has only "
        f"{float(scarcest.size):,.0f} {unit}. An epoch would read it {float(passes):,.2f} times, "
        f"and max_repeat allows {float(max_passes):g}. The largest budget that fits is "
        f"{replace(budget, amount=amount)}; set this budget, lower the share, or raise max_repeat."
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
            mark_estimate(float(share.reached), is_exact=share.is_exact),
        )
        for share in apportioned.streams
    ]
    estimated = [share.stream for share in apportioned.streams if not share.is_exact]
    notes = list[str]()
    if estimated:
        notes.append(f"~ {join_names(estimated)}: estimated from the first samples (--estimate)")
    return Table(columns=SHARES, rows=rows, notes=notes)


def shares_to_json(apportioned: Apportioned) -> Tree:
    """Return the shares as `--json` prints them: unit, budget, and a row for each stream."""
    return {
        "count": apportioned.count,
        "is_absolute": apportioned.is_absolute,
        "is_exact": apportioned.is_exact,
        "budget": str(apportioned.budget) if apportioned.budget else None,
        **table_to_json(make_shares_table(apportioned)),
    }


def describe_shares(apportioned: Apportioned) -> str:
    """Return the line above the table of shares: it names the unit of shares and the budget."""
    total = "the budget" if apportioned.is_absolute else "an epoch"
    budget = "no budget: the largest epoch that takes no stream more than once"
    if apportioned.budget:
        budget = f"budget: {apportioned.budget}"
    return f"shares of {total}'s {apportioned.count}; {budget}"
