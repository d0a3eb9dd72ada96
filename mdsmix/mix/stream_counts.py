"""What all samples of a stream hold, as the loader takes them: counted by a manifest or by rows of one length, else an Estimate.

Without a manifest the first samples of the first shard stand for the stream. A stream sorted by length or by source looks different
further on. A manifest counts lengths by powers of two; between two powers they are taken to be spread evenly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.labels import Labels, Targets, Turns, label
from mdsmix.errors import MixRefused
from mdsmix.kinds import kind_of
from mdsmix.kinds.finetuning import targets_of
from mdsmix.mix.streams import LONGEST, Loader, StreamInMix
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Totals
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.token_ids import Ids, Turn, layout_of, turns_of
from mdsmix.table import UNKNOWN, Estimate, about, is_known

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


@dataclass(frozen=True, slots=True)
class LengthCounts:
    """How long samples are. A manifest counts them by powers of two; between two powers they are taken to be spread evenly."""

    bins: Sequence[tuple[int, int, int]]
    "Least and largest length, and how many samples are between the two."

    @classmethod
    def of(cls, totals: Totals) -> LengthCounts:
        longest, powers = totals.longest, dict[str, int](totals.lengths)
        return cls([(*_between(key, longest), n) for key, n in powers.items()])

    @property
    def longest(self) -> int:
        return max((high for _, high, _ in self.bins), default=0)

    def cut_at(self, limit: int) -> LengthCounts:
        return LengthCounts([(min(low, limit), min(high, limit), n) for low, high, n in self.bins])

    def within(self, limit: int) -> float:
        """The share of the tokens that stand before this place of their rows."""
        whole = sum(n * (low + high) / 2 for low, high, n in self.bins)
        kept = sum(n * _mean_within(low, high, limit) for low, high, n in self.bins)
        return kept / max(1.0, whole)

    def up_to(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of the samples that have at most so many tokens."""
        found = np.zeros(len(lengths))
        for low, high, n in self.bins:
            found += n * np.clip((lengths - low + 1) / (high - low + 1), 0, 1)
        return found / max(1, sum(n for _, _, n in self.bins))


def _between(key: str, longest: int) -> tuple[int, int]:
    power = int(key.removeprefix("2^"))
    return min(1 << power, longest), min((2 << power) - 1, longest)


def _mean_within(low: int, high: int, limit: int) -> float:
    """The mean of lengths from `low` to `high`, each counted up to `limit`."""
    if limit <= low or high == low:
        return min(limit, high)
    top = min(high, limit)
    return ((low + top) / 2 * (top - low) + limit * (high - top)) / (high - low)


def mean_longest(
    streams: Sequence[tuple[LengthCounts, float]], rows: int, multiple: int = 1
) -> float:
    """Tokens of the longest of so many rows, on average, rounded up to a multiple. `streams`: lengths, and how many of the rows' samples
    are of them."""
    total = sum(n for _, n in streams)
    top = max((lengths.longest for lengths, n in streams if n), default=0)
    step = max(multiple, top >> 16)
    widths = np.arange(0, top, step, dtype=np.float64)
    shorter = sum(
        (lengths.up_to(widths) * (n / total) for lengths, n in streams), np.zeros(len(widths))
    )
    return step * float((1 - np.minimum(1.0, shorter) ** rows).sum())


def tokens_of(stream: StreamInMix, loader: Loader) -> float:
    """Tokens that the model sees of all samples, without an EOS that the loader adds; not known where the loader itself tokenizes."""
    return _kept_and_cut(stream, loader)[0]


def cut_of(stream: StreamInMix, loader: Loader) -> float:
    """Tokens that the loader cuts off."""
    return _kept_and_cut(stream, loader)[1]


