"""Tokens of all samples of a stream, as the loader takes them: counted by a manifest or by rows of
one length, else an Estimate.

Without a manifest the first samples of the first shard stand for the stream. A stream sorted by
length or by source looks different further on.
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
from mdsmix.shards.token_ids import Turn, layout_of, turns_of
from mdsmix.table import UNKNOWN, Estimate, about, is_known

TOKEN_COLUMNS = ("tokens", "input_ids", "labels")


def fixed_row_length(stream: StreamInMix) -> int | None:
    """Tokens in every row, where the columns fix it: `ndarray:<int>:<length>`."""
    held = [e for name, e in stream.columns.items() if name in TOKEN_COLUMNS]
    found = [int(n) for e in held for n in re.findall(r"^ndarray:[^:]*:(\d+)$", e)]
    return sum(found) if held and len(found) == len(held) else None


def read_head_turns(stream: StreamInMix, loader: Loader) -> Turns:
    """The token ids of the stream's first samples. A sample without ids, or whose ids cannot be
    read, is left out.
    """
    dtype, found = str(loader.dataset.get("token_encoding_type", "int64")), list[list[Turn]]()
    for sample in stream.head.samples:
        if layout_of(sample) == ("tokens",) and "text" in sample:
            continue  # the loader reads the text
        with suppress(MixRefused, ValueError, TypeError, OverflowError):
            found += [turns] if (turns := turns_of(sample, dtype)) else []
    ids = Ragged.of([side for turns in found for turn in turns for side in turn], np.int64)
    return Turns(ids, np.array([*map(len, found)], np.int64))


Floats = NDArray[np.float64]
Lengths = tuple[Floats, Floats]
"Lengths of samples, and how many samples have each."
POINTS = 64
"Points between two powers of two. Lengths of samples are taken to be spread evenly over them."


def expand_histogram(totals: Totals) -> Lengths:
    """The lengths of samples, spread evenly within the manifest's counts by powers of two."""
    lows = np.array([1 << int(key.removeprefix("2^")) for key in totals.lengths], np.float64)
    least, most = np.minimum([lows, 2 * lows - 1], totals.longest)
    lengths = np.linspace(least, most, POINTS)
    samples = np.array([*totals.lengths.values()], np.float64) / POINTS
    return lengths.ravel(), np.tile(samples, POINTS)


def mean_longest_row(streams: Sequence[tuple[Lengths, float]], rows: int, multiple: int) -> float:
    """Tokens of the longest of `rows` rows, on average, rounded up to `multiple`. `streams`: each
    stream's lengths, and its part of the rows.
    """
    lengths = np.concatenate([lengths for (lengths, _), _ in streams])
    parts = np.concatenate([samples * (n / max(1, samples.sum())) for (_, samples), n in streams])
    order = np.argsort(lengths)
    as_short = (np.cumsum(parts[order]) / parts.sum()) ** rows
    return float(multiple * np.ceil(lengths[order] / multiple) @ np.diff(as_short, prepend=0))


class TokenCount(NamedTuple):
    """Tokens of all samples of a stream."""

    kept: float
    "Tokens that the model sees."
    cut: float
    "Tokens that were cut off when converting, or that the loader cuts off."


def count_tokens(stream: StreamInMix, loader: Loader) -> TokenCount:
    """Count the tokens of all samples as they are trained: cut to max_seq_len, and with the EOS
    that the loader appends. UNKNOWN if the loader itself tokenizes.
    """
    stored = count_stored_tokens(stream, loader)
    return stored._replace(kept=stored.kept + count_added_eos(stream, loader))


def count_stored_tokens(stream: StreamInMix, loader: Loader) -> TokenCount:
    """Count the same tokens without the EOS that the loader appends."""
    samples, limit, is_counted = stream.index.samples, loader.row_limit, not stream.survey
    if (fixed := fixed_row_length(stream)) is not None:
        kept, cut = samples * min(fixed, limit), samples * max(0, fixed - limit)
        return TokenCount(about(kept, is_counted), about(cut, is_counted))
    if stream.trusted_manifest is None:
        lengths = read_head_turns(stream, loader).samples.lengths
        mean = np.minimum(lengths, limit).mean() if len(lengths) else UNKNOWN
        return TokenCount(Estimate(samples * mean), UNKNOWN)
    totals = stream.trusted_manifest.totals
    if is_seen_alike(stream, loader):
        cut = totals.cut_tokens + totals.truncated_tokens
        kept = totals.seen_tokens - totals.given_eos
        return TokenCount(about(kept, is_counted), about(cut, is_counted))
    sizes, counts = expand_histogram(totals)
    part = float(np.minimum(sizes, limit) @ counts) / max(1.0, float(sizes @ counts))
    within = totals.tokens * part
    return TokenCount(Estimate(within), Estimate(totals.tokens + totals.truncated_tokens - within))


