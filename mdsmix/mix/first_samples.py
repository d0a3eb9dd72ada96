"""Token ids and lengths of a stream's first samples, and tokens per sample: what can be said without a manifest.

The first samples of the first shard stand for the stream. That is an estimate, and is called one: a stream sorted by
length or by source looks different further on. A manifest counts every sample.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mdsmix.encode.targets import Labels, Targets, Turns, label
from mdsmix.errors import MixRefused
from mdsmix.kinds import kind_of
from mdsmix.kinds.finetuning import targets_of
from mdsmix.mix.streams import Loader, Stream
from mdsmix.ragged import Ragged
from mdsmix.shards.turns import Ids, Turn, layout_of, turns_of

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


class PerSample(NamedTuple):
    """Mean tokens of a sample, and whether that was counted or seen in the first samples only."""

    tokens: float
    is_exact: bool


def row_length(stream: Stream) -> int | None:
    """Tokens in every row, where the columns fix it: `ndarray:<int>:<length>`."""
    encodings = [e for n, e in stream.columns.items() if n in TOKEN_COLUMNS]
    found = [re.fullmatch(r"ndarray:[^:]*:(\d+)", encoding) for encoding in encodings]
    return sum(int(each[1]) for each in found if each) if found and all(found) else None


def token_samples(stream: Stream, loader: Loader) -> list[TokenSample]:
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


def per_sample(stream: Stream, loader: Loader) -> PerSample | None:
    """Tokens of a mean sample that the model sees; None where the loader itself tokenizes text."""
    if stream.trusted_manifest and stream.trusted_manifest.totals.samples:
        return PerSample(
            stream.trusted_manifest.totals.seen_tokens / stream.trusted_manifest.totals.samples,
            True,
        )
    if (length := row_length(stream)) is not None:
        return PerSample(length, True)
    lengths = [s.length for s in token_samples(stream, loader)]
    return PerSample(sum(lengths) / len(lengths), False) if lengths else None


def added_eos(stream: Stream, loader: Loader) -> float:
    """EOS tokens of a mean sample that no stream holds: the finetuning loader adds one to a last answer that has none.

    Whether answers have one follows from the template, or from the tokenizer, so the first samples tell. A row that is full gets none.
    """
    manifest = stream.trusted_manifest
    if loader.is_text or manifest is None or not kind_of(manifest.encoding).has_targets:
        return 0.0
    found = [s.ids for s in token_samples(stream, loader)]
    without = sum(bool(len(ids)) and int(ids[-1]) != manifest.tokenizer.eos_id for ids in found)
    full = manifest.totals.cut_rows / max(1, manifest.totals.samples)
    return without / max(1, len(found)) * (1 - full)


def losses_per_sample(stream: Stream, loader: Loader) -> PerSample | None:
    """The same of tokens with a loss. Counted where the manifest was made for this length and these targets."""
    manifest = stream.trusted_manifest
    if manifest and manifest.totals.samples and is_trained_alike(stream, loader):
        return PerSample(manifest.totals.loss_tokens / manifest.totals.samples, True)
    found, targets = token_samples(stream, loader), loader.target_policies
    if not found or targets is None:
        return None
    if loader.is_text:
        losses = np.array([min(s.length, targets.max_seq_len) - 1 for s in found], np.int64)
    else:
        losses = labels(found, targets).losses()
    return PerSample(float(losses.mean()), False)


def is_seen_alike(stream: Stream, loader: Loader) -> bool:
    """Whether the loader cuts of each sample what was counted as cut when it was converted: as a rule nothing."""
    manifest, limit = stream.trusted_manifest, loader.max_seq_len
    if manifest is None or limit is None or manifest.encoding.max_seq_len == limit:
        return True
    return not manifest.totals.cut_rows and manifest.totals.longest <= limit


def is_trained_alike(stream: Stream, loader: Loader) -> bool:
    """Whether the loader trains of each sample what was counted as trained when it was converted."""
    manifest = stream.trusted_manifest
    if manifest is None or not is_seen_alike(stream, loader):
        return False
    card = manifest.tokenizer
    if loader.is_text and card.pad_id is not None and card.pad_id == card.eos_id:
        return False  # that loader takes every padding token out of the loss, and with it EOS
    if not kind_of(manifest.encoding).has_targets:
        return True
    made, wanted = targets_of(manifest.encoding), loader.target_policies
    return (
        wanted is not None
        and replace(wanted, max_seq_len=made.max_seq_len, too_long=made.too_long) == made
    )


def labels(found: Sequence[TokenSample], targets: Targets) -> Labels:
    """What the loader trains of the samples, without the EOS that it appends."""
    ids = Ragged.of([side for sample in found for turn in sample.turns for side in turn], np.int64)
    counts = np.array([len(sample.turns) for sample in found], np.int64)
    return label(targets, Turns(ids, counts), None)


def largest_id(stream: Stream, loader: Loader) -> int | None:
    """The largest token id of the stream, or of its first samples."""
    if stream.trusted_manifest:
        return stream.trusted_manifest.totals.largest_id
    tops = [int(s.ids.max()) for s in token_samples(stream, loader) if s.length]
    return max(tops, default=None)


def longest(stream: Stream, loader: Loader) -> int | None:
    """Tokens of the longest sample, or of the longest of the first ones."""
    if stream.trusted_manifest:
        return stream.trusted_manifest.totals.longest
    fixed = row_length(stream)
    return fixed or max((s.length for s in token_samples(stream, loader)), default=None)


def bytes_columns(stream: Stream) -> Sequence[str]:
    """Token columns without a dtype of their own, as older streams have them."""
    return [n for n in TOKEN_COLUMNS if stream.columns.get(n) == "bytes"]
