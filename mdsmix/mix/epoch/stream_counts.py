"""Tokens of all samples of a stream, as the loader reads them: counted by a manifest or by rows of
one length, otherwise an Estimate.

Without a manifest the first samples of the first shard are taken as typical of the stream. That is
wrong for a stream sorted by length or by source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.labels import Labels, Turns
from mdsmix.errors import MixRefused
from mdsmix.kinds import kind_of
from mdsmix.kinds.finetuning import targets_of
from mdsmix.mix.streams.mix import Loader, StreamInMix
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Totals
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import Turn, decode_turns, find_id_columns
from mdsmix.table import UNKNOWN, Estimate, is_known, mark_estimate

TOKEN_COLUMNS = ("tokens", "input_ids", "labels")


def fixed_row_length(stream: StreamInMix) -> int | None:
    """Return the tokens of every row if the columns fix them, such as `ndarray:int32:2048`; None
    otherwise.
    """
    encodings = [e for name, e in stream.columns.items() if name in TOKEN_COLUMNS]
    total = 0
    for encoding in encodings:
        match = re.search(r"^ndarray:[^:]*:(\d+)$", encoding)
        if match is None:
            return None
        total += int(match[1])
    return total if encodings else None


def read_head_turns(stream: StreamInMix, loader: Loader) -> Turns:
    """Read the token ids of the stream's first samples. A sample is left out if it has no ids, or
    if they cannot be read.
    """
    dtype = str(loader.dataset.get("token_encoding_type", "int64"))
    samples = list[list[Turn]]()
    for sample in stream.head.samples:
        if find_id_columns(sample) == ("tokens",) and "text" in sample:
            continue  # the loader reads the text
        with suppress(MixRefused, ValueError, TypeError, OverflowError):
            turns = decode_turns(sample, dtype)
            if turns:
                samples.append(turns)
    sides = [side for turns in samples for turn in turns for side in turn]
    counts = np.array([len(turns) for turns in samples], np.int64)
    return Turns(Ragged.from_rows(sides, np.int64), counts)


Floats = NDArray[np.float64]
Lengths = tuple[Floats, Floats]
"Lengths of samples, and how many samples have each."
POINTS = 64
"Points between two powers of two. The lengths of samples are assumed to be spread evenly on them."


def expand_histogram(totals: Totals) -> Lengths:
    """Spread the lengths of samples evenly within the manifest's counts by powers of two."""
    lows = np.array([1 << int(key.removeprefix("2^")) for key in totals.lengths], np.float64)
    least, most = np.minimum([lows, 2 * lows - 1], totals.longest)
    lengths = np.linspace(least, most, POINTS)
    samples = np.array([*totals.lengths.values()], np.float64) / POINTS
    return lengths.ravel(), np.tile(samples, POINTS)


def mean_longest_row(streams: Sequence[tuple[Lengths, float]], rows: int, multiple: int) -> float:
    """Return the mean tokens of the longest of `rows` rows, rounded up to `multiple`.

    Args:
        streams: each stream's lengths, and its part of the rows.
    """
    lengths = np.concatenate([lengths for (lengths, _), _ in streams])
    shares = np.concatenate([samples * (n / max(1, samples.sum())) for (_, samples), n in streams])
    order = np.argsort(lengths)
    # The chance that all rows are at most as long as each length.
    all_as_short = (np.cumsum(shares[order]) / shares.sum()) ** rows
    rounded = multiple * np.ceil(lengths[order] / multiple)
    return float(rounded @ np.diff(all_as_short, prepend=0))


class TokenCount(NamedTuple):
    """Tokens of all samples of a stream."""

    kept: float
    "Tokens that the model sees."
    cut: float
    "Tokens that were cut off when converting, or that the loader cuts off."


def count_tokens(stream: StreamInMix, loader: Loader) -> TokenCount:
    """Count the tokens of all samples as they are trained: cut to max_seq_len, with the EOS that
    the loader appends. UNKNOWN if the loader itself tokenizes.
    """
    stored = count_stored_tokens(stream, loader)
    return stored._replace(kept=stored.kept + count_added_eos(stream, loader))


def count_stored_tokens(stream: StreamInMix, loader: Loader) -> TokenCount:
    """Count the same tokens without the EOS that the loader appends."""
    samples = stream.index.samples
    limit = loader.row_limit
    is_counted = not stream.survey
    fixed = fixed_row_length(stream)
    if fixed is not None:
        kept = samples * min(fixed, limit)
        cut = samples * max(0, fixed - limit)
        return TokenCount(mark_estimate(kept, is_counted), mark_estimate(cut, is_counted))
    if stream.trusted_manifest is None:
        lengths = read_head_turns(stream, loader).samples.lengths
        mean = np.minimum(lengths, limit).mean() if len(lengths) else UNKNOWN
        return TokenCount(Estimate(samples * mean), UNKNOWN)
    totals = stream.trusted_manifest.totals
    if is_seen_alike(stream, loader):
        cut = totals.cut_tokens + totals.truncated_tokens
        kept = totals.seen_tokens - totals.given_eos
        return TokenCount(mark_estimate(kept, is_counted), mark_estimate(cut, is_counted))
    sizes, counts = expand_histogram(totals)
    share = float(np.minimum(sizes, limit) @ counts) / max(1.0, float(sizes @ counts))
    within = totals.tokens * share
    return TokenCount(Estimate(within), Estimate(totals.tokens + totals.truncated_tokens - within))


