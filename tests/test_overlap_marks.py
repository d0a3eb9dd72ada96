"""Marks against plain Python sets of tuples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.convert.ledger import UnitRecord
from mdsmix.convert.marks import keep_mark, store_mark
from mdsmix.encode.base import Encoded
from mdsmix.mix import overlap
from mdsmix.mix.overlap import Pair
from mdsmix.overlap import grams, marks
from mdsmix.overlap.estimate import Estimate, containment
from mdsmix.overlap.grams import GRAM, hashes, kept
from mdsmix.overlap.marks import Mark, Marking, Merged, halvings_for, parse
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Records, Totals
from mdsmix.storage import locate

Rows = list[list[int]]
ROWS = st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=12)


@pytest.fixture(autouse=True)
def keep_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows have kept grams, and blocks have ends."""
    monkeypatch.setattr(grams, "_KEPT", np.uint16(1 << 14))
    monkeypatch.setattr(grams, "BLOCK", 16)
    monkeypatch.setattr(grams, "FLAGS", 32)


def all_grams(rows: Rows) -> list[tuple[int, ...]]:
    return [tuple(row[i : i + GRAM]) for row in rows for i in range(len(row) - GRAM + 1)]


def is_kept(gram: tuple[int, ...]) -> bool:
    """The polynomial that the README states, one gram at a time."""
    total = 0
    for token in gram:
        total = 40503 * total + token
    return total % (1 << 16) < 1 << 14


def hash_of(gram: tuple[int, ...]) -> int:
    return int(hashes(np.array(gram), np.array([0]), GRAM)[0])


@settings(max_examples=30)
@given(ROWS, st.sampled_from(["uint16", "uint32", "int64"]))
def test_kept_grams_are_those_of_rows_whatever_holds_their_ids(rows: Rows, dtype: str) -> None:
    found = kept(Ragged.of(rows, dtype))
    expected = [(hash_of(g), r) for r, row in enumerate(rows) for g in all_grams([row]) if is_kept(g)]  # fmt: skip
    assert list(zip(found.hashes.tolist(), found.rows.tolist(), strict=True)) == expected


@settings(max_examples=20)
@given(ROWS)
def test_no_kept_gram_holds_an_image(rows: Rows) -> None:
    """Twenty placeholders are equal whatever is to be seen, and streams of other images overlapped by them."""
    marking = Marking(images=(3,))
    marking.add(Ragged.of(rows, "int64"))
    mark = marking.finish("k")
    assert mark
    text = {hash_of(g) for g in all_grams(rows) if is_kept(g) and 3 not in g}
    assert set(mark.hashes.tolist()) == text


def test_ids_beyond_16_bits_are_told_apart() -> None:
    low, high = np.arange(GRAM), np.arange(GRAM) + (1 << 16)
    assert hashes(low, np.array([0]), GRAM) != hashes(high, np.array([0]), GRAM)


@settings(max_examples=30)
@given(ROWS, ROWS)
def test_two_columns_are_rows_of_the_same_samples(first: Rows, second: Rows) -> None:
    n, two = min(len(first), len(second)), Marking()
    two.add(Ragged.of(first[:n], "uint16"), Ragged.of(second[:n], "uint16"))
    mark = two.finish("k")
    assert mark
    expected = {hash_of(g) for g in all_grams([*first[:n], *second[:n]]) if is_kept(g)}
    times = Counter(h for row in zip(first, second, strict=False) for h in {hash_of(g) for g in all_grams(list(row))})  # fmt: skip
    assert set(mark.hashes.tolist()) == {h for h in expected if times[h] <= marks.COMMON}
    assert (mark.samples, mark.grams) == (n, len(all_grams([*first[:n], *second[:n]])))


def same(one: marks.UnitMark | None, other: marks.UnitMark | None) -> bool:
    assert one
    assert other
    said = [[getattr(mark, name) for name in marks.SAID] for mark in (one, other)]
    return said[0] == said[1] and np.array_equal(one.hashes, other.hashes)


