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
from dataclasses import replace
from decimal import Context
from fractions import Fraction
from typing import NoReturn

from mdsmix.errors import MixRefused
from mdsmix.frozen import frozen
from mdsmix.messages import format_percent, join_names, plural
from mdsmix.recipe.amounts import Budget, Unit
from mdsmix.table import Column, Table, Tree, mark_estimate, table_to_json

PRECISE = Context(prec=50, Emin=-400, Emax=400)
"""Roots are computed with decimals of 50 digits: every machine rounds them alike, unlike powers of
floats. Numbers below 10^-400 become 0.
"""


@frozen(kw_only=True)
class StreamShare:
    """One stream's share of an epoch: what the recipe asks for, and what whole samples reach.
    `target` is set by `set_target_shares`; `unlimited`, `choose` and `reached` are set by
    `choose_epoch_samples`.
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
    max_passes: Fraction
    "How often an epoch, or all phases so far together, may draw each sample (`max_repeat`)."
    drawn_before: int = 0
    "Samples that earlier phases draw, counted as often as they are drawn."
    target: Fraction = Fraction(0)
    "The share that this stream should have, 0 to 1."
    unlimited: Fraction = Fraction(0)
    "Samples of an epoch that gives every stream its target, whatever `max_passes` is; not rounded."
    choose: int = 0
    "Samples that an epoch draws."
    reached: Fraction = Fraction(0)
    "The share that `choose` samples have on average."

    @property
    def size(self) -> Fraction:
        """The size of the whole stream in the unit that shares count, such as all its tokens."""
        return self.samples * self.share_units

    @property
    def max_samples(self) -> int:
        """The most samples that an epoch may draw of the stream, after those of earlier phases."""
        return max(0, math.floor(self.max_passes * self.samples) - self.drawn_before)

    @property
    def is_used_up(self) -> bool:
        """Whether earlier phases draw all that max_repeat allows."""
        return bool(self.drawn_before) and not self.max_samples

    @property
    def passes(self) -> float:
        """How often an epoch draws each sample of the stream, on average."""
        return self.choose / self.samples if self.samples else 0.0


Shares = tuple[StreamShare, ...]


@frozen(kw_only=True)
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

    @property
    def limited(self) -> Shares:
        """The streams that get less than their share, since max_repeat limits them. Empty without
        a budget, since no stream is repeated then, and for absolute shares, which are refused.
        """
        if self.budget is None or self.is_absolute:
            return ()
        return tuple(
            share
            for share in self.streams
            if share.unlimited > share.max_samples and share.stream != self.budget.stream
        )

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
    # Weigh the streams without a written share. Divide sizes by the largest size, so that roots are
    # of numbers up to 1.
    sizes = [share.size if share.written is None else Fraction(0) for share in shares]
    largest = max(sizes) or 1
    weights = [_take_root(size / largest, temperature) for size in sizes]

    # Divide what the written shares leave by these weights.
    remainder = 1 - sum(share.written or 0 for share in shares)
    per_weight = remainder / (sum(weights) or Fraction(1))
    targets = list[Fraction]()
    for share, weight in zip(shares, weights, strict=True):
        targets.append(per_weight * weight if share.written is None else share.written)

    total = Fraction(1)
    if not is_absolute:
        total = sum(targets, Fraction(0)) or total
    return tuple(
        replace(share, target=target / total) for share, target in zip(shares, targets, strict=True)
    )


def _take_root(size: Fraction, temperature: Fraction) -> Fraction:
    """Return size ** (1 / temperature), computed in 50 digits."""
    if temperature == 1 or not size:
        return size
    exponent = PRECISE.divide(temperature.denominator, temperature.numerator)
    base = PRECISE.divide(size.numerator, size.denominator)
    return Fraction(PRECISE.power(base, exponent))


def choose_epoch_samples(
    shares: Shares, budget: Budget | None, unit: Unit, is_absolute: bool = False
) -> Shares:
    """Return the shares with `unlimited`, `choose` and `reached` set: how many whole samples an
    epoch draws of each stream, and which share of the epoch these samples are.

    If a share needs more than `max_passes` over its stream, the missing part goes to the other
    streams, in proportion to their shares.

    Args:
        shares: the shares with `target` set.
        budget: the size of the epoch. If None, the epoch is the largest that takes no stream more
            than once.
        unit: what shares count, such as `tokens`; for messages.
        is_absolute: whether a share is a part of the budget by itself, so that shares need not sum
            to 1. Then a share that needs more passes is refused.

    Raises MixRefused if the streams have too few samples for the budget, or if a share is less than
    one sample.
    """
    unlimited = compute_ideal_samples(shares, budget)
    limited = unlimited
    if budget and is_absolute:
        _refuse_many_passes(shares, unlimited, budget, unit)
    elif budget:
        limited = limit_passes(shares, unlimited, budget, unit)
    counts = round_to_whole(limited, is_absolute)

    # What the samples of each stream count for shares: reached shares are in proportion to it.
    sizes = list[Fraction]()
    for share, count in zip(shares, counts, strict=True):
        sizes.append(count * share.share_units if share.target else Fraction(0))
    total = sum(sizes) or Fraction(1)
    chosen = list[StreamShare]()
    for share, exact, count, size in zip(shares, unlimited, counts, sizes, strict=True):
        if share.target and not count and not share.is_used_up:
            raise MixRefused(
                f"the share of {share.stream}, {format_percent(share.target)}, is less than one "
                f"sample of the stream, which has about {float(share.share_units):,.0f} {unit}: "
                "set a larger budget, raise max_repeat, or give the stream a larger share."
            )
        reached = size / total
        if is_absolute and exact:
            # An absolute share is a part of the budget, and not of what the streams have together.
            reached = share.target * count / exact
        chosen.append(replace(share, unlimited=exact, choose=count, reached=reached))
    return tuple(chosen)


def limit_passes(
    shares: Shares, unlimited: Sequence[Fraction], budget: Budget, unit: Unit
) -> list[Fraction]:
    """Return how many samples of each stream an epoch draws, not rounded yet, if none may be drawn
    more than `max_samples`. What a stream cannot fill goes to the others, in proportion to their
    shares, so the epoch has the size of its budget. If the budget counts passes of a stream, that
    stream keeps its passes.

    With equal shares this is UniMax (Chung et al. 2023, arXiv 2304.09151).

    Args:
        shares: the shares with `target` set.
        unlimited: the samples of each stream if `max_passes` did not limit them.
        unit: what shares count, such as `tokens`; for messages.

    Raises MixRefused if all streams together have too few samples.
    """
    sizes = list_budget_sizes(shares, budget)
    total = _sum_products(unlimited, sizes)
    settled = dict[int, Fraction]()  # position of a stream -> its samples
    if budget.stream:
        position = [share.stream for share in shares].index(budget.stream)
        _refuse_many_passes([shares[position]], [unlimited[position]], budget, unit)
        settled[position] = unlimited[position]
    drawn = list(unlimited)
    while True:
        too_many = [
            i for i, count in enumerate(drawn) if count > shares[i].max_samples and i not in settled
        ]
        if not too_many:
            return drawn
        for i in too_many:
            settled[i] = Fraction(shares[i].max_samples)
            drawn[i] = settled[i]
        # Divide the remainder of the budget among the streams that are not settled. They can then
        # reach their own limits, so this is repeated.
        unsettled = [
            i for i, count in enumerate(unlimited) if count * sizes[i] and i not in settled
        ]
        if not unsettled:
            _refuse_large_budget(shares, unlimited, budget, unit)
        remainder = total - sum(count * sizes[i] for i, count in settled.items())
        unlimited_size = sum(unlimited[i] * sizes[i] for i in unsettled)
        for i in unsettled:
            drawn[i] = unlimited[i] * remainder / unlimited_size


def list_budget_sizes(shares: Shares, budget: Budget) -> list[Fraction]:
    """Return what a sample of each stream counts for the budget. A budget of passes has the unit of
    the shares.
    """
    return [share.budget_units if budget.unit else share.share_units for share in shares]


def _sum_products(numbers: Sequence[Fraction], sizes: Sequence[Fraction]) -> Fraction:
    """Return the sum of the products of two sequences."""
    products = [number * size for number, size in zip(numbers, sizes, strict=True)]
    return sum(products, Fraction(0))


def compute_ideal_samples(shares: Shares, budget: Budget | None) -> list[Fraction]:
    """Compute how many samples of each stream an epoch draws to have exactly the target shares, as
    fractions that are not rounded yet.

    Raises MixRefused if the budget is a number of passes of a stream, such as `2 passes of web`,
    and the share of this stream is 0.

    Args:
        shares: the shares with `target` set.
        budget: the size of the epoch. If None, the epoch is the largest that takes no stream more
            than once, or more than its `max_passes` if these are below 1.
    """
    # The samples in an epoch of 1 unit, such as 1 token. With absolute shares, in an epoch of as
    # many units as the shares sum to. `units` below is how much larger the epoch is.
    per_unit = [
        share.target / share.share_units if share.target else Fraction(0) for share in shares
    ]
    if budget is None:
        units = min(
            share.samples * min(Fraction(1), share.max_passes) / samples
            for share, samples in zip(shares, per_unit, strict=True)
            if samples
        )
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
                f"budget: {budget} counts how often an epoch reads stream {budget.stream}, but the "
                f"share of {budget.stream} is 0, so this budget gives no size of the epoch: name "
                "another stream in the budget, or write the budget in tokens."
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
    shares: Sequence[StreamShare], ideal: Sequence[Fraction], budget: Budget, unit: Unit
) -> None:
    """Raise MixRefused if an epoch would take a stream more than `max_passes` times. The message
    names the scarcest stream and the largest budget that fits.

    Args:
        ideal: how many samples of each stream an epoch draws, before rounding.
    """
    # How much of each share max_repeat allows, as a fraction: below 1 the budget is too large.
    allowed = list[Fraction]()
    for share, exact in zip(shares, ideal, strict=True):
        most_samples = share.max_passes * max(1, share.samples) - share.drawn_before
        allowed.append(most_samples / exact if exact else Fraction(1))
    smallest = max(Fraction(0), min(allowed))
    if smallest >= 1:
        return
    position = allowed.index(min(allowed))
    scarcest = shares[position]
    passes = (ideal[position] + scarcest.drawn_before) / max(1, scarcest.samples)
    reader = "This phase and those before it" if scarcest.drawn_before else "An epoch"
    remedy = "lower the share, or raise max_repeat"
    if smallest:
        largest = _round_down(budget, budget.amount * smallest)
        remedy = f"the largest budget that fits is {largest}; set this budget, {remedy}"
    raise MixRefused(
        f"the share of {scarcest.stream}, {format_percent(scarcest.target)} under a budget of "
        f"{budget}, comes to {float(ideal[position] * scarcest.share_units):,.0f} {unit}, but the "
        f"stream has only {float(scarcest.size):,.0f} {unit}. {reader} would read it "
        f"{float(passes):,.2f} times, and max_repeat allows {float(scarcest.max_passes):g}. "
        f"{remedy[0].upper()}{remedy[1:]}."
    )


def _refuse_large_budget(
    shares: Shares, unlimited: Sequence[Fraction], budget: Budget, unit: Unit
) -> NoReturn:
    """Raise MixRefused, since no stream can take more. The message has what each stream can give at
    most, and the largest budget that fits.

    Args:
        unlimited: the samples of each stream if `max_passes` did not limit them.
    """
    sizes = list_budget_sizes(shares, budget)
    noun = budget.unit or unit
    reader = "an epoch"
    if any(share.drawn_before for share in shares):
        reader = "after the earlier phases this phase"
    maxima = list[str]()
    possible = Fraction(0)
    fixed = Fraction(0)  # size of the stream whose passes set the budget
    for share, count, size in zip(shares, unlimited, sizes, strict=True):
        if share.stream == budget.stream:
            fixed = count * size
        elif share.target:
            possible += share.max_samples * size
            maxima.append(f"{share.stream} {float(share.max_samples * size):,.0f}")
    amount = possible
    if budget.stream:
        # A budget in passes: what the other streams must fill is in proportion to the passes.
        amount = budget.amount * possible / (_sum_products(unlimited, sizes) - fixed)
    remedy = "Raise max_repeat, or add data."
    largest = _round_down(budget, amount)
    if largest.amount:
        remedy = (
            f"The largest budget that fits is {largest}; set this budget, raise max_repeat, or add "
            "data."
        )
    raise MixRefused(
        f"the streams are too small for a budget of {budget}: within max_repeat {reader} can draw "
        f"at most {', '.join(maxima)} {noun}. {remedy}"
    )


def _round_down(budget: Budget, amount: Fraction) -> Budget:
    """Return the budget with an amount rounded down: to a whole unit, or to a thousandth of a
    pass.
    """
    parts = 1 if budget.unit else 1000
    return replace(budget, amount=Fraction(math.floor(amount * parts), parts))


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
    notes = describe_redistribution(apportioned)
    if estimated:
        notes.append(f"~ {join_names(estimated)}: estimated from the first samples (--estimate)")
    return Table(columns=SHARES, rows=rows, notes=notes)


def describe_redistribution(apportioned: Apportioned) -> list[str]:
    """Return a line for each stream that gets less than its share, since max_repeat limits it, and
    a line on the streams that get the rest. Empty if every stream gets its share.
    """
    budget = apportioned.budget
    limited = apportioned.limited
    if budget is None or not limited:
        return []
    unit = budget.unit or apportioned.count
    sizes = list_budget_sizes(apportioned.streams, budget)
    lines = list[str]()
    gains = list[str]()
    left_over = 0.0
    for share, size in zip(apportioned.streams, sizes, strict=True):
        gain = float((share.choose - share.unlimited) * size)
        if share in limited:
            left_over -= gain
            before = ""
            if share.drawn_before:
                before = f" (earlier phases draw {plural(share.drawn_before, 'sample')})"
            lines.append(
                f"{share.stream} is limited by max_repeat {float(share.max_passes):g}{before}: it "
                f"gives {float(share.choose * size):,.0f} {unit} of the "
                f"{float(share.unlimited * size):,.0f} {unit} of its share ({share.choose:,} of "
                f"{float(share.unlimited):,.0f} samples)"
            )
        elif share.target and share.stream != budget.stream:
            gains.append(f"{share.stream} ({gain:+,.0f})")
    lines.append(
        f"the other {left_over:,.0f} {unit} go to the other streams, in whole samples and in "
        f"proportion to their shares: {', '.join(gains)}"
    )
    return lines


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