def count_trained(stream: StreamInMix, loader: Loader) -> float:
    """Positions of all samples that give a loss: counted where the stream was converted with the
    loader's targets, else an Estimate or UNKNOWN.
    """
    if (manifest := stream.trusted_manifest) and is_trained_alike(stream, loader):
        return about(manifest.totals.loss_tokens, not stream.survey)
    found, targets = read_head_turns(stream, loader), loader.target_policies
    if not len(found.counts) or targets is None:
        return UNKNOWN
    if loader.is_text:
        losses = np.minimum(found.samples.lengths, targets.max_seq_len) - 1
    else:
        losses = Labels(targets, found, None).losses()
    return Estimate(stream.index.samples * losses.mean())


def count_added_eos(stream: StreamInMix, loader: Loader) -> float:
    """Count the EOS tokens that the finetuning loader appends to all samples: one to each that ends
    without EOS and is not full.

    Manifests of earlier commits do not count them. Then the first samples stand for all, since the
    template or the tokenizer decides whether samples end in EOS.
    """
    manifest, encoding = stream.trusted_manifest, stream.encoding
    if loader.is_text or manifest is None or encoding is None:
        return 0
    totals, limit, made = manifest.totals, loader.row_limit, encoding.max_seq_len
    has_same_room = limit == made or totals.longest < min(limit, made)
    if not kind_of(encoding).gets_eos:
        # Pieces of a long document, and rows of joined ones, are full, but for a loader of longer
        # rows.
        is_plain = "labels" in encoding.columns and totals.longest == made < limit
        return Estimate(0) if is_plain else 0
    if totals.is_eos_counted:
        return about(totals.given_eos, has_same_room and not stream.survey)
    heads = read_head_turns(stream, loader).samples
    ends = heads.values[heads.offsets[1:][heads.lengths > 0] - 1]
    without = float((ends != manifest.tokenizer.eos_id).mean()) if len(ends) else 0.0
    added = (totals.samples - totals.cut_rows) * without
    return about(added, not without or (without == 1 and totals.longest < limit))


def is_seen_alike(stream: StreamInMix, loader: Loader) -> bool:
    """Whether the loader cuts the same tokens off each sample as conversion counted, which is
    usually none.
    """
    manifest, limit = stream.trusted_manifest, loader.max_seq_len
    if manifest is None or limit is None or manifest.encoding.max_seq_len == limit:
        return True
    return not manifest.totals.cut_rows and manifest.totals.longest <= limit


def is_trained_alike(stream: StreamInMix, loader: Loader) -> bool:
    """Whether the loader trains the same positions of each sample as conversion counted."""
    if (manifest := stream.trusted_manifest) is None or not is_seen_alike(stream, loader):
        return False
    card = manifest.tokenizer
    if loader.is_text and card.pad_id == card.eos_id is not None:
        # the text loader masks every padding token from the loss, and here EOS is the padding token
        return False
    return not stream.has_targets or has_policies_of(manifest.encoding, loader)


def has_policies_of(encoding: Encoding, loader: Loader) -> bool:
    """Whether a stream was converted with the loader's policies on prompts and responses."""
    made, wanted = targets_of(encoding), loader.target_policies
    return (
        wanted is not None
        and replace(wanted, max_seq_len=made.max_seq_len, too_long=made.too_long) == made
    )


def estimate_lengths(stream: StreamInMix, loader: Loader) -> Lengths | None:
    """The lengths of a stream's samples after the loader has cut them. None where they are not
    known, as where the loader tokenizes.
    """
    samples, manifest = stream.index.samples, stream.trusted_manifest
    if (fixed := fixed_row_length(stream)) is not None:
        lengths, counts = np.array([fixed], np.float64), np.array([samples], np.float64)
    elif manifest and not manifest.totals.image_tokens:
        lengths, counts = expand_histogram(manifest.totals)
        lengths = lengths + float(count_added_eos(stream, loader)) / max(1, samples)
    elif samples and is_known(tokens := count_tokens(stream, loader).kept):
        # Not counted: lengths are spread evenly from 0 to twice the mean.
        lengths, counts = np.linspace(0, 2 * tokens / samples, POINTS), np.ones(POINTS)
    else:
        return None
    return np.minimum(lengths, loader.row_limit), counts
