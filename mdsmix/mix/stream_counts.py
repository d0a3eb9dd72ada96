"""What all samples of a stream hold, as the loader takes them: counted by a manifest or by rows of one length, else an Estimate.

Without a manifest the first samples of the first shard stand for the stream. A stream sorted by length or by source looks different
further on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mdsmix.kinds import kind_of
from mdsmix.kinds.finetuning import targets_of
from mdsmix.mix.first_samples import labels, row_length, token_samples
from mdsmix.mix.row_lengths import LengthCounts
from mdsmix.mix.streams import LONGEST, Loader, StreamInMix
from mdsmix.shards.manifest import Manifest
from mdsmix.table import UNKNOWN, Estimate, about, is_known


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