def count_trained(stream: StreamInMix, loader: Loader) -> float:
    """Count the positions of all samples that give a loss. An Estimate or UNKNOWN unless the stream
    was converted with the loader's targets.
    """
    manifest = stream.trusted_manifest
    if manifest and is_trained_alike(stream, loader):
        return mark_estimate(manifest.totals.loss_tokens, not stream.survey)
    turns = read_head_turns(stream, loader)
    targets = loader.target_policies
    if not len(turns.counts) or targets is None:
        return UNKNOWN
    if loader.is_text:
        losses = np.minimum(turns.samples.lengths, targets.max_seq_len) - 1
    else:
        losses = Labels(targets, turns, None).losses()
    return Estimate(stream.index.samples * losses.mean())


def count_added_eos(stream: StreamInMix, loader: Loader) -> float:
    """Count the EOS tokens that the finetuning loader appends to all samples: one to each that ends
    without EOS and is not full.

    Manifests of earlier commits do not count them. Then the first samples are taken as typical: the
    template or the tokenizer decides whether samples end in EOS.
    """
    manifest = stream.trusted_manifest
    encoding = stream.encoding
    if loader.is_text or manifest is None or encoding is None:
        return 0
    totals = manifest.totals
    limit = loader.row_limit
    converted_limit = encoding.max_seq_len
    has_same_room = limit == converted_limit or totals.longest < min(limit, converted_limit)
    if not kind_of(encoding).gets_eos:
        # Pieces of a long document, and rows of joined ones, are full unless the loader has longer
        # rows.
        is_full = totals.longest == converted_limit < limit
        is_plain = "labels" in encoding.columns and is_full
        return Estimate(0) if is_plain else 0
    if totals.is_eos_counted:
        return mark_estimate(totals.given_eos, has_same_room and not stream.survey)
    heads = read_head_turns(stream, loader).samples
    ends = heads.values[heads.offsets[1:][heads.lengths > 0] - 1]
    without = float((ends != manifest.tokenizer.eos_id).mean()) if len(ends) else 0.0
    added = (totals.samples - totals.cut_rows) * without
    return mark_estimate(added, not without or (without == 1 and totals.longest < limit))


def is_seen_alike(stream: StreamInMix, loader: Loader) -> bool:
    """Check whether the loader cuts the same tokens off each sample as conversion counted, usually
    none.
    """
    manifest = stream.trusted_manifest
    limit = loader.max_seq_len
    if manifest is None or limit is None or manifest.encoding.max_seq_len == limit:
        return True
    return not manifest.totals.cut_rows and manifest.totals.longest <= limit


def is_trained_alike(stream: StreamInMix, loader: Loader) -> bool:
    """Check whether the loader trains the same positions of each sample as conversion counted."""
    manifest = stream.trusted_manifest
    if manifest is None or not is_seen_alike(stream, loader):
        return False
    card = manifest.tokenizer
    if loader.is_text and card.pad_id == card.eos_id is not None:
        # the text loader masks every padding token from the loss, and here EOS is the padding token
        return False
    return not stream.has_targets or has_policies_of(manifest.encoding, loader)


def has_policies_of(encoding: Encoding, loader: Loader) -> bool:
    """Check whether a stream was converted with the loader's policies on prompts and responses."""
    converted = targets_of(encoding)
    policies = loader.target_policies
    if policies is None:
        return False
    comparable = replace(policies, max_seq_len=converted.max_seq_len, too_long=converted.too_long)
    return comparable == converted


def estimate_lengths(stream: StreamInMix, loader: Loader) -> Lengths | None:
    """Return the lengths of a stream's samples after the loader has cut them. None if they are
    unknown, for example because the loader tokenizes.
    """
    samples = stream.index.samples
    manifest = stream.trusted_manifest
    fixed = fixed_row_length(stream)
    if fixed is not None:
        lengths = np.array([fixed], np.float64)
        return np.minimum(lengths, loader.row_limit), np.array([samples], np.float64)
    if manifest and not manifest.totals.image_tokens:
        lengths, counts = expand_histogram(manifest.totals)
        lengths = lengths + float(count_added_eos(stream, loader)) / max(1, samples)
        return np.minimum(lengths, loader.row_limit), counts
    tokens = count_tokens(stream, loader).kept if samples else UNKNOWN
    if not is_known(tokens):
        return None
    # Not counted: the lengths are assumed to be spread evenly from 0 to twice the mean.
    lengths = np.linspace(0, 2 * tokens / samples, POINTS)
    return np.minimum(lengths, loader.row_limit), np.ones(POINTS)
