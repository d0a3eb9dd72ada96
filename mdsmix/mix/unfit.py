"""Shares that the data cannot give: each refused in one sentence, with the numbers and what would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.mix.apportion import MeasuredStream, reached, rounded
from mdsmix.recipe.budget import Budget, Unit
from mdsmix.words import does, listed

NEAR = Fraction(1, 1000)
"A tenth of a percentage point: how far from the share that was asked for whole samples may be."


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedShares:
    """What is asked of the streams; lists go by stream."""

    unit: Unit
    "What the shares are of."
    budget: Budget | None
    max_repeat: Fraction
    is_absolute: bool
    streams: Sequence[MeasuredStream]
    shares: Sequence[Fraction]
    ideal: Sequence[Fraction]
    "Samples an epoch, before they are rounded."

    @property
    def whole(self) -> Fraction:
        """What the shares are parts of, in their unit."""
        drawn = zip(self.ideal, self.streams, strict=True)
        return sum((n * s.counted for n, s in drawn), Fraction(0)) / sum(self.shares)

    def of_about(self, stream: MeasuredStream) -> str:
        return (
            "" if self.unit == "samples" else f" of about {float(stream.counted):,.0f} {self.unit}"
        )


def refuse_few(wanted: WantedShares) -> None:
    """An epoch of less than one sample."""
    budget = wanted.budget
    if budget is None or sum(wanted.ideal, Fraction(0)) >= 1:
        return
    drawn = [s.budgeted for s, n in zip(wanted.streams, wanted.ideal, strict=True) if n]
    holds = f" (a sample holds about {float(min(drawn)):,.0f} or more)"
    raise MixRefused(
        f"budget is {budget}, less than one sample{holds if 'tokens' in (budget.unit or '') else ''}: nothing would be drawn; "
        f"{_way_out(wanted)}."
    )


def refuse_many(wanted: WantedShares) -> None:
    """A share that the stream cannot fill within max_repeat; the scarcest is told, and what fits all."""
    passes = {s.name: n / s.samples for s, n in zip(wanted.streams, wanted.ideal, strict=True) if n}
    over = sorted((n for n in passes if passes[n] > wanted.max_repeat), key=lambda n: -passes[n])
    if not over or wanted.budget is None:
        return
    at = next(i for i, s in enumerate(wanted.streams) if s.name == over[0])
    scarce, fits = wanted.streams[at], wanted.budget.amount * wanted.max_repeat / passes[over[0]]
    others = f" (nor {does(over[1:])} {listed(over[1:])})" if over[1:] else ""
    raise MixRefused(
        f"the share of {scarce.name}, {percent(wanted.shares[at])} under a budget of {wanted.budget}, comes to "
        f"{float(wanted.ideal[at] * scarce.counted):,.0f} {wanted.unit}, and the stream holds {float(scarce.size):,.0f}: "
        f"{float(passes[scarce.name]):,.2f} passes an epoch do not fit in max_repeat: {float(wanted.max_repeat):g}{others}. The largest "
        f"budget that fits is {_floored(fits, wanted.budget)}; set that, lower the share, or raise max_repeat."
    )


def _floored(amount: Fraction, budget: Budget) -> str:
    """Rounded down, so that it fits: to whole tokens or samples, to thousandths of a pass."""
    step = _parts(budget)
    return _said(Fraction(math.floor(amount * step), step), budget)


def refuse_counts(wanted: WantedShares, chosen: Sequence[int], got: Sequence[Fraction]) -> None:
    """Shares that whole samples are far from: an epoch of few samples, or of long ones."""
    for stream, share, n in zip(wanted.streams, wanted.shares, chosen, strict=True):
        if share and not n:
            raise MixRefused(
                f"the share of {stream.name}, {percent(share)}, rounds to 0 of its samples{wanted.of_about(stream)}, so that it would "
                f"never be drawn: give it a larger share, or {_way_out(wanted)}."
            )
    far = [abs(one - other) for one, other in zip(got, wanted.shares, strict=True)]
    worst = max(range(len(far)), key=far.__getitem__)
    if far[worst] > NEAR:
        raise MixRefused(_far(wanted, chosen, got, worst))


def _far(wanted: WantedShares, chosen: Sequence[int], got: Sequence[Fraction], at: int) -> str:
    stream = wanted.streams[at]
    come = ", ".join(f"{s.name} {percent(g)}" for s, g in zip(wanted.streams, got, strict=True))
    return (
        f"the share of {stream.name} is to be {percent(wanted.shares[at])}, and the nearest whole number of samples, "
        f"{chosen[at]:,}{wanted.of_about(stream)}, comes to {percent(got[at])}, more than 0.1 percentage points away: an epoch has "
        f"too few samples; {_way_out(wanted)}, or ask for what these samples come to ({come})."
    )


def _way_out(wanted: WantedShares) -> str:
    """The nearest budget that is not refused when it is given, a larger one before a smaller one; where max_repeat leaves none, that."""
    budget = wanted.budget or Budget(amount=wanted.whole, unit=wanted.unit)
    most = min(
        wanted.max_repeat * s.samples / n
        for n, s in zip(wanted.ideal, wanted.streams, strict=True)
        if n
    )
    step = _parts(budget)
    for times in _nearest_first(sum(wanted.ideal, Fraction(0)), most):
        amount = Fraction(math.ceil(times * budget.amount * step), step)
        if _fits(wanted, amount / budget.amount, most):
            return f"set budget: {_said(amount, budget)}"
    return f"raise max_repeat: {float(wanted.max_repeat):g}, within which no budget gives every stream its share"


def _nearest_first(samples: Fraction, most: Fraction) -> Iterator[Fraction]:
    """Factors of a budget whose epoch draws so many samples, as epochs of whole samples have them: up to `most`, then down to one sample.
    A twentieth of the distance is skipped, so that a thousandfold budget is reached in some 200 steps."""
    for start, sign in ((math.ceil(samples), 1), (math.floor(samples), -1)):
        distance = 0
        while 1 <= start + sign * distance <= samples * most:
            yield (start + sign * distance) / samples
            distance += 1 + distance // 20
        if sign > 0:
            yield most


def _fits(wanted: WantedShares, times: Fraction, most: Fraction) -> bool:
    if times > most:
        return False
    chosen = rounded([n * times for n in wanted.ideal], wanted.is_absolute)
    got = reached(chosen, wanted.streams, wanted.whole * times if wanted.is_absolute else None)
    each = zip(wanted.shares, chosen, got, strict=True)
    return all(bool(n) == bool(share) and abs(came - share) <= NEAR for share, n, came in each)


def _parts(budget: Budget) -> int:
    """Into how many a unit of the budget is divided at most."""
    return 1 if budget.unit else 1000


def _said(amount: Fraction, budget: Budget) -> str:
    unit = budget.unit or f"passes of {budget.stream}"
    return f"{float(amount):,.3f} {unit}" if budget.stream else f"{math.floor(amount):,} {unit}"


def percent(share: Fraction) -> str:
    """With two digits behind the point, three digits where it is small."""
    return f"{float(share):.2%}" if share >= Fraction(1, 1000) else f"{float(100 * share):.3g}%"