def test_grams_in_many_samples_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grams, "_KEPT", np.uint16(0xFFFF))
    template, marking = list(range(100, 112)), Marking()
    rows = [[*template, *range(200 + 20 * i, 220 + 20 * i)] for i in range(11)]
    marking.add(Ragged.of(rows, "uint16"))
    mark = marking.finish("k")
    assert mark
    counts = Counter(hash_of(gram) for gram in all_grams(rows))
    assert mark.left_out == sum(n > marks.COMMON for n in counts.values()) == 5
    assert mark.hashes.tolist() == sorted(h for h, n in counts.items() if n <= marks.COMMON)
    assert (mark.samples, mark.grams, mark.count) == (11, 11 * 25, len(mark.hashes))


def test_a_gram_that_one_sample_repeats_is_not_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grams, "_KEPT", np.uint16(0xFFFF))
    marking = Marking()
    marking.add(Ragged.of([[3] * 100, *[list(range(50, 60))] * marks.COMMON], "uint16"))
    mark = marking.finish("k")
    assert mark
    assert (mark.left_out, mark.count) == (0, 4), "nor is one that stands in as many as may be"


def test_samples_of_unknown_columns_have_no_mark() -> None:
    marking = Marking()
    column = {"turns": Ragged.of([b"[]"], np.uint8)}
    marking.add_encoded(Encoded(columns=column, tokens=0, loss_tokens=0, lengths=np.zeros(1), largest_id=-1))  # fmt: skip
    assert marking.finish("k") is None


def a_mark(seed: int, count: int = 1000) -> marks.UnitMark:
    values = np.unique(np.random.default_rng(seed).integers(0, 1 << 63, count, np.uint64) * np.uint64(2))  # fmt: skip
    return marks.UnitMark(key=f"k{seed}", samples=3, grams=9, left_out=1, count=len(values), hashes=values)  # fmt: skip


def test_a_mark_is_read_as_it_was_written_and_damage_is_none() -> None:
    mark = Mark((a_mark(1), a_mark(2, 0)), 3)
    content = mark.to_bytes()
    read = parse(content)
    assert read
    assert read.halvings == 3
    assert all(same(a, b) for a, b in zip(read.units, mark.units, strict=True))
    flipped = bytearray(content)
    flipped[-1] ^= 1
    for bad in (b"", b"[]\n", content[:-8], content[:-1], bytes(flipped), content + bytes(8), content.replace(b'"gram":8', b'"gram":9'), content.replace(b'"rate":256', b'"rate":255'), content.replace(b'"base":40503,', b"")):  # fmt: skip
        assert parse(bad) is None


def test_a_long_streams_mark_keeps_the_hashes_below_a_bound() -> None:
    unit, small = a_mark(1), a_mark(2, 10)
    mark = Mark((unit.below(2), small.below(2)), 2)
    both = [*unit.hashes.tolist(), *small.hashes.tolist()]
    assert mark.merged.hashes.tolist() == sorted(h for h in both if h < 1 << 62)
    assert mark.merged.below(3).tolist() == sorted(h for h in both if h < 1 << 61)
    assert mark.units[0].count == 1000


@pytest.mark.parametrize("count", [0, 1, 1 << 22, (1 << 22) + 1, 1 << 24, (1 << 24) + 1, 1 << 34])
def test_the_bound_is_halved_until_the_file_is_small(count: int) -> None:
    halvings = halvings_for(count)
    assert count >> halvings <= marks.MOST
    assert not halvings or count / 2 ** (halvings - 1) > marks.MOST


def test_a_hash_is_the_one_that_the_readme_states() -> None:
    """Published marks hold it: SplitMix64's last steps, in whole numbers of Python."""
    ids, whole = [7, 0, 65_535, 1 << 20, 5, 5, 3, 2_000_000_000], (1 << 64) - 1
    value = 1
    for token in ids:
        value = value * 0x9E3779B97F4A7C15 + token & whole
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & whole
    value = (value ^ value >> 27) * 0x94D049BB133111EB & whole
    assert hash_of(tuple(ids)) == value ^ value >> 32


def test_a_gram_is_kept_below_the_bound_and_not_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gram = [3, 1, 4, 1, 5, 9, 2, 6]
    total = sum(token * 40503 ** (7 - at) for at, token in enumerate(gram)) % (1 << 16)
    for bound, count in ((total, 0), (total + 1, 1)):
        monkeypatch.setattr(grams, "_KEPT", np.uint16(bound))
        assert len(kept(Ragged.of([gram], "uint16")).hashes) == count


