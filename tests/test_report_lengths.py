"""Bars of lengths: every sample is under one of them, gaps are shown, and what is rare is seen."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.report.inspection import BAR, bars
from mdsmix.shards.counts import histogram

LINE = re.compile(r" *([\d,]+)(?:-([\d,]+))?  ([█▏▎▍▌▋▊▉ ]{24}) ([\d,]+) \([\d.]+%\)")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=60))
def test_each_line_counts_the_samples_within_its_bounds(lengths: list[int]) -> None:
    lines = list(bars(histogram(np.array(lengths, np.int64)), max(lengths)))
    end = 0
    for line in lines:
        found = LINE.fullmatch(line)
        assert found, line
        low, high, count = (
            int((part or found[1]).replace(",", "")) for part in found.group(1, 2, 4)
        )
        assert count == sum(low <= length <= high for length in lengths)
        assert (found[3].strip() != "") == (count > 0)
        assert end in (0, low - 1)
        end = high
    assert end == max(lengths)
    assert max(len(line) for line in lines) <= 80 - BAR


def test_bars_are_as_long_as_the_counts() -> None:
    counts = {"2^1": 96, "2^2": 48, "2^4": 1}
    assert [re.sub(r"[^█▎]", "", line) for line in bars(counts, 20)] == [
        "█" * 24,
        "█" * 12,
        "",
        "▎",
    ]


def test_a_stream_without_a_sample_has_no_bar() -> None:
    assert list(bars({}, 0)) == []
