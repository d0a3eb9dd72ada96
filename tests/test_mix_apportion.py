"""Shares become whole samples as exact fractions say, by largest remainder; the oracle is arithmetic, not the code.

Hypothesis draws streams of very unequal sizes and means; what must hold is checked against the definition.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.errors import MixRefused
from mdsmix.mix.apportion import (
    MeasuredStream,
    of_budget,
    of_epoch,
    of_passes,
    reached,
    rounded,
    shares,
)
from mdsmix.mix.unfit import WantedShares, refuse_counts, refuse_few, refuse_many
from mdsmix.recipe.budget import Budget, Unit, read_budget

PARTS = st.fractions(min_value=0, max_value=10**6, max_denominator=10**4)
SHARES = st.fractions(min_value=Fraction(1, 1000), max_value=5, max_denominator=1000)
FEW = settings(max_examples=60, deadline=None)


@st.composite
def streams(draw: st.DrawFn) -> list[MeasuredStream]:
    """One to five streams, each of 1 to 10^6 samples of 1 to 4,096 tokens on average."""
    count = draw(st.integers(1, 5))
    return [_stream(draw, f"s{i}") for i in range(count)]


def _stream(draw: st.DrawFn, name: str) -> MeasuredStream:
    samples = draw(st.integers(1, 10**6))
    mean = Fraction(draw(st.integers(samples, 4096 * samples)), samples)
    trained = mean * draw(st.fractions(Fraction(1, 100), 1, max_denominator=100))
    return MeasuredStream(name=name, samples=samples, counted=mean, budgeted=trained)


def asked_of(
    found: list[MeasuredStream], draw: st.DataObject, is_absolute: bool = False
) -> dict[str, Fraction]:
    written = {s.name: draw.draw(SHARES) for s in found}
    return shares(written, found, is_absolute=is_absolute)


@FEW
@given(st.lists(PARTS, min_size=1, max_size=8))
def test_rounding_is_by_largest_remainder(ideal: list[Fraction]) -> None:
    whole = rounded(ideal)
    total = sum(ideal)
    assert sum(whole) in (math.floor(total), math.ceil(total))
    assert abs(sum(whole) - total) <= Fraction(1, 2)
    up = {i for i, n in enumerate(whole) if n != math.floor(ideal[i])}
    assert all(whole[i] == math.floor(ideal[i]) + 1 for i in up)
    rest = set(range(len(ideal))) - up
    left = [ideal[i] - math.floor(ideal[i]) for i in range(len(ideal))]
    assert all(left[i] >= left[j] for i, j in product(up, rest))


def test_of_equal_remainders_the_first_is_rounded_up_and_so_is_a_half() -> None:
    half = Fraction(1, 2)
    assert rounded([half, half]) == [1, 0]
    assert rounded([half]) == rounded([half], is_absolute=True) == [1]


def test_passes_are_over_the_stream_that_is_named() -> None:
    one = Fraction(1)
    found = [
        MeasuredStream(name=name, samples=n, counted=one, budgeted=one)
        for name, n in (("a", 10), ("b", 60))
    ]
    asked = {"a": Fraction(1, 4), "b": Fraction(3, 4)}
    assert of_passes(asked, found, Fraction(2), "b") == [40, 120]
    assert of_passes(asked, found, Fraction(2), "a") == [20, 60]


@FEW
@given(streams(), st.data())
def test_an_epoch_of_a_budget_holds_it_in_the_shares_asked(
    found: list[MeasuredStream], data: st.DataObject
) -> None:
    asked = asked_of(found, data)
    budget = data.draw(st.fractions(1, 10**12, max_denominator=100))
    ideal = of_budget(asked, found, budget)
    assert sum(asked.values()) == 1
    assert sum(n * s.budgeted for n, s in zip(ideal, found, strict=True)) == budget
    assert reached(ideal, found) == [asked[s.name] for s in found]  # type: ignore[arg-type]
    whole = rounded(ideal)
    assert all(abs(n - x) < 1 for n, x in zip(whole, ideal, strict=True))
    more = of_budget(asked, found, 2 * budget)
    assert [2 * n for n in ideal] == more, "twice the budget is twice of each"


@FEW
@given(streams(), st.data())
def test_an_absolute_count_is_the_same_alone_or_together(
    found: list[MeasuredStream], data: st.DataObject
) -> None:
    same = [
        MeasuredStream(name=s.name, samples=s.samples, counted=s.counted, budgeted=s.counted)
        for s in found
    ]
    written = {s.name: data.draw(SHARES) for s in same}
    budget = data.draw(st.fractions(1, 10**12, max_denominator=100))

    def counts(part: list[MeasuredStream]) -> list[int]:
        asked = shares({s.name: written[s.name] for s in part}, part, is_absolute=True)
        return rounded(of_budget(asked, part, budget), is_absolute=True)

    together = counts(same)
    assert together == [counts([s])[0] for s in same]
    assert all(
        abs(n - written[s.name] * budget / s.counted) <= Fraction(1, 2)
        for n, s in zip(together, same, strict=True)
    )


@FEW
@given(streams(), st.data(), st.fractions(Fraction(1, 10), 4, max_denominator=100))
def test_without_a_budget_the_scarcest_stream_bounds_the_epoch(
    found: list[MeasuredStream], data: st.DataObject, passes: Fraction
) -> None:
    asked = asked_of(found, data)
    ideal = of_epoch(asked, found, passes)
    assert max(n / s.samples for n, s in zip(ideal, found, strict=True)) == passes
    assert reached(ideal, found) == [asked[s.name] for s in found]  # type: ignore[arg-type]
    over = found[0]
    again = of_passes(asked, found, ideal[0] / over.samples, over.name)
    assert again == ideal


@FEW
@given(streams(), st.integers(1, 20))
def test_temperature_flattens_and_keeps_the_order(
    found: list[MeasuredStream], degrees: int
) -> None:
    asked = shares({}, found, Fraction(degrees))
    assert abs(sum(asked.values()) - 1) < Fraction(1, 10**30)
    if degrees == 1:
        total = sum(s.size for s in found)
        assert asked == {s.name: s.size / total for s in found}
    largest = max(found, key=lambda s: s.size)
    for one in found:
        ratio = float(asked[largest.name] / asked[one.name])
        assert ratio == pytest.approx(float(largest.size / one.size) ** (1 / degrees), rel=1e-9)


def test_what_written_shares_leave_goes_by_size_to_the_others() -> None:
    found = [
        MeasuredStream(name=name, samples=n, counted=Fraction(2), budgeted=Fraction(2))
        for name, n in (("web", 10), ("code", 30), ("chat", 5))
    ]
    asked = shares({"chat": Fraction(3, 5), "web": None}, found)
    assert asked == {"web": Fraction(1, 10), "code": Fraction(3, 10), "chat": Fraction(3, 5)}
    assert shares({"chat": Fraction(0), "web": Fraction(0), "code": Fraction(7)}, found) == {
        "web": 0,
        "code": 1,
        "chat": 0,
    }
    with pytest.raises(ValueError, match="sum to 0"):
        shares({s.name: Fraction(0) for s in found}, found)


def refused(
    found: list[MeasuredStream], asked: dict[str, Fraction], budget: Budget, repeat: int
) -> str:
    """What is said of the budget; nothing where it fits."""
    ideal = (
        of_passes(asked, found, budget.amount, budget.stream)
        if budget.stream
        else of_budget(asked, found, budget.amount)
    )
    wanted = WantedShares(
        unit=budget.unit or "tokens",
        budget=budget,
        max_repeat=Fraction(repeat),
        is_absolute=False,
        streams=found,
        shares=list(asked.values()),
        ideal=ideal,
    )
    try:
        refuse_few(wanted)
        refuse_many(wanted)
        chosen = rounded(ideal)
        refuse_counts(wanted, chosen, reached(chosen, found))
    except MixRefused as refusal:
        return str(refusal)
    return ""


@settings(max_examples=30, deadline=None)
@given(streams(), st.data(), st.sampled_from(["tokens", "samples", None]), st.integers(1, 4))
def test_a_budget_that_a_refusal_names_is_not_refused(
    found: list[MeasuredStream], data: st.DataObject, unit: Unit | None, repeat: int
) -> None:
    per = {"tokens": [s.counted for s in found], "samples": [Fraction(1)] * len(found)}
    found = [
        replace(s, counted=per[unit or "tokens"][i], budgeted=per[unit or "tokens"][i])
        for i, s in enumerate(found)
    ]
    asked = asked_of(found, data)
    amount = data.draw(st.fractions(Fraction(1, 1000), 1000, max_denominator=1000))
    budget = Budget(amount=amount, unit=unit, stream=None if unit else found[0].name)
    why = refused(found, asked, budget, repeat)
    if advice := re.search(r"set budget: ([\d.,]+ .+?)[.,]?( or ask .*)?$", why):
        named = read_budget(advice[1])
        assert refused(found, asked, named, repeat) == ""
    elif "raise max_repeat: " in why:
        assert "no budget gives every stream its share" in why


@pytest.mark.parametrize(("repeat", "way"), [(100, 1), (1, -1)])
def test_a_refusal_names_the_nearest_budget_above_and_below_where_none_is_above(
    repeat: int, way: int
) -> None:
    """Held against every whole number of tokens there is, to within a sample."""
    longer, shorter = Fraction(8), Fraction(4)
    found = [
        MeasuredStream(name=name, samples=25, counted=counted, budgeted=counted)
        for name, counted in (("web", longer), ("chat", shorter))
    ]
    asked = {"web": Fraction(1, 2), "chat": Fraction(1, 2)}

    def why(tokens: int) -> str:
        return refused(found, asked, Budget(amount=Fraction(tokens), unit="tokens"), repeat)

    written = {1: 100, -1: 200}[way]
    advice = re.search(r"set budget: ([\d,]+) tokens", why(written))
    assert advice
    named = int(advice[1].replace(",", ""))
    every = range(written, 10 * written) if way > 0 else range(written, 0, -1)
    nearest = next(tokens for tokens in every if not why(tokens))
    assert not why(named)
    assert abs(named - nearest) <= longer