def test_samples_are_counted_from_batch_to_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 samples and more 1 % is the bound, not 10."""
    monkeypatch.setattr(grams, "_KEPT", np.uint16(0xFFFF))
    shared = list(range(100, 100 + GRAM))
    for alone, left_out in ((0, 1), (1088, 1), (1089, 0)):
        marking = Marking()
        for _ in range(11):
            marking.add(Ragged.of([shared], "uint16"))
        marking.add(Ragged.of([[]] * alone, "uint16"))
        mark = marking.finish("k")
        assert mark
        assert (mark.samples, mark.left_out) == (11 + alone, left_out)


def test_what_two_units_hold_counts_once_in_their_stream() -> None:
    unit = a_mark(1, 200)
    assert Mark((unit, unit)).merged.hashes.tolist() == unit.hashes.tolist()


def test_marks_are_compared_at_the_bound_of_the_one_with_more_halvings() -> None:
    """Else of a gram that is above it nobody knows whether the other has it."""
    unit = a_mark(1)
    whole, half = Merged(unit.hashes, 0), Merged(marks.below(unit.hashes, 1), 1)
    for one, other in ((whole, half), (half, whole)):
        found = containment(one, other)
        assert found.found == found.of == len(half.hashes)


def test_a_share_is_told_where_it_is_that_large_by_twice_its_error() -> None:
    """Of an evaluation a smaller one; of a few grams none."""

    def is_told(found: int, of: int, is_evaluation: bool = False) -> bool:
        estimate = Estimate(found=found, of=of)
        pair = Pair(stream="a", within="b", places=("", ""), is_evaluation=is_evaluation, estimate=estimate)  # fmt: skip
        return pair.is_told

    assert [is_told(n, 1000) for n in (100, 119, 122)] == [False, False, True]
    assert [is_told(n, 1000, True) for n in (50, 64, 67)] == [False, False, True]
    assert [is_told(99, 99), is_told(100, 100)] == [False, True]


def record_of(mark: marks.UnitMark) -> UnitRecord:
    return UnitRecord(key=mark.key, backend="", shards=[], totals=Totals(), records=Records(), marked=mark.count)  # fmt: skip


def test_a_streams_mark_is_of_all_its_units_below_one_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the leftovers too, and a unit without a kept gram; what is published serves only where it holds enough."""
    monkeypatch.setattr(marks, "MOST", 256)
    folder = locate(str(tmp_path))
    job: Any = SimpleNamespace(folder=folder, is_new=True)
    units, last = [a_mark(1, 150), a_mark(2, 100), a_mark(3, 0)], a_mark(4, 100)
    for unit in units:
        keep_mark(folder, unit)

    def stored(last: marks.UnitMark | None, published: Any) -> tuple[Mark, Any]:
        sides = store_mark(job, list(map(record_of, units)), last, published)
        found = parse((folder / sides[0].name).read())
        assert found
        return found, SimpleNamespace(side_files=sides)

    halved, less = stored(last, None)
    whole, more = stored(None, less)
    for path in tmp_path.glob(".mdsmix/*.grams"):
        path.unlink()
    assert stored(last, more)[0].to_bytes() == halved.to_bytes()
    assert (halved.halvings, whole.halvings) == (1, 0)
    assert [u.key for u in halved.units] == ["k1", "k2", "k3", "k4"]
    for found, of, bound in ((halved, [*units, last], 1 << 63), (whole, units, 1 << 64)):
        kept_of_each = [[h for h in unit.hashes.tolist() if h < bound] for unit in of]
        assert [unit.hashes.tolist() for unit in found.units] == kept_of_each


def test_a_pair_says_how_much_of_the_first_stands_in_the_second() -> None:
    unit = a_mark(1)
    small, large = (SimpleNamespace(name=name, folder=name) for name in ("small", "large"))
    merged = {id(small): Merged(unit.hashes[:400], 0), id(large): Merged(unit.hashes, 0)}
    found = [overlap._pair(one, other, False, merged) for one, other in ((small, large), (large, small))]  # type: ignore[arg-type]  # fmt: skip
    assert [pair.estimate.share for pair in found] == [1.0, 0.4]
    assert [(pair.stream, pair.within) for pair in found] == [("small", "large"), ("large", "small")]  # fmt: skip
