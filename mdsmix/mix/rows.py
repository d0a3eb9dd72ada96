"""Token ids and lengths of a stream's first samples, and tokens per sample: what can be said without a manifest.

The first samples of the first shard stand for the stream. That is an estimate, and is called one: a stream sorted by
length or by source looks different further on. A manifest counts every sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.mix.streams import Loader, Stream

TOKEN_COLUMNS = ("tokens", "input_ids", "labels")
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One sample's tokens: every turn's prompt and response; plain tokens are one response without a prompt."""

    turns: tuple[tuple[Tokens, Tokens], ...]

    @property
    def ids(self) -> Tokens:
        return np.concatenate([part for turn in self.turns for part in turn])

    @property
    def length(self) -> int:
        return sum(len(part) for turn in self.turns for part in turn)


class PerSample(NamedTuple):
    """Mean tokens of a sample, and whether that was counted or seen in the first samples only."""

    tokens: float
    is_exact: bool


def fixed_length(encoding: str) -> int | None:
    """Tokens in every row of a column `ndarray:<int>:<length>`."""
    kind, *settings = encoding.split(":")
    if kind != "ndarray" or len(settings) != 2 or not settings[1].isdigit():
        return None
    return int(settings[1])


def row_length(stream: Stream) -> int | None:
    """Tokens in every row, where the columns fix it."""
    lengths = [fixed_length(e) for n, e in stream.columns.items() if n in TOKEN_COLUMNS]
    return None if not lengths or None in lengths else sum(n or 0 for n in lengths)


def head_rows(stream: Stream, loader: Loader) -> list[Row]:
    """The rows of the first samples; a sample that has none, or holds other than it says, is left out."""
    dtype = str(loader.dataset.get("token_encoding_type", "int64"))
    return [row for sample in stream.head.samples for row in _rows(sample, dtype)]


def _rows(sample: Mapping[str, Any], dtype: str) -> Iterator[Row]:
    try:
        if "turns" in sample:
            turns = [
                (_ids(t["input_ids"], dtype), _ids(t["labels"], dtype)) for t in sample["turns"]
            ]
            if turns:
                yield Row(tuple(turns))
        elif "input_ids" in sample:
            yield Row(((_ids(sample["input_ids"], dtype), _ids(sample["labels"], dtype)),))
        elif "tokens" in sample and "text" not in sample:
            yield Row(((np.empty(0, np.int64), _ids(sample["tokens"], dtype)),))
    except (ValueError, TypeError, LookupError, OverflowError):
        return


def _ids(column: Any, dtype: str) -> Tokens:
    if isinstance(column, bytes):
        return np.frombuffer(column, dtype).astype(np.int64)
    return np.asarray(column).astype(np.int64).reshape(-1)


def per_sample(stream: Stream, loader: Loader) -> PerSample | None:
    """Tokens that a mean sample holds; None where the loader itself tokenizes text."""
    if stream.card and stream.card.totals.samples:
        return PerSample(stream.card.totals.tokens / stream.card.totals.samples, True)
    if (length := row_length(stream)) is not None:
        return PerSample(length, True)
    lengths = [row.length for row in head_rows(stream, loader)]
    return PerSample(sum(lengths) / len(lengths), False) if lengths else None


def largest_id(stream: Stream, loader: Loader) -> int | None:
    """The largest token id of the stream, or of its first samples."""
    if stream.card:
        return stream.card.totals.largest_id
    tops = [int(row.ids.max()) for row in head_rows(stream, loader) if row.length]
    return max(tops, default=None)


def longest(stream: Stream, loader: Loader) -> int | None:
    """Tokens of the longest sample, or of the longest of the first ones."""
    if stream.card:
        return stream.card.totals.longest
    fixed = row_length(stream)
    return fixed or max((row.length for row in head_rows(stream, loader)), default=None)


def bytes_columns(stream: Stream) -> Sequence[str]:
    """Token columns without a dtype of their own, as older streams have them."""
    return [n for n in TOKEN_COLUMNS if stream.columns.get(n) == "bytes"]
