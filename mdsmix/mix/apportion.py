"""Shares and a budget -> whole numbers of samples, in exact arithmetic.

Streaming rounds every other weight down, or hands what is left over to streams drawn at random; `choose` is the one number that
it takes as it stands. So a stream's samples are worked out here, in fractions, and rounded by largest remainder: the same counts
on every machine, and no stream is further from its share than one sample. Nothing here opens a stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context
from fractions import Fraction

from mdsmix.recipe.budget import Unit

PRECISE = Context(prec=50, Emin=-400, Emax=400)
"For roots: rounded alike on every machine, which a float's power is not. Below 10^-400 is 0."


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStream:
    """A stream, as far as its count depends on it."""

    name: str
    samples: int
    counted: Fraction
    "What shares count, a sample on average: its tokens, its trained tokens, or 1."
    budgeted: Fraction
    "The same of what the budget counts."
    is_exact: bool = True
    "Both were counted; else the first samples of the stream say it."
    adds_eos: bool = False
    "The loader ends answers by an EOS that the stream does not hold, and it is counted."

    @property
    def size(self) -> Fraction:
        return self.samples * self.counted


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShare:
    """What an epoch draws of one stream."""

    stream: str
    samples: int
    "In the stream."
    choose: int
    "Samples an epoch."
    asked: float
    "The share that was asked for, 0 to 1."
    reached: float
    "What that many samples come to on average."
    is_exact: bool
    adds_eos: bool
    "As in MeasuredStream."
    weight: Mapping[str, int | float]
    "As the recipe gives it: its share, where it has one, and the budget."

    @property
    def passes(self) -> float:
        return self.choose / self.samples if self.samples else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Apportioned:
    """The mix that shares come to."""

    count: Unit
    "What the shares are of."
    budget: str | None
    "As the recipe gives it; None: the largest epoch in which no stream is taken more than once."
    is_absolute: bool
    is_fixed: bool
    "Each epoch draws the same samples of a partial pass."
    parts: tuple[StreamShare, ...]

    @property
    def is_exact(self) -> bool:
        return all(part.is_exact for part in self.parts)

    def unseen(self, part: StreamShare, epochs: int) -> float:
        """The fraction of a stream's samples that so many epochs do not draw once, on average."""
        left = max(0.0, 1 - part.passes)
        return left if self.is_fixed else left**epochs


def shares(
    written: Mapping[str, Fraction | None],
    streams: Sequence[MeasuredStream],
    temperature: Fraction = Fraction(1),
    is_absolute: bool = False,
) -> dict[str, Fraction]:
    """Each stream's share, in the order of `streams`. What the written ones leave goes to the others as their size to the power
    of 1 / `temperature`; unless they are absolute, all sum to 1. ValueError where nothing has a share."""
    given = {s.name: share for s in streams if (share := written.get(s.name)) is not None}
    others = [s for s in streams if s.name not in given]
    left = 1 - sum(given.values(), Fraction(0))
    parts = dict(zip([s.name for s in others], _parts(others, temperature), strict=True))
    found = {s.name: given[s.name] if s.name in given else left * parts[s.name] for s in streams}
    total = sum(found.values(), Fraction(0))
    if not total:
        raise ValueError("the shares sum to 0")
    return found if is_absolute else {name: share / total for name, share in found.items()}


def _parts(streams: Sequence[MeasuredStream], temperature: Fraction) -> list[Fraction]:
    """Of what is left, each stream's part; sums to 1 where any of them holds something."""
    largest = max((s.size for s in streams), default=Fraction(0))
    weights = [_root(s.size / largest, temperature) if largest else s.size for s in streams]
    return [weight / (sum(weights) or 1) for weight in weights]


def _root(size: Fraction, temperature: Fraction) -> Fraction:
    if temperature == 1 or not size:
        return size
    power = PRECISE.divide(temperature.denominator, temperature.numerator)
    return Fraction(PRECISE.power(PRECISE.divide(size.numerator, size.denominator), power))


def rounded(ideal: Sequence[Fraction], is_absolute: bool = False) -> list[int]:
    """Whole numbers that sum to the rounded sum of `ideal`, each its floor or one more, by largest remainder.

    Absolute ones are rounded each by itself, so that a stream's count does not depend on which others there are.
    """
    if is_absolute:
        return [_nearest(number) for number in ideal]
    whole = [math.floor(number) for number in ideal]
    left = _nearest(sum(ideal, Fraction(0))) - sum(whole)
    by_remainder = sorted(range(len(ideal)), key=lambda i: (whole[i] - ideal[i], i))
    for i in by_remainder[:left]:
        whole[i] += 1
    return whole


def _nearest(number: Fraction) -> int:
    return math.floor(number + Fraction(1, 2))


def of_budget(
    asked: Mapping[str, Fraction], streams: Sequence[MeasuredStream], budget: Fraction
) -> list[Fraction]:
    """Samples of each stream, unrounded, of an epoch that holds `budget`; absolute shares are of the budget itself."""
    drawn = [_samples(asked[s.name], s) for s in streams]
    held = sum((n * s.budgeted for n, s in zip(drawn, streams, strict=True)), Fraction(0))
    # In one unit, an epoch of 1 holds what the shares sum to: 1, or of absolute ones a part.
    whole = held / (sum(asked.values(), Fraction(0)) or 1)
    return [n * budget / whole for n in drawn]


def of_epoch(
    asked: Mapping[str, Fraction], streams: Sequence[MeasuredStream], passes: Fraction
) -> list[Fraction]:
    """The same of the largest epoch in which no stream is passed over more often."""
    drawn = [_samples(asked[s.name], s) for s in streams]
    fits = [passes * s.samples / n for n, s in zip(drawn, streams, strict=True) if n]
    return [n * min(fits) for n in drawn]


def of_passes(
    asked: Mapping[str, Fraction], streams: Sequence[MeasuredStream], passes: Fraction, over: str
) -> list[Fraction]:
    """The same of an epoch that passes so often over the stream `over`."""
    drawn = {s.name: _samples(asked[s.name], s) for s in streams}
    samples = next(s.samples for s in streams if s.name == over)
    return [n * passes * samples / drawn[over] for n in drawn.values()]


def _samples(share: Fraction, stream: MeasuredStream) -> Fraction:
    """Samples of an epoch of 1 of what is counted."""
    return share / stream.counted if share else Fraction(0)


def reached(
    chosen: Sequence[int], streams: Sequence[MeasuredStream], of: Fraction | None = None
) -> list[Fraction]:
    """The shares that whole samples come to: of all of them, or, absolute, of `of`."""
    held = [n * s.counted for n, s in zip(chosen, streams, strict=True)]
    total = of or sum(held, Fraction(0)) or Fraction(1)
    return [each / total for each in held]
