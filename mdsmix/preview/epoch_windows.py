"""The samples and tokens that an epoch draws from each stream, and the warnings of a preview.

The tokens of an epoch are computed without reading every sample: for each stream, the number of
samples times their mean length. The mean length comes from the stream's manifest, or from its first
samples if the stream has no manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mdsmix.frozen import frozen
from mdsmix.load.internals import Ids
from mdsmix.load.layout import NO_SAMPLE, EpochLayout
from mdsmix.messages import choose_verb, join_names, plural
from mdsmix.mix.epoch.stream_counts import count_tokens, find_fixed_row_length
from mdsmix.mix.streams.mix import Loader, StreamInMix
from mdsmix.preview.options import PreviewOptions
from mdsmix.preview.shard_reader import has_ids
from mdsmix.preview.step_rows import Loaders, Step
from mdsmix.table import UNKNOWN, is_known, mark_estimate

Floats = NDArray[np.float64]


def sample_tokens(stream: StreamInMix, loader: Loader) -> float:
    """Return the mean number of tokens in a sample of the stream, as the model sees the sample.

    The number is marked as an estimate unless all samples have one length. Return UNKNOWN if the
    loader tokenizes the stream.
    """
    if not has_ids(stream):
        return UNKNOWN
    mean_tokens = count_tokens(stream, loader).in_rows / max(1, stream.index.samples)
    is_exact = find_fixed_row_length(stream) is not None
    return mark_estimate(mean_tokens, is_exact=is_exact)


@frozen
class Windows:
    """The samples and tokens that each window of an epoch draws from each stream. A window is a
    run of steps; all windows have about the same number of steps.
    """

    edges: Sequence[int]
    "The first step of each window, and at last the end: 0, 10, 20 for two windows of ten steps."
    samples: Floats
    "float64 [windows, streams]: samples."
    sizes: Floats
    "float64 [windows, streams]: tokens if known for every stream, otherwise samples."
    unit: str
    "The unit of `sizes`: tokens or samples."


def cut_into_windows(
    layout: EpochLayout,
    ids: Ids,
    mean_tokens: Sequence[float],
    max_windows: int,
    first_step: int = 0,
) -> Windows:
    """Cut the rest of an epoch into at most `max_windows` windows of steps, and count the samples
    of each.

    Args:
        layout: knows the stream of each sample id.
        ids: int64 [steps, ranks, drawn], sample ids from `first_step` on.
        mean_tokens: mean tokens of a sample, for each stream.
        max_windows: the most windows. If there are fewer steps, each step is a window.
        first_step: the number of the first of these steps in its epoch.
    """
    num_windows = min(max_windows, len(ids))
    edges = np.linspace(0, len(ids), num_windows + 1).astype(np.int64).tolist()
    samples = np.zeros((num_windows, len(layout.names)), np.float64)
    for number, (start, stop) in enumerate(pairwise(edges)):
        drawn = ids[start:stop]
        streams = layout.find_streams(drawn[drawn != NO_SAMPLE])
        samples[number] = np.bincount(streams, minlength=len(layout.names))
    has_tokens = all(map(is_known, mean_tokens))
    return Windows(
        edges=[first_step + edge for edge in edges],
        samples=samples,
        sizes=samples * np.array(mean_tokens) if has_tokens else samples,
        unit="tokens" if has_tokens else "samples",
    )


@frozen(kw_only=True)
class Preview:
    """The first steps of a run, and the rest of its epoch in windows."""

    options: PreviewOptions
    layout: EpochLayout
    loaders: Loaders
    ratio: float
    "The packing ratio: samples that are drawn for each packed row; 1 without packing."
    first: int
    "The number of the step from which the epoch is previewed."
    ids: Ids
    "int64 [steps, ranks, drawn]: sample ids of the rest of the epoch."
    steps: Sequence[Step]
    tokens: Sequence[float]
    "Mean tokens of a sample, for each stream; see `sample_tokens`."
    windows: Windows


def list_preview_warnings(preview: Preview) -> Iterator[str]:
    """Yield a preview's warnings: faults of the run first, steps that were not read last."""
    windows = preview.windows
    loaders = preview.loaders
    # Packing may draw more tokens than fit. Then the epoch's figures count samples that the model
    # never sees.
    positions = loaders.world.batch * loaders.rules.max_seq_len
    drawn = windows.sizes.sum() / len(preview.ids)
    if preview.ratio > 1 and windows.unit == "tokens" and drawn > positions:
        yield (
            f"packing_ratio {preview.ratio:g} draws {drawn:,.0f} tokens a step on average, but a "
            f"batch has only {positions:,} positions. Samples that do not fit wait for later steps "
            "and are dropped at the end, but the epoch's figures count them. Set a smaller "
            "packing_ratio."
        )
    yield from warn_of_idle_devices(preview.ids, preview.first)
    text_streams = [stream.name for stream in loaders.reader.streams if not has_ids(stream)]
    if text_streams:
        yield (
            f"{join_names(text_streams)}: the loader tokenizes "
            f"{choose_verb(text_streams, 'its', 'their')} text, so the number of tokens is unknown "
            "and shares are shares of samples. Convert the text with mdsmix to see tokens."
        )
    unread = [step.step for step in preview.steps if step.is_unread]
    if unread:
        yield (
            f"{plural(len(unread), 'step')} from step {unread[0]:,} on were not read, because "
            f"their samples need more than {preview.options.read:,} bytes: raise --read."
        )


def warn_of_idle_devices(ids: Ids, first_step: int) -> Iterator[str]:
    """Yield a warning if in a step only some of the devices have a batch, so that training hangs.

    Args:
        ids: int64 [steps, ranks, drawn], sample ids from `first_step` on.
    """
    devices = ids.shape[1]
    # For each step, the number of devices that draw no sample.
    idle_devices = (ids == NO_SAMPLE).all(axis=2).sum(axis=1)
    uneven_steps = np.flatnonzero((idle_devices > 0) & (idle_devices < devices))
    if len(uneven_steps):
        step = int(uneven_steps[0])
        yield (
            f"From step {first_step + step:,} of the epoch on, {idle_devices[step]:,} of "
            f"{devices:,} devices have no batch while the others have a batch, so training hangs. "
            "The cause is batching_method: device_per_stream. End training before this step with "
            "max_duration, or use another batching_method."
        )
