"""Finds the lines of JSON that may contain a whole number beyond 64 bits. Only these need the
reader that keeps every digit (`read_json`); orjson reads the others.

Texts contain long runs of digits too: identifiers, hashes, digits of pi. In the benchmarks' corpora
every block of 4 MB has some. When `read_json` read all lines of such a block, conversions of texts
of 4 KB took 15 % more CPU time, and of texts of 100 bytes 30 %.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdsmix.json_values import LONG_RUN
from mdsmix.lazy_numpy import NDArray, np

WORDS = 4
"""A run of 19 digits contains at least 4 words of 4 bytes, wherever in a word it begins. So each
fourth word of a text shows whether the text may contain such a run.
"""


def find_lines_with_long_numbers(lines: Sequence[bytes], text: bytes | memoryview) -> list[int]:
    """Return the indexes of the lines that contain a run of digits which may be a whole number
    beyond 64 bits, ascending. Digits inside strings count too.

    Args:
        lines: the lines.
        text: all lines in one buffer.
    """
    offsets = _find_runs(text)
    if not len(offsets):
        return []
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    indexes = np.searchsorted(np.cumsum(lengths), offsets, "right")
    with_long_numbers = dict[int, None]()  # used as an ordered set
    for offset, index in zip(offsets.tolist(), indexes.tolist(), strict=True):
        # A match begins at most 19 bytes before the word, and ends at most 20 bytes after.
        if index in with_long_numbers:
            continue
        if LONG_RUN.search(text, max(0, offset - 19), offset + 20):
            with_long_numbers[index] = None
    return [*with_long_numbers]


def _find_runs(text: bytes | memoryview) -> NDArray[np.int64]:
    """Return offsets of places with 16 digits in a row, ascending. Each run of 19 digits or more
    contains at least one of these offsets.

    The whole text is searched in 0.1 ns a byte.
    """
    words = np.frombuffer(text, np.uint32, len(text) // 4)
    # Most words have a byte that is neither a digit nor one of the six characters after 9.
    candidates = WORDS * np.flatnonzero(_have_threes(words[::WORDS]))
    # Keep a word if 4 words in a row that include it are digits: look at 3 words on either side.
    # At the ends of the text the first or last word is repeated, so a few places too many are kept.
    around = candidates[:, np.newaxis] + np.arange(1 - WORDS, WORDS)
    are_digits = _are_digits(words[np.clip(around, 0, len(words) - 1)])
    windows = np.lib.stride_tricks.sliding_window_view(are_digits, WORDS, axis=1)
    is_run = windows.all(axis=2).any(axis=1)
    return np.asarray(4 * candidates[is_run])


def _are_digits(words: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return bool: whether all four bytes of each word are digits, 0x30 to 0x39."""
    # 0x3A to 0x3F have a 3 in front too, but no longer if 6 is added.
    return np.asarray(_have_threes(words) & _have_threes(words + np.uint32(0x06060606)))


def _have_threes(words: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return bool: whether the higher four bits of all four bytes of each word are 3."""
    return np.asarray(words & np.uint32(0xF0F0F0F0) == np.uint32(0x30303030))
