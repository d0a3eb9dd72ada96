"""Packing places every row exactly once, overfills no bin, and keeps what is left for the next batch."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.load.collate import Packer, best_ratio
from mdsmix.load.training_rows import TrainingRow


def rows(*sizes: int) -> list[TrainingRow]:
    return [TrainingRow(np.full(n, n), np.full(n, n)) for n in sizes]


def sizes(bins: list[list[TrainingRow]]) -> list[list[int]]:
    return [[row.input_ids.size for row in packed] for packed in bins]


def test_the_longest_rows_are_placed_first_and_a_batch_is_full_before_bins_are_shared() -> None:
    assert sizes(Packer(bins=2, max_seq_len=10).pack(rows(3, 7, 2, 5))) == [[7, 3], [5, 2]]
    assert sizes(Packer(bins=3, max_seq_len=10).pack(rows(1, 2, 3))) == [[3], [2], [1]]


def test_what_does_not_fit_waits_for_the_next_batch_as_far_as_asked_for() -> None:
    for keep, waiting in {None: [[8], [7]], 0: [], 1: [[8]], 5: [[8], [7]]}.items():
        packer = Packer(bins=1, max_seq_len=10, keep=keep)
        assert sizes(packer.pack(rows(9, 8, 7))) == [[9]]
        assert sizes(packer.waiting) == waiting
    assert sizes(packer.pack(rows(2))) == [[8, 2]]
    assert sizes(packer.waiting) == [[7]]


@given(
    st.lists(st.lists(st.integers(1, 10), min_size=1, max_size=20), min_size=1, max_size=4),
    st.integers(1, 6),
)
@settings(max_examples=50, deadline=None)
def test_every_row_is_placed_once_and_no_bin_overflows(batches: list[list[int]], bins: int) -> None:
    packer = Packer(bins=bins, max_seq_len=10)
    out = [b for batch in batches for b in sizes(packer.pack(rows(*batch)))]
    out += sizes(packer.waiting)
    assert sorted(n for b in out for n in b) == sorted(n for batch in batches for n in batch)
    assert max(sum(b) for b in out) <= 10


def test_the_best_ratio_is_the_last_that_leaves_no_row_waiting() -> None:
    tried = {4: 1.0, 8: 2.0, 12: 3.0}
    assert best_ratio(rows(*[5] * 24), tried, 4, 10) == 2
    assert best_ratio(rows(*[3] * 24), tried, 4, 10) == 3
    assert best_ratio(rows(*[6] * 24), tried, 4, 10) == 1