def _kept_and_cut(stream: StreamInMix, loader: Loader) -> tuple[float, float]:
    samples, limit = stream.index.samples, loader.max_seq_len or LONGEST
    if (fixed := row_length(stream)) is not None:
        whole, cut = samples * min(fixed, limit), samples * max(0, fixed - limit)
        return about(whole, not stream.survey), about(cut, not stream.survey)
    if manifest := stream.trusted_manifest:
        found = _counted(manifest, limit)
        return (Estimate(found[0]), Estimate(found[1])) if stream.survey else found
    lengths = [min(sample.length, limit) for sample in token_samples(stream, loader)]
    if not lengths:
        return UNKNOWN, UNKNOWN
    return Estimate(samples * sum(lengths) / len(lengths)), UNKNOWN


def _counted(manifest: Manifest, limit: int) -> tuple[float, float]:
    """What was cut is counted for the length of the conversion; a row that is no longer than the loader's is not cut."""
    totals, made_for = manifest.totals, manifest.encoding.max_seq_len
    if limit == made_for or (limit > made_for and not totals.cut_tokens):
        return totals.seen_tokens, totals.cut_tokens
    if totals.longest <= limit and not totals.image_tokens:
        return totals.tokens, 0
    kept = totals.tokens * LengthCounts.of(totals).within(limit)
    return Estimate(kept), Estimate(totals.tokens - kept)


def trained_of(stream: StreamInMix, loader: Loader) -> float:
    """Positions of all samples that give a loss: counted, where the stream was converted for what the loader trains."""
    manifest = stream.trusted_manifest
    if manifest and is_trained_alike(stream, loader):
        return about(manifest.totals.loss_tokens, not stream.survey)
    found, targets = token_samples(stream, loader), loader.target_policies
    if not found or targets is None:
        return UNKNOWN
    if loader.is_text:
        losses = np.array([min(s.length, targets.max_seq_len) - 1 for s in found], np.int64)
    else:
        losses = labels(found, targets).losses()
    return Estimate(stream.index.samples * float(losses.mean()))


def eos_of(stream: StreamInMix, loader: Loader) -> float:
    """EOS tokens of all samples that no stream holds: the finetuning loader adds one to a last answer that has none and is not full.

    Whether answers have one follows from the template, or from the tokenizer, so the first samples tell.
    """
    manifest = stream.trusted_manifest
    if loader.is_text or manifest is None or not kind_of(manifest.encoding).has_targets:
        return 0
    found = [s.ids for s in token_samples(stream, loader)]
    without = sum(bool(len(ids)) and int(ids[-1]) != manifest.tokenizer.eos_id for ids in found)
    if not without:
        return 0
    totals, limit = manifest.totals, loader.max_seq_len or LONGEST
    added = (totals.samples - totals.cut_rows) * without / len(found)
    # How many rows are full to the last token is not counted.
    return about(added, without == len(found) and totals.longest < limit)


def is_seen_alike(stream: StreamInMix, loader: Loader) -> bool:
    """Whether the loader cuts of each sample what was counted as cut when it was converted: as a rule nothing."""
    manifest, limit = stream.trusted_manifest, loader.max_seq_len
    if manifest is None or limit is None or manifest.encoding.max_seq_len == limit:
        return True
    return not manifest.totals.cut_rows and manifest.totals.longest <= limit


def is_trained_alike(stream: StreamInMix, loader: Loader) -> bool:
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


def lengths_of(stream: StreamInMix, loader: Loader) -> LengthCounts | None:
    """As the loader cuts them. None where it tokenizes itself."""
    limit, samples = loader.max_seq_len or LONGEST, stream.index.samples
    if (fixed := row_length(stream)) is not None:
        return LengthCounts([(fixed, fixed, samples)]).cut_at(limit)
    if (manifest := stream.trusted_manifest) and not manifest.totals.image_tokens:
        return LengthCounts.of(manifest.totals).cut_at(limit)
    tokens = tokens_of(stream, loader)
    if not samples or not is_known(tokens):
        return None
    mean = round(tokens / samples)  # nobody counted: from nothing to twice the mean
    return LengthCounts([(0, 2 * mean, samples)]).cut_at(limit)
