"""Shares become whole samples as exact fractions say, by largest remainder; the oracle is arithmetic, not the code.

Hypothesis draws streams of very unequal sizes and means; what must hold is checked against the definition.
"""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.errors import MixRefused
from mdsmix.mix.apportion import Shares, StreamShare, asked, drawn, ideals, rounded
from mdsmix.recipe.amounts import Budget

PARTS = st.fractions(min_value=0, max_value=10**6, max_denominator=10**4)
SHARES = st.fractions(min_value=Fraction(1, 1000), max_value=5, max_denominator=1000)
FEW = settings(max_examples=25, deadline=None)


STREAMS = st.builds(
    lambda samples, mean, trained, share: StreamShare(
        stream="", samples=samples, counted=mean, budgeted=mean * trained, written=share
    ),
    st.integers(1, 10**6),
    st.fractions(1, 4096, max_denominator=1000),
    st.fractions(Fraction(1, 100), 1, max_denominator=100),
    SHARES,
)
"A stream of 1 to 10^6 samples of 1 to 4,096 tokens on average, with a share."


def streams() -> st.SearchStrategy[Shares]:
    return st.lists(STREAMS, min_size=1, max_size=5).map(
        lambda parts: asked([replace(part, stream=f"s{i}") for i, part in enumerate(parts)])
    )


def part_of(
    name: str, samples: int, counted: int = 1, share: Fraction | None = None
) -> StreamShare:
    mean = Fraction(counted)
    return StreamShare(stream=name, samples=samples, counted=mean, budgeted=mean, written=share)


def tokens(amount: Fraction) -> Budget:
    return Budget(amount=amount, unit="tokens")


def shares_of(parts: Shares, samples: list[Fraction]) -> list[Fraction]:
    held = [n * part.counted for n, part in zip(samples, parts, strict=True)]
    return [each / sum(held) for each in held]


@FEW
@given(st.lists(PARTS, min_size=1, max_size=8))
def test_rounding_is_by_largest_remainder(ideal: list[Fraction]) -> None:
    whole = rounded(ideal)
    total = sum(ideal)
    assert sum(whole) in (math.floor(total), math.ceil(total))
    assert abs(float(sum(whole) - total)) <= 0.5
    up = {i for i, n in enumerate(whole) if n != math.floor(ideal[i])}
    assert all(whole[i] == math.floor(ideal[i]) + 1 for i in up)
    rest = set(range(len(ideal))) - up
    left = [ideal[i] - math.floor(ideal[i]) for i in range(len(ideal))]
    assert all(left[i] >= left[j] for i, j in product(up, rest))


def test_of_equal_remainders_the_first_is_rounded_up_and_so_is_a_half() -> None:
    half = Fraction(1, 2)
    assert rounded([half, half]) == [1, 0]
    assert rounded([half]) == rounded([half], is_absolute=True) == [1]


@FEW
@given(streams(), st.fractions(1, 10**12, max_denominator=100))
def test_an_epoch_of_a_budget_holds_it_in_the_shares_asked(parts: Shares, budget: Fraction) -> None:
    ideal = ideals(parts, tokens(budget))
    assert sum(part.asked for part in parts) == 1
    assert sum(n * part.budgeted for n, part in zip(ideal, parts, strict=True)) == budget
    assert shares_of(parts, ideal) == [part.asked for part in parts]
    assert all(abs(n - x) < 1 for n, x in zip(rounded(ideal), ideal, strict=True))
    assert [2 * n for n in ideal] == ideals(parts, tokens(2 * budget))


@FEW
@given(streams(), st.fractions(1, 10**12, max_denominator=100))
def test_an_absolute_count_is_the_same_alone_or_together(parts: Shares, budget: Fraction) -> None:
    same = [replace(part, budgeted=part.counted) for part in parts]

    def counts(some: list[StreamShare]) -> list[int]:
        return rounded(ideals(asked(some, is_absolute=True), tokens(budget)), is_absolute=True)

    together = counts(same)
    assert together == [counts([part])[0] for part in same]
    for n, part in zip(together, same, strict=True):
        assert part.written is not None
        assert abs(n - part.written * budget / part.counted) <= Fraction(1, 2)


@FEW
@given(streams(), st.fractions(Fraction(1, 10), 4, max_denominator=100))
def test_without_a_budget_the_scarcest_stream_bounds_the_epoch(
    parts: Shares, most: Fraction
) -> None:
    ideal = ideals(parts, None, most)
    passes = [n / part.samples for n, part in zip(ideal, parts, strict=True)]
    assert max(passes) == min(1, most)
    assert shares_of(parts, ideal) == [part.asked for part in parts]
    assert ideals(parts, Budget(amount=passes[0], stream=parts[0].stream)) == ideal


@FEW
@given(streams(), st.integers(1, 20))
def test_temperature_flattens_and_keeps_the_order(found: Shares, degrees: int) -> None:
    parts = asked([replace(part, written=None) for part in found], Fraction(degrees))
    assert abs(float(sum(part.asked for part in parts) - 1)) < 1e-30
    if degrees == 1:
        total = sum(part.size for part in parts)
        assert [part.asked for part in parts] == [part.size / total for part in parts]
    largest = max(parts, key=lambda part: float(part.size))
    for one in parts:
        ratio = float(largest.asked / one.asked)
        assert ratio == pytest.approx(float(largest.size / one.size) ** (1 / degrees), rel=1e-9)


def test_what_written_shares_leave_goes_by_size_to_the_others() -> None:
    web, code = part_of("web", 10, 2), part_of("code", 30, 2)
    chat = part_of("chat", 5, 2, share=Fraction(3, 5))
    assert [part.asked for part in asked([web, code, chat])] == [
        Fraction(1, 10),
        Fraction(3, 10),
        Fraction(3, 5),
    ]
    nothing = [replace(part, written=Fraction(0)) for part in (web, code, chat)]
    only = [nothing[0], replace(code, written=Fraction(7)), nothing[2]]
    assert [part.asked for part in asked(only)] == [0, 1, 0]
    assert not any(part.asked for part in asked(nothing))


@FEW
@given(streams(), st.fractions(1, 10**7, max_denominator=10), st.integers(1, 4))
def test_what_is_not_refused_is_in_the_mix_and_within_max_repeat(
    parts: Shares, amount: Fraction, repeat: int
) -> None:
    """And what is refused is drawn too often, or never. What shares come to is what the samples hold."""
    budget = tokens(amount)
    ideal = ideals(parts, budget)
    chosen = rounded(ideal)
    fits = all(chosen) and all(
        n <= repeat * part.samples for n, part in zip(ideal, parts, strict=True)
    )
    try:
        found = drawn(parts, budget, "tokens", Fraction(repeat))
    except MixRefused:
        assert not fits
    else:
        assert fits
        assert [part.choose for part in found] == chosen
        held = [Fraction(part.choose) for part in found]
        assert [part.reached for part in found] == shares_of(parts, held)
