"""Token ids and lengths of a stream's first samples: what can be said without a manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mdsmix.encode.labels import Labels, Targets, Turns, label
from mdsmix.errors import MixRefused
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.ragged import Ragged
from mdsmix.shards.token_ids import Ids, Turn, layout_of, turns_of

TOKEN_COLUMNS = ("tokens", "input_ids", "labels")


class TokenSample(NamedTuple):
    """One sample's token ids."""

    turns: Sequence[Turn]

    @property
    def ids(self) -> Ids:
        return np.concatenate([part for turn in self.turns for part in turn])

    @property
    def length(self) -> int:
        return sum(len(part) for turn in self.turns for part in turn)


def row_length(stream: StreamInMix) -> int | None:
    """Tokens in every row, where the columns fix it: `ndarray:<int>:<length>`."""
    encodings = [e for n, e in stream.columns.items() if n in TOKEN_COLUMNS]
    found = [re.fullmatch(r"ndarray:[^:]*:(\d+)", encoding) for encoding in encodings]
    return sum(int(each[1]) for each in found if each) if found and all(found) else None


def token_samples(stream: StreamInMix, loader: Loader) -> list[TokenSample]:
    """The first samples; one that has no ids, or holds other than it says, is left out."""
    dtype = str(loader.dataset.get("token_encoding_type", "int64"))
    found = []
    for sample in stream.head.samples:
        if layout_of(sample) == ("tokens",) and "text" in sample:
            continue  # the loader reads the text
        try:
            found.append(TokenSample(turns_of(sample, dtype)))
        except (MixRefused, ValueError, TypeError, OverflowError):
            continue
    return [sample for sample in found if sample.turns]


def labels(found: Sequence[TokenSample], targets: Targets) -> Labels:
    """What the loader trains of the samples, without the EOS that it appends."""
    ids = Ragged.of([side for sample in found for turn in sample.turns for side in turn], np.int64)
    counts = np.array([len(sample.turns) for sample in found], np.int64)
    return label(targets, Turns(ids, counts), None)


def largest_id(stream: StreamInMix, loader: Loader) -> int | None:
    """The largest token id of the stream, or of its first samples."""
    if stream.trusted_manifest:
        return stream.trusted_manifest.totals.largest_id
    tops = [int(s.ids.max()) for s in token_samples(stream, loader) if s.length]
    return max(tops, default=None)


def longest(stream: StreamInMix, loader: Loader) -> int | None:
    """Tokens of the longest sample, or of the longest of the first ones."""
    if stream.trusted_manifest:
        return stream.trusted_manifest.totals.longest
    fixed = row_length(stream)
    return fixed or max((s.length for s in token_samples(stream, loader)), default=None)


def bytes_columns(stream: StreamInMix) -> Sequence[str]:
    """Token columns without a dtype of their own, as older streams have them."""
    return [n for n in TOKEN_COLUMNS if stream.columns.get(n) == "bytes"]
