"""The join of fingerprints: what a dict of them says, whatever the buffer, the buckets and the bits that they share."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.convert import duplicates as repeats
from mdsmix.convert.duplicates import Fingerprints, count_repeats, find_repeats
from mdsmix.errors import Unreachable

half = st.sampled_from([0, 1, 7 << 60, 7 << 60 | 1, 2**64 - 1])
"Halves that meet: fingerprints of one bucket, of one first half, and none at all (0, 0)."
streams = st.lists(st.lists(st.tuples(half, half), max_size=20), max_size=6)


def arrays(windows: list[list[tuple[int, int]]]) -> Iterator[Fingerprints]:
    for window in windows:
        yield np.array(window, np.uint64).reshape(-1, 2)


def by_a_dict(windows: list[list[tuple[int, int]]]) -> list[list[int]]:
    """Of each window the ordinals of records that an earlier one equals."""
    seen, found = set[tuple[int, int]](), []
    for window in windows:
        found.append([n for n, each in enumerate(window) if each in seen or _is_new(each, seen)])
    return found


def _is_new(each: tuple[int, int], seen: set[tuple[int, int]]) -> bool:
    """Notes it; never true, so that the first one is not found."""
    if each != (0, 0):
        seen.add(each)
    return False


def ordinals(bits: bytes) -> list[int]:
    found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return np.flatnonzero(found).tolist()


@given(windows=streams, buffer=st.integers(1, 30), bucket=st.integers(1, 30))
def test_repeats_are_those_of_a_dict(
    windows: list[list[tuple[int, int]]], buffer: int, bucket: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "BUFFER_ROWS", buffer)
        patch.setattr(repeats, "BUCKET_ROWS", bucket)
        expected = by_a_dict(windows)
        assert count_repeats(arrays(windows)) == sum(map(len, expected))
        assert [ordinals(bits) for bits in find_repeats(arrays(windows))] == expected


def test_memory_does_not_grow_with_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with a record that stands in it all over."""
    monkeypatch.setattr(repeats, "BUFFER_ROWS", 4096)
    monkeypatch.setattr(repeats, "BUCKET_ROWS", 4096)
    monkeypatch.setattr(repeats, "BUCKET_BITS", 4)
    monkeypatch.setattr(repeats, "MOST_BITS", 8)

    def peak(windows: int) -> int:
        rng = np.random.default_rng(0)
        tracemalloc.start()
        try:
            count_repeats(_half_equal(rng, windows))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(64)  # modules that the first join imports are no buffers: 1 to 4 MB
    assert peak(64) < 1.3 * peak(16) < 2 << 20


def _half_equal(rng: np.random.Generator, windows: int) -> Iterator[Fingerprints]:
    for _ in range(windows):
        window = rng.integers(1, 2**63, (1000, 2), dtype=np.uint64)
        window[::2] = 5
        yield window


def test_nothing_is_left_on_the_disk_and_a_full_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(repeats, "BUFFER_ROWS", 3)
    windows = [[(n, n)] for n in range(1, 9)]
    assert count_repeats(arrays(windows * 2)) == 8
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(
        Unreachable, match=r"fingerprints of the records cannot be joined in .*TMPDIR"
    ):
        count_repeats(arrays(windows))
