"""The steps of an epoch and of a run: how many there are, and their samples, tokens and padding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.extra_loaders import EXTRA_LOADERS
from mdsmix.frozen import frozen
from mdsmix.messages import join_names, plural
from mdsmix.mix.epoch.draws import METHODS, Machines, count_per_device, get_batching_method
from mdsmix.mix.epoch.figures import StreamInEpoch
from mdsmix.mix.epoch.stream_counts import (
    estimate_lengths,
    estimate_longest_row,
    find_fixed_row_length,
)
from mdsmix.mix.streams.mix import Loader
from mdsmix.shards.token_ids import PREFERENCE_COLUMNS, find_id_columns
from mdsmix.table import UNKNOWN, Estimate, is_known, mark_estimate


@frozen(kw_only=True)
class EpochPlan:
    """The figures of all steps of an epoch."""

    steps: float
    samples: float
    "Samples in these steps. A sample that is drawn twice counts twice."
    tokens: float
    trained: float
    "Positions at which training computes a loss."
    dropped: float
    "Samples that are left over for an incomplete last batch, and dropped."


@frozen(kw_only=True)
class StepPlan:
    """The figures of the mean step of an epoch."""

    global_batch: int
    "Rows of a full step, of all devices together."
    device_batch: int
    rows: float
    "Mean rows of a step. The last step may have fewer rows than the others."
    drawn: float
    "Samples that a full step draws: more than its rows if samples are packed."
    positions: float
    "Rows times their padded length, in tokens."
    tokens: float
    "Tokens without padding."
    trained: float
    padding: float
    "The share of padding in the positions, 0 to 1."
    how_padded: str
    "A phrase such as `every row padded to max_seq_len, 2,048 tokens`."


@frozen(kw_only=True)
class RunPlan:
    """The figures of the whole run."""

    budget: str
    "The setting that gives the length of the run, such as `--tokens 100B`."
    steps: float
    epochs: float
    tokens: float
    trained: float
    hours: float
    "Hours at PlanOptions.speed; unknown without it."


@frozen(kw_only=True)
class StreamInRun(StreamInEpoch):
    """The figures of one stream, in an epoch and in the run."""

    share: float
    "The stream's share of the epoch's tokens, 0 to 1."
    padding: float
    """The share of padding in the positions of its rows. Unknown if rows are packed, because then
    streams share rows.
    """
    passes: float
    "How often the run sees each sample of the stream, on average."
    run_tokens: float
    run_trained: float


class Duration(NamedTuple):
    """The length of a run."""

    length: float
    unit: str
    "Composer's ep, ba, sp or tok, or `positions` for tokens with padding."
    setting: str
    "Where the length is set, such as `max_duration: 2ep`."


STEP_UNITS = {
    "ep": "epochs",
    "ba": "batches",
    "sp": "samples",
    "tok": "tokens",
    "positions": "tokens with padding",
}
"Unit of a duration -> the noun for a message."


def has_equal_rows(loader: Loader) -> bool:
    """Check whether all rows of all streams have one length. Every full step then has the same
    number of tokens.
    """
    lengths = {find_fixed_row_length(stream) for stream in loader.streams}
    return len(lengths) == 1 and lengths != {None}


def fit_packed_rows(
    streams: Sequence[StreamInEpoch], loader: Loader, machines: Machines
) -> Sequence[StreamInEpoch]:
    """Return the streams with no more tokens than fit into the packed rows of an epoch. If they
    have more, all are reduced in the same proportion.
    """
    tokens = sum(stream.tokens for stream in streams)
    rows = sum(stream.delivered for stream in streams) * machines.rows / machines.drawn
    positions = 0.0
    if loader.max_seq_len:
        positions = float(rows) * loader.max_seq_len
    if machines.packing == 1 or not is_known(tokens) or tokens <= positions:
        return streams
    share = Estimate(positions / float(tokens))
    fitted = []
    for stream in streams:
        fitted.append(replace(stream, tokens=stream.tokens * share, trained=stream.trained * share))
    return fitted


def plan_epoch(streams: Sequence[StreamInEpoch], loader: Loader, machines: Machines) -> EpochPlan:
    """Return the figures of all steps of an epoch. If the loader drops an incomplete last step, the
    samples of this step are not counted.

    Raises RecipeError if the samples do not fill one step.
    """
    delivered = int(sum(stream.delivered for stream in streams))
    if get_batching_method(loader) in METHODS:
        # These methods deliver only whole batches.
        drawn = delivered
        drops_last = True
    else:
        # Under `random` every device gets the same number of samples. Streaming repeats samples to
        # make the numbers equal.
        drawn = count_per_device(delivered, machines) * machines.ranks
        drops_last = bool(loader.section.get("drop_last"))

    steps, remainder = divmod(drawn, machines.drawn_together)
    dropped = 0
    if drops_last:
        dropped = remainder
    elif remainder:
        steps += 1
    if not steps:
        raise RecipeError(
            f"an epoch of {drawn:,} samples does not fill one step, which draws "
            f"{machines.drawn_together:,} samples: use a smaller batch, or more data."
        )

    trained_samples = drawn - dropped
    is_counted = not any(stream.survey for stream in loader.streams)
    is_exact = trained_samples == delivered or has_equal_rows(loader)
    share = mark_estimate(trained_samples / delivered, is_exact=is_exact)
    return EpochPlan(
        steps=mark_estimate(steps, is_exact=is_counted),
        samples=mark_estimate(trained_samples, is_exact=is_counted),
        tokens=sum(stream.tokens for stream in streams) * share,
        trained=sum(stream.trained for stream in streams) * share,
        dropped=mark_estimate(dropped, is_exact=is_counted),
    )


def plan_step(
    epoch: EpochPlan, streams: Sequence[StreamInEpoch], loader: Loader, machines: Machines
) -> StepPlan:
    """Return the mean step of an epoch. A last step that is not full has fewer rows, and lowers the
    mean.
    """
    steps = float(epoch.steps)
    row_length, how_padded = _find_padding(streams, loader, machines)
    rows = float(epoch.samples) * machines.batch / (steps * machines.drawn_together)
    positions = row_length * rows
    tokens = epoch.tokens / steps
    return StepPlan(
        global_batch=machines.batch,
        device_batch=machines.rows,
        rows=rows,
        drawn=mark_estimate(
            machines.drawn_together, is_exact=not isinstance(machines.packing, Estimate)
        ),
        positions=positions,
        tokens=tokens,
        trained=epoch.trained / steps,
        padding=_compute_padding(tokens, positions),
        how_padded=how_padded,
    )


def _compute_padding(tokens: float, positions: float) -> float:
    """Return the share of padding in the positions, 0 to 1; 0 if there are no positions.

    Args:
        tokens: tokens without padding.
        positions: tokens and padding together.
    """
    no_padding = 0 * tokens  # an Estimate if `tokens` is an Estimate
    if not positions:
        return no_padding
    share = 1 - tokens / positions
    return no_padding if share < 0 else share


class RowPadding(NamedTuple):
    """How the loader pads the rows of a step."""

    row_length: float
    "The mean padded length of a row in tokens."
    how_padded: str
    "A phrase such as `every row padded to max_seq_len, 2,048 tokens`."


def _find_padding(
    streams: Sequence[StreamInEpoch], loader: Loader, machines: Machines
) -> RowPadding:
    """Find how the loader pads rows, and how long they become."""
    limit = loader.max_seq_len or 0
    dataset = loader.dataset
    if machines.packing > 1:
        phrase = f"packed: {machines.packing:g} samples a row of {limit:,} tokens"
        if isinstance(machines.packing, Estimate):
            phrase += " (auto: estimated here, worked out when training begins)"
        return RowPadding(limit, phrase)
    is_trimmed = bool(dataset.get("pad_to_longest") or dataset.get("allow_pad_trimming"))
    length = plural(limit, "token")
    if is_trimmed:
        length = f"at most {length}"
    if dataset.get("decoder_only_format") is False and not loader.is_text:
        # An encoder-decoder reads a context and a target.
        phrase = f"context and target padded to {length} each"
        if dataset.get("pad_to_longest"):
            phrase = "context and target padded to the longest of a device's batch"
        return RowPadding(mark_estimate(2 * limit, is_exact=not is_trimmed), phrase)
    first = loader.streams[0]
    if loader.is_mdsmix and find_id_columns(first.columns) == PREFERENCE_COLUMNS:
        # Preferences with images: each answer is a row of its own, with the prompt before it.
        phrase = f"both answers, each with the prompt, padded to {length}"
        return RowPadding(mark_estimate(2 * limit, is_exact=not is_trimmed), phrase)
    longest = _estimate_trimmed_length(streams, loader, machines)
    if longest is None:
        return RowPadding(limit, f"every row padded to max_seq_len, {plural(limit, 'token')}")
    row_length = mark_estimate(longest, is_exact=has_equal_rows(loader))
    return RowPadding(row_length, "every row padded to the longest of a device's batch")


def _estimate_trimmed_length(
    streams: Sequence[StreamInEpoch], loader: Loader, machines: Machines
) -> float | None:
    """Return the mean length in tokens of the longest row of a device's batch, to which the loader
    pads. Return None if it pads to max_seq_len, or if the lengths of a stream are unknown.
    """
    dataset = loader.dataset
    # LLM-Foundry trims padding to a multiple of 8 tokens.
    multiple = 8 if dataset.get("allow_pad_trimming") else 1
    extra_loader = EXTRA_LOADERS.get(loader.name)
    pads_to_longest = extra_loader.pads_to_longest if extra_loader else loader.is_text
    if not (pads_to_longest or multiple > 1 or dataset.get("pad_to_longest")):
        return None
    weighted_lengths = []
    for stream, figures in zip(loader.streams, streams, strict=True):
        lengths = estimate_lengths(stream, loader)
        if lengths is None:
            return None
        weighted_lengths.append((lengths, float(figures.delivered)))
    return estimate_longest_row(weighted_lengths, machines.rows, multiple)


def plan_run(
    duration: Duration,
    epoch: EpochPlan,
    step: StepPlan,
    has_equal_rows: bool,
    speed: float | None,
    uncounted: Sequence[str],
) -> RunPlan:
    """Return the figures of the run. Composer stops after the first step that reaches the duration.

    Raises RecipeError if the duration is less than a step, or cannot be converted to steps.

    Args:
        has_equal_rows: whether all rows have one length.
        speed: positions (tokens and padding) that all devices together train in a second; None if
            unknown, so that the hours are unknown too.
        uncounted: the streams whose tokens are unknown, since the loader tokenizes their text.
    """
    # The size of one step in each unit of a duration. In epochs it is a fraction such as 1/5000.
    size_by_unit = {
        "ep": 1 / epoch.steps,
        "ba": 1,
        "sp": step.rows,
        "tok": step.tokens,
        "positions": step.positions,
    }
    step_size = size_by_unit[duration.unit]
    if not is_known(step_size):
        raise RecipeError(
            f"{duration.setting} cannot be converted to steps. The loader itself tokenizes the "
            f"text of {join_names(uncounted)}, so a step's tokens are unknown: convert this text "
            "with mdsmix, or set max_duration in epochs (1ep) or steps (1000ba)."
        )
    if duration.length < math.floor(step_size):
        raise RecipeError(
            f"{duration.setting} is less than one step, which has {step_size:,.0f} "
            f"{STEP_UNITS[duration.unit]}: use a larger budget or a smaller batch."
        )
    # 1e-9 is subtracted, since 3.0000000001 steps are 3 steps with an error of rounding, and would
    # be rounded up to 4.
    count = math.ceil(duration.length / float(step_size) - 1e-9)
    steps = mark_estimate(count, is_exact=not isinstance(step_size, Estimate))
    epochs = steps / epoch.steps
    # The tokens of whole epochs are exact. Those of a part are a mean, unless all steps have the
    # same number of tokens.
    has_equal_steps = has_equal_rows and step.rows == step.global_batch
    times = mark_estimate(epochs, is_exact=has_equal_steps or float(epochs).is_integer())
    return RunPlan(
        budget=duration.setting,
        steps=steps,
        epochs=epochs,
        tokens=epoch.tokens * times,
        trained=epoch.trained * times,
        hours=Estimate(step.positions * steps / speed / 3600) if speed else UNKNOWN,
    )


def add_run_figures(
    streams: Sequence[StreamInEpoch], step: StepPlan, run: RunPlan, machines: Machines
) -> Iterator[StreamInRun]:
    """Yield the streams with their figures in the run.

    Args:
        streams: the streams with their figures in an epoch.
    """
    tokens = sum(stream.tokens for stream in streams)
    row_length = step.positions / step.rows if machines.packing == 1 else UNKNOWN
    # Dropped samples and repeated ones are spread over all streams, so that the streams add up to
    # the run.
    times = run.tokens / tokens if tokens else UNKNOWN
    for stream in streams:
        yield StreamInRun(
            **asdict(stream),
            share=stream.tokens / tokens if tokens else UNKNOWN,
            padding=_compute_padding(stream.tokens, row_length * stream.delivered),
            passes=run.epochs * (stream.delivered / max(1, float(stream.samples))),
            run_tokens=stream.tokens * times,
            run_trained=stream.trained * times,
        )
