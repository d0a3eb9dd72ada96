"""Shares become whole samples as exact fractions say, by largest remainder; the oracle is arithmetic, not the code.

Hypothesis draws streams of very unequal sizes and means; what must hold is checked against the definition.
"""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.mix.apportion import Shares, StreamShare, asked, ideals, rounded
from mdsmix.recipe.amounts import Budget

PARTS = st.lists(st.fractions(0, 10**6, max_denominator=10**4), min_size=1, max_size=8)
FEW, HALF = settings(max_examples=25, deadline=None), Fraction(1, 2)


def stream(samples: int, mean: Fraction, trained: Fraction, share: Fraction | None) -> StreamShare:
    budgeted = mean * trained
    return StreamShare(
        stream="", samples=samples, counted=mean, budgeted=budgeted, is_exact=True, written=share
    )


STREAMS = st.builds(
    stream,
    st.integers(1, 10**6),
    st.fractions(1, 4096, max_denominator=1000),
    st.fractions(Fraction(1, 100), 1, max_denominator=100),
    st.fractions(Fraction(1, 1000), 5, max_denominator=1000),
)
"A stream of 1 to 10^6 samples of 1 to 4,096 tokens on average, with a share."
MIXES = st.lists(STREAMS, min_size=1, max_size=5).map(
    lambda parts: asked([replace(part, stream=f"s{i}") for i, part in enumerate(parts)])
)
AMOUNTS = st.fractions(1, 10**12, max_denominator=100)


def tokens(amount: Fraction) -> Budget:
    return Budget(amount=amount, unit="tokens")


def shares_of(parts: Shares, samples: list[Fraction]) -> list[Fraction]:
    held = [n * part.counted for n, part in zip(samples, parts, strict=True)]
    return [each / sum(held) for each in held]


@FEW
@given(PARTS)
def test_rounding_is_by_largest_remainder(ideal: list[Fraction]) -> None:
    whole = rounded(ideal)
    assert abs(sum(whole) - sum(ideal)) <= HALF
    remainders: dict[int, list[Fraction]] = {0: [], 1: []}
    for n, exact in zip(whole, ideal, strict=True):
        remainders[n - math.floor(exact)].append(exact - math.floor(exact))
    assert min(remainders[1], default=1) >= max(remainders[0], default=0)


def test_of_equal_remainders_the_first_is_rounded_up_and_an_absolute_count_for_itself() -> None:
    assert rounded([HALF, HALF]) == [1, 0]
    assert rounded([HALF]) == rounded([HALF], is_absolute=True) == [1]
    assert rounded([Fraction(1, 3)] * 3, is_absolute=True) == [0, 0, 0]


@FEW
@given(MIXES, AMOUNTS)
def test_an_epoch_of_a_budget_holds_it_in_the_shares_asked(parts: Shares, budget: Fraction) -> None:
    ideal = ideals(parts, tokens(budget))
    assert sum(part.asked for part in parts) == 1
    assert sum(n * part.budgeted for n, part in zip(ideal, parts, strict=True)) == budget
    assert shares_of(parts, ideal) == [part.asked for part in parts]
    assert all(abs(n - x) < 1 for n, x in zip(rounded(ideal), ideal, strict=True))


@FEW
@given(MIXES, st.integers(1, 20))
def test_temperature_flattens_and_keeps_the_order(found: Shares, degrees: int) -> None:
    parts = asked([replace(part, written=None) for part in found], Fraction(degrees))
    assert abs(float(sum(part.asked for part in parts) - 1)) < 1e-30
    largest = max(parts, key=lambda part: part.size)
    for one in parts:
        expected = float(largest.size / one.size) ** (1 / degrees)
        assert float(largest.asked / one.asked) == pytest.approx(expected, rel=1e-9)
        assert degrees > 1 or one.asked == one.size / sum(part.size for part in parts)


def test_what_written_shares_leave_goes_by_size_to_the_others() -> None:
    def shares(*written: Fraction | None) -> list[Fraction]:
        sizes = zip((10, 30, 5), written, strict=True)
        return [p.asked for p in asked([stream(n, Fraction(2), Fraction(1), w) for n, w in sizes])]

    zero = Fraction(0)
    assert shares(None, None, Fraction(3, 5)) == [Fraction(n, 10) for n in (1, 3, 6)]
    assert shares(zero, Fraction(7), zero) == [0, 1, 0]
    assert not any(shares(zero, zero, zero))
