"""What is known of one stream: its counts, lengths and shards, each with what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.kinds import kind_of
from mdsmix.mix.first_samples import (
    added_eos,
    losses_per_sample,
    per_sample,
    row_length,
    token_samples,
)
from mdsmix.mix.plan.figures import UNKNOWN, Basis, Figure, total
from mdsmix.mix.plan.padding import Lengths
from mdsmix.mix.plan.survey import Survey
from mdsmix.mix.spread import most_of_losses, most_of_tokens, of_draw
from mdsmix.mix.streams import Loader, Stream
from mdsmix.shards.manifest import Manifest

Sizes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Each shard of a stream, in order; int64 [n] all of them."""

    samples: Sizes
    stored: Sizes
    "Bytes that are fetched."
    raw: Sizes
    packed: Sizes
    "Bytes of the compressed file, 0 where there is none."
    is_remote: bool
    "The shards are fetched; else they lie on the node's disk, and there they stay."
    keeps_packed: bool
    "keep_zip: the compressed file stays beside the unpacked one."

    @property
    def kept(self) -> Sizes:
        """Bytes on the node's disk, once read."""
        return self.raw + self.packed if self.keeps_packed else self.raw

    @property
    def at_most(self) -> Sizes:
        """Bytes on the disk while a shard is unpacked."""
        return self.raw + self.packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One stream, as the loader will take it."""

    name: str
    survey: Survey | None
    "Of a stream that is not published."
    samples: Figure
    tokens: Figure
    "Of all samples, without what the loader cuts off."
    trained: Figure
    cut: Figure
    deviations: tuple[float, float]
    "Of a sample's tokens, and of its trained ones: at most, where a manifest counts lengths by powers of two."
    lengths: Lengths | None
    "None where the loader itself tokenizes."
    shards: Shards
    index_bytes: int

    def tokens_of(self, drawn: float) -> Figure:
        """Tokens in so many samples of it."""
        return self._of(self.tokens, drawn, self.deviations[0])

    def trained_of(self, drawn: float) -> Figure:
        return self._of(self.trained, drawn, self.deviations[1])

    def cut_of(self, drawn: float) -> Figure:
        return self._of(self.cut, drawn, 0.0)

    def _of(self, whole: Figure, drawn: float, deviation: float) -> Figure:
        """What is drawn of unequal rows is a mean, and has a deviation; whole passes have none."""
        samples = round(self.samples.known)
        if not samples or whole.value is None:
            return whole if whole.value is None else Figure(0.0)
        mean = whole.times(drawn / samples)
        spread = of_draw(deviation, round(drawn), samples)
        if not spread:
            return mean
        return Figure(mean.value, "estimated", math.hypot(spread, mean.error or 0.0))


def facts_of(stream: Stream, loader: Loader, survey: Survey | None) -> Facts:
    """From index and manifest; of a stream without one, and of answers that may lack their EOS, from the head of the first shard."""
    tokens, cut = _tokens(stream, loader)
    eos = Figure(0) if survey else _eos(stream, loader)
    added = eos.known / max(1, stream.index.samples)
    errors = survey.errors if survey else {}
    return Facts(
        name=stream.name,
        survey=survey,
        samples=_estimated(Figure(stream.index.samples, "exact"), survey, errors, "samples"),
        tokens=_estimated(total([tokens, eos]), survey, errors, "tokens"),
        trained=_estimated(_trained(stream, loader), survey, errors, "trained"),
        cut=_estimated(cut, survey, errors, "cut"),
        deviations=_deviations(stream, loader),
        lengths=_lengths(stream, loader, added),
        shards=_shards(stream, loader),
        index_bytes=len(stream.index.content),
    )


def _eos(stream: Stream, loader: Loader) -> Figure:
    """The EOS tokens that the loader adds. Answers have one or none of them has, as a rule: the first samples then say it of all."""
    added, samples = added_eos(stream, loader), stream.index.samples
    totals = stream.trusted_manifest and stream.trusted_manifest.totals
    full = totals.cut_rows / max(1, totals.samples) if totals else 0.0
    basis: Basis = "counted" if added in (0.0, 1 - full) else "estimated"
    return Figure(round(added * samples), basis if added else "exact")


def _estimated(
    figure: Figure, survey: Survey | None, errors: Mapping[str, float | None], what: str
) -> Figure:
    """The figure as an estimate, with its bar, where the stream is known from a survey alone."""
    if survey is None or figure.value is None:
        return figure
    error = errors.get(what)
    return Figure(figure.value, "estimated", None if error is None else error * figure.value)


def _tokens(stream: Stream, loader: Loader) -> tuple[Figure, Figure]:
    """Tokens of all samples that the loader takes, and those that it cuts off."""
    samples, limit = stream.index.samples, loader.max_seq_len or 0
    manifest, fixed = stream.trusted_manifest, row_length(stream)
    if fixed is not None and limit:
        return Figure(samples * min(fixed, limit)), Figure(samples * max(0, fixed - limit))
    if manifest:
        return _counted(manifest, limit)
    mean = per_sample(stream, loader)
    if mean is None:
        return UNKNOWN, UNKNOWN
    return Figure(samples * mean.tokens, "estimated"), UNKNOWN


def _counted(manifest: Manifest, limit: int) -> tuple[Figure, Figure]:
    """What was cut is counted for the length of the conversion; a row that is no longer than the loader's is not cut."""
    totals, made_for = manifest.totals, manifest.encoding.max_seq_len
    if limit == made_for or (limit > made_for and not totals.cut_tokens):
        return Figure(totals.seen_tokens, "counted"), Figure(totals.cut_tokens, "counted")
    if totals.longest <= limit and not totals.image_tokens:
        return Figure(totals.tokens, "counted"), Figure(0, "counted")
    whole = Lengths(
        mean=totals.tokens / max(1, totals.samples),
        longest=totals.longest,
        histogram=totals.lengths,
    )
    kept = totals.tokens * whole.share_within(limit)
    return Figure(kept, "estimated"), Figure(totals.tokens - kept, "estimated")


