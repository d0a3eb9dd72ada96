"""What an epoch draws of each stream, in windows of its steps: the lowest and the highest window say whether the mix is steady.

Tokens are told without reading a sample: a stream's samples times the mean that its manifest counted, else that of its first samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.load.layout import NOBODY, Ids, Layout
from mdsmix.mix.stream_counts import row_length, tokens_of, trained_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.table import Estimate, is_known

Floats = NDArray[np.float64]
SCATTERS = 6.5
"Standard deviations of a window's samples, drawn at random: of ten windows so drawn, one stream in hundreds lies so far apart."
APART = 0.1
"Of a stream's share: windows that lie nearer change no training."


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Tokens of a stream's sample as the model sees them."""

    mean: float
    is_exact: bool
    "Whether every sample has so many."
    how: str
    trained: float | None
    "The share of them that gives a loss; None where that is not known."


def sample_tokens(stream: StreamInMix, loader: Loader) -> SampleTokens | None:
    """None where nobody can tell, since the loader itself tokenizes."""
    tokens, losses = tokens_of(stream, loader)[0], trained_of(stream, loader)
    trained = losses / tokens if is_known(losses) and is_known(tokens) and tokens else None
    if (fixed := row_length(stream)) is not None and "text" not in stream.columns:
        size = float(min(fixed, loader.max_seq_len or fixed))
        return SampleTokens(size, True, "rows of one length", trained)
    if not is_known(tokens):
        return None
    source = "of the first samples" if isinstance(tokens, Estimate) else "in the manifest"
    mean = float(tokens) / max(1, stream.index.samples)
    return SampleTokens(mean, False, f"the mean {source}", trained)


@dataclass(frozen=True, slots=True)
class Windows:
    """What windows of an epoch's steps hold of each stream."""

    edges: NDArray[np.int64]
    "int64 [windows + 1]: the steps at which they begin, and the end."
    samples: Floats
    "float64 [windows, streams]."
    means: Floats | None
    "float64 [streams]: tokens of a sample; None where a stream's are not known."

    @property
    def tokens(self) -> Floats | None:
        """float64 [streams]: of the epoch."""
        return None if self.means is None else self.samples.sum(axis=0) * self.means

    @property
    def shares(self) -> Floats:
        """float64 [windows, streams]: of tokens, where these are known of every stream, else of samples."""
        sizes = self.samples if self.means is None else self.samples * self.means
        return np.asarray(sizes / sizes.sum(axis=1, keepdims=True))

    @property
    def epoch(self) -> Floats:
        """float64 [streams]: the shares in the whole epoch."""
        sizes = self.samples.sum(axis=0) if self.tokens is None else self.tokens
        return np.asarray(sizes / sizes.sum())

    @property
    def drifts(self) -> list[int]:
        """The streams whose windows lie farther apart than chance puts them, the one that drifts most before the others."""
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.ptp(self.shares, axis=0) / self.epoch
            least = np.maximum(APART, SCATTERS / np.sqrt(self.samples.mean(axis=0)))
        return [int(stream) for stream in np.argsort(-apart) if apart[stream] > least[stream]]


def samples_by_step(layout: Layout, ids: Ids) -> Floats:
    """float64 [steps, streams]: what the steps hold of each stream. `ids`: int64 [steps, ranks, drawn]."""
    streams = len(layout.names)
    counted = (
        np.bincount(layout.stream_of(step[step != NOBODY]), minlength=streams) for step in ids
    )
    return np.array(list(counted), np.float64)


def windows_of(samples: Floats, lengths: Sequence[SampleTokens | None], most: int) -> Windows:
    """The epoch cut into at most so many windows. `samples`: float64 [steps, streams]."""
    edges = np.linspace(0, len(samples), min(most, len(samples)) + 1).astype(np.int64)
    means = [each.mean for each in lengths if each]
    return Windows(
        edges=edges,
        samples=np.add.reduceat(samples, edges[:-1], axis=0),
        means=np.array(means) if len(means) == len(lengths) else None,
    )
