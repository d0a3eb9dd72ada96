"""Tokens of every sample of a stream, without reading a sample.

Rows of a fixed length are told by their column, token rows of any length by the tables of their shards, to the token. Pairs
and conversations are told by their bytes in these tables, brought to the sum that the manifest counted: an estimate, as is
the mean of the first samples, which is all there is without a manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.mix.counts import tokens_of
from mdsmix.mix.first_samples import row_length
from mdsmix.mix.streams import Loader, Stream
from mdsmix.preview.reading import Reader
from mdsmix.shards.index import Shard
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.turns import has_images
from mdsmix.table import Estimate, is_known

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a stream's samples as the model sees them."""

    tokens: Floats
    "float64 [samples], or [1] where all count as the same."
    is_exact: bool
    how: str
    trained: float | None
    "The share of them that gives a loss; None where that is not known."

    def of(self, positions: NDArray[np.int64]) -> Floats:
        """float64 [n]: of the samples at these positions of the stream."""
        if len(self.tokens) == 1:
            return np.full(len(positions), self.tokens[0])
        return self.tokens[positions]


def lengths_of(number: int, stream: Stream, loader: Loader, reader: Reader) -> Lengths | None:
    """None where nobody can tell, since the loader itself tokenizes."""
    most = loader.max_seq_len or 1 << 30
    trained = _trained(stream, loader)
    if (fixed := row_length(stream)) is not None and not stream.columns.keys() & {"text"}:
        return Lengths(
            np.array([min(fixed, most)], np.float64), True, "rows of one length", trained
        )
    counted = tokens_of(stream, loader)
    if not is_known(counted):
        return None
    mean = float(counted) / max(1, stream.index.samples)
    tables = list(_sizes(number, stream, reader)) if _is_worth(stream) else []
    if len(tables) < len(stream.shards):
        how = (
            "the mean that the manifest counted"
            if not isinstance(counted, Estimate)
            else "the mean of the first samples"
        )
        return Lengths(np.array([mean]), False, how, trained)
    exact = [_rows(shard, sizes) for shard, sizes in zip(stream.shards, tables, strict=True)]
    if not any(rows is None for rows in exact):
        rows = np.concatenate([rows for rows in exact if rows is not None])
        return Lengths(
            np.minimum(rows, most).astype(np.float64), True, "tables of its shards", trained
        )
    sizes = np.concatenate(tables).astype(np.float64)
    scaled = sizes * (mean / max(1e-9, float(sizes.mean())))
    return Lengths(scaled, False, "bytes of its samples, brought to the mean", trained)


def _is_worth(stream: Stream) -> bool:
    """Where there are images the bytes are theirs, and say little of tokens."""
    return (
        not has_images(stream.columns)
        and all(shard.samples for shard in stream.shards)
        and stream.index.samples <= 1 << 26
    )


def _sizes(number: int, stream: Stream, reader: Reader) -> Iterator[NDArray[np.int64]]:
    keys = [(number, at) for at in range(len(stream.shards))]
    reader.look(keys)
    yield from (np.diff(reader.tables[key]) for key in keys if key in reader.tables)


def _rows(shard: Shard, sizes: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """int64 [samples]: elements of the arrays of a shard that has one column of them; None where it has others.

    A sample is its size in 4 bytes, a byte `4 | log2(width)`, the array's length in so many bytes, and the array.
    """
    kind, _, dtype = shard.column_encodings[0].partition(":")
    if shard.column_names != ["tokens"] or kind != "ndarray" or not dtype or ":" in dtype:
        return None
    body, found = sizes - 5, np.full(len(sizes), -1, np.int64)
    for width in (1, 2, 4):
        rows, rest = np.divmod(body - width, np.dtype(dtype).itemsize)
        low, high = (0 if width == 1 else 1 << 4 * width), 1 << 8 * width
        found = np.where((rest == 0) & (low <= rows) & (rows < high), rows, found)
    return None if (found < 0).any() else found


def _trained(stream: Stream, loader: Loader) -> float | None:
    manifest, targets = stream.trusted_manifest, loader.target_policies
    if not manifest or not targets or not manifest.totals.seen_tokens:
        return None
    if "tokens" not in stream.columns and not _same_targets(manifest.encoding, loader):
        return None
    return manifest.totals.loss_tokens / manifest.totals.seen_tokens


def _same_targets(encoding: Encoding, loader: Loader) -> bool:
    made = (encoding.target_prompts, encoding.target_responses, encoding.decoder_only_format)
    asked = (*loader.targets, loader.dataset.get("decoder_only_format") is not False)
    return made == asked and encoding.max_seq_len == loader.max_seq_len
