"""The samples and tokens that an epoch draws from each stream, and a preview's warnings as
sentences.

Tokens of an epoch are found without reading all samples: a stream's samples times the mean that its
manifest counted, else the mean of its first samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mdsmix.load.internals import Ids
from mdsmix.load.layout import NO_SAMPLE, EpochLayout
from mdsmix.messages import does, listed, plural
from mdsmix.mix.epoch.stream_counts import count_tokens, fixed_row_length
from mdsmix.mix.streams.mix import Loader, StreamInMix
from mdsmix.preview.options import Asked
from mdsmix.preview.shard_reader import has_ids
from mdsmix.preview.step_rows import Loaders, Step
from mdsmix.table import UNKNOWN, about, is_known

Floats = NDArray[np.float64]


def sample_tokens(stream: StreamInMix, loader: Loader) -> float:
    """Mean tokens of a sample as the model sees them, exact where all samples are equally long.
    UNKNOWN where the loader tokenizes.
    """
    if not has_ids(stream):
        return UNKNOWN
    tokens = count_tokens(stream, loader).kept / max(1, stream.index.samples)
    return about(tokens, fixed_row_length(stream) is not None)


@dataclass(frozen=True)
class Windows:
    """An epoch's steps cut into windows, with each stream's samples and tokens in every window."""

    edges: Sequence[int]
    "The first step of each window, then the end of the last."
    samples: Floats
    "float64 [windows, streams]."
    sizes: Floats
    "float64 [windows, streams]: tokens where they are known for every stream, else samples."
    unit: str
    "The unit of `sizes`: tokens or samples."


def windows_of(
    layout: EpochLayout, ids: Ids, tokens: Sequence[float], most: int, first: int = 0
) -> Windows:
    """The epoch from its step `first` on, cut into at most `most` windows.

    Args:
        ids: int64 [steps, ranks, drawn].
        tokens: mean tokens of a sample, for each stream.
    """
    edges = np.linspace(0, len(ids), min(most, len(ids)) + 1).astype(np.int64).tolist()
    parts = (ids[start:stop] for start, stop in pairwise(edges))
    streams = (layout.stream_of(part[part != NO_SAMPLE]) for part in parts)
    samples = np.array([np.bincount(n, minlength=len(layout.names)) for n in streams], np.float64)
    has_tokens = all(map(is_known, tokens))
    return Windows(
        edges=[first + edge for edge in edges],
        samples=samples,
        sizes=samples * np.array(tokens) if has_tokens else samples,
        unit="tokens" if has_tokens else "samples",
    )


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The result of a preview."""

    asked: Asked
    layout: EpochLayout
    loaders: Loaders
    ratio: float
    first: int
    "The step at which the epoch is entered."
    ids: Ids
    "int64 [steps, ranks, drawn]: sample ids of the rest of the epoch."
    steps: Sequence[Step]
    tokens: Sequence[float]
    "Mean tokens of a sample, for each stream, by `sample_tokens`."
    windows: Windows


def sentences(preview: Preview) -> Iterator[str]:
    """Warnings on the preview: faults first, steps that were not read last."""
    windows, loaders = preview.windows, preview.loaders
    positions = loaders.world.batch * loaders.rules.max_seq_len
    drawn = windows.sizes.sum() / len(preview.ids)
    # More tokens are drawn than fit, so figures of the epoch count drawn samples and not rows.
    if preview.ratio > 1 and windows.unit == "tokens" and drawn > positions:
        yield (
            f"packing_ratio {preview.ratio:g} draws on average {drawn:,.0f} tokens a step for {positions:,} positions, and "
            "figures of the epoch are of what is drawn: what does not fit waits for later steps, and is dropped in the end; take a smaller ratio."
        )
    yield from uneven(preview.ids, preview.first)
    if raw := [stream.name for stream in loaders.reader.streams if not has_ids(stream)]:
        yield (
            f"{listed(raw)}: the loader itself tokenizes {does(raw, 'its', 'their')} text, so tokens are not known here and shares are of "
            "samples; convert the text to see them."
        )
    if unread := [step.step for step in preview.steps if step.is_unread]:
        yield (
            f"{plural(len(unread), 'step')} from step {unread[0]:,} on were not read, since more than {preview.asked.read:,} bytes would have "
            "been: raise --read."
        )


def uneven(ids: Ids, first: int) -> Iterator[str]:
    """A warning where a step gives batches to some devices and none to others. `ids`: int64 [steps,
    ranks, drawn].
    """
    lacking = (ids == NO_SAMPLE).all(axis=2).sum(axis=1)
    found = np.flatnonzero((lacking > 0) & (lacking < ids.shape[1]))
    if len(found):
        yield (
            f"From step {first + int(found[0]):,} of the epoch on {lacking[found[0]]:,} of {ids.shape[1]:,} devices have no batch "
            "while others have: training waits for them for ever. Streaming lays out device_per_stream so; end the epoch before by max_duration, or "
            "use another batching_method."
        )