def _trained(stream: Stream, loader: Loader) -> Figure:
    """Positions with a loss: counted, where the stream was converted for what the loader trains."""
    samples, fixed, limit = stream.index.samples, row_length(stream), loader.max_seq_len or 0
    manifest = stream.trusted_manifest
    if fixed and limit and (manifest is None or not kind_of(manifest.encoding).has_targets):
        return Figure(samples * (min(fixed, limit) - 1))
    mean = losses_per_sample(stream, loader)
    if mean is None:
        return UNKNOWN
    return Figure(samples * mean.tokens, "counted" if mean.is_exact else "estimated")


def _deviations(stream: Stream, loader: Loader) -> tuple[float, float]:
    manifest = stream.trusted_manifest
    if row_length(stream) is not None:
        return 0.0, 0.0
    if manifest:
        totals, encoding = manifest.totals, manifest.encoding
        has_targets = kind_of(encoding).has_targets
        return most_of_tokens(totals, encoding), most_of_losses(totals, encoding, has_targets)
    heads = [sample.length for sample in token_samples(stream, loader)]
    deviation = float(np.std(heads)) if heads else 0.0
    return deviation, deviation


def _lengths(stream: Stream, loader: Loader, added: float) -> Lengths | None:
    """`added`: EOS tokens of a mean sample that the loader adds."""
    samples, limit = stream.index.samples, loader.max_seq_len or 0
    tokens, _ = _tokens(stream, loader)
    if tokens.value is None or not samples:
        return None
    manifest = stream.trusted_manifest
    if row_length(stream) is not None or manifest is None:
        heads = [] if row_length(stream) is not None else token_samples(stream, loader)
        longest = max((head.length for head in heads), default=round(tokens.value / samples))
        return Lengths(
            mean=tokens.value / samples, longest=min(longest, limit or longest), histogram={}
        )
    totals = manifest.totals
    if totals.image_tokens:  # their histogram counts one token an image
        return Lengths(mean=tokens.value / samples + added, longest=limit, histogram={})
    longest = totals.longest + math.ceil(added)
    return Lengths(
        mean=tokens.value / samples + added,
        longest=min(longest, limit or longest),
        histogram=totals.lengths,
    )


def _shards(stream: Stream, loader: Loader) -> Shards:
    settings = stream.settings
    entries = stream.shards
    keep = settings.get("keep_zip")
    keep = loader.dataset.get("keep_zip") if keep is None else keep
    remote = settings.get("remote")
    is_remote = bool(remote) and not stream.is_only_copy
    return Shards(
        samples=np.array([shard.samples for shard in entries], np.int64),
        stored=np.array([shard.stored.bytes for shard in entries], np.int64),
        raw=np.array([shard.raw_data.bytes for shard in entries], np.int64),
        packed=np.array([s.zip_data.bytes if s.zip_data else 0 for s in entries], np.int64),
        is_remote=is_remote,
        keeps_packed=bool(keep) or not is_remote,
    )
