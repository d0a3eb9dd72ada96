"""The steps of an epoch and of a run: their number, and the samples, tokens and padding that they
hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from mdsmix.errors import RecipeError
from mdsmix.messages import plural
from mdsmix.mix.epoch.draws import METHODS, Machines, count_per_device, get_batching_method
from mdsmix.mix.epoch.figures import StreamInEpoch
from mdsmix.mix.epoch.stream_counts import estimate_lengths, fixed_row_length, mean_longest_row
from mdsmix.mix.streams.mix import Loader
from mdsmix.table import UNKNOWN, Estimate, is_known, mark_estimate


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The figures of all steps of an epoch."""

    steps: float
    samples: float
    "Samples in these steps; a sample that comes twice counts twice."
    tokens: float
    trained: float
    dropped: float
    "Samples that are left over because they do not fill a last batch."


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The figures of the mean step of an epoch."""

    global_batch: int
    "Rows that a full step has, of all devices together."
    device_batch: int
    rows: float
    "Rows that a step has on average; a last step may have fewer."
    drawn: float
    "Samples that a full step draws: more than its rows where samples are packed."
    positions: float
    "Rows times their padded length, in tokens."
    tokens: float
    "Tokens without padding."
    trained: float
    padding: float
    "The share of padding in the positions, 0 to 1."
    how_padded: str


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The figures of the whole run."""

    budget: str
    "The length of the run and where it is set, such as `--tokens 100B`."
    steps: float
    epochs: float
    tokens: float
    trained: float
    hours: float
    "Hours at the given positions per second; not known without them."


@dataclass(frozen=True, kw_only=True)
class StreamInRun(StreamInEpoch):
    """The figures of one stream, in an epoch and in the run."""

    share: float
    "The stream's share of the epoch's tokens, 0 to 1."
    padding: float
    """The share of padding in the positions of its rows; not known where rows are packed, since
    streams share rows.
    """
    passes: float
    "How often the run sees each sample of the stream, on average."
    run_tokens: float
    run_trained: float


def is_even(loader: Loader) -> bool:
    """Whether all rows of all streams have one length, so that any part of an epoch holds exactly
    its mean.
    """
    lengths = {fixed_row_length(stream) for stream in loader.streams}
    return len(lengths) == 1 and lengths != {None}


def fit_packed_rows(
    streams: Sequence[StreamInEpoch], loader: Loader, world: Machines
) -> Sequence[StreamInEpoch]:
    """Take the tokens for which packed rows have no room off the figures of the streams, in equal
    parts.
    """
    tokens = sum(each.tokens for each in streams)
    rows = sum(each.delivered for each in streams) * world.rows / world.drawn
    positions = float(rows) * (loader.max_seq_len or 0)
    if world.packing == 1 or not is_known(tokens) or tokens <= positions:
        return streams
    part = Estimate(positions / float(tokens))
    return [replace(s, tokens=s.tokens * part, trained=s.trained * part) for s in streams]


def plan_epoch(streams: Sequence[StreamInEpoch], loader: Loader, world: Machines) -> EpochPlan:
    """The figures of an epoch: the delivered samples that are in steps of all devices. RecipeError
    where no step is filled.
    """
    drawn = samples = int(sum(s.delivered for s in streams))
    drops = get_batching_method(loader) in METHODS or loader.section.get("drop_last")
    if get_batching_method(loader) not in METHODS:
        # Under `random` each device gets equally many, and Streaming repeats samples until they do.
        drawn = count_per_device(samples, world) * world.ranks
    steps, rest = divmod(drawn, world.drawn_together)
    dropped = rest if drops else 0
    if not (steps := steps + (rest > dropped)):
        raise RecipeError(
            f"an epoch of {drawn:,} samples does not fill one step, which draws {world.drawn_together:,}: take a smaller batch, or more data."
        )
    taken, is_counted = drawn - dropped, not any(s.survey for s in loader.streams)
    part = mark_estimate(taken / samples, taken == samples or is_even(loader))
    return EpochPlan(
        steps=mark_estimate(steps, is_counted),
        samples=mark_estimate(taken, is_counted),
        tokens=sum(s.tokens for s in streams) * part,
        trained=sum(s.trained for s in streams) * part,
        dropped=mark_estimate(dropped, is_counted),
    )


def plan_step(
    epoch: EpochPlan, streams: Sequence[StreamInEpoch], loader: Loader, world: Machines
) -> StepPlan:
    """The mean step of the epoch; a last step that is not full counts with the rows that it has."""
    steps, (width, how) = float(epoch.steps), _width(streams, loader, world)
    rows = float(epoch.samples) * world.batch / (steps * world.drawn_together)
    positions, tokens, trained = width * rows, epoch.tokens / steps, epoch.trained / steps
    return StepPlan(
        global_batch=world.batch,
        device_batch=world.rows,
        rows=rows,
        drawn=mark_estimate(world.drawn_together, not isinstance(world.packing, Estimate)),
        positions=positions,
        tokens=tokens,
        trained=trained,
        padding=_padding(tokens, positions),
        how_padded=how,
    )


def _padding(tokens: float, positions: float) -> float:
    """Return the share of the positions that hold no token, 0 to 1; 0 if there are no positions."""
    if not positions:
        return 0 * tokens
    share = 1 - tokens / positions
    return 0 * tokens if share < 0 else share


def _width(streams: Sequence[StreamInEpoch], loader: Loader, world: Machines) -> tuple[float, str]:
    """The mean padded length of a row in tokens, and a phrase on how the loader pads."""
    limit, dataset = loader.max_seq_len or 0, loader.dataset
    if world.packing > 1:
        is_guessed = isinstance(world.packing, Estimate)
        said = " (auto: guessed here, found when training begins)" if is_guessed else ""
        return limit, f"packed: {world.packing:g} samples a row of {limit:,} tokens{said}"
    if dataset.get("decoder_only_format") is False and not loader.is_text:
        return 2 * limit, f"context and target padded to {plural(limit, 'token')} each"
    multiple = 8 if dataset.get("allow_pad_trimming") else 1
    lengths = [estimate_lengths(stream, loader) for stream in loader.streams]
    known = [(of, float(each.delivered)) for of, each in zip(lengths, streams, strict=True) if of]
    is_trimmed = loader.is_text or multiple > 1 or dataset.get("pad_to_longest")
    if is_trimmed and len(known) == len(streams):
        longest = mark_estimate(mean_longest_row(known, world.rows, multiple), is_even(loader))
        return longest, "every row padded to the longest of a device's batch"
    return limit, f"every row padded to max_seq_len, {plural(limit, 'token')}"


def plan_run(
    duration: tuple[float, str, str],
    epoch: EpochPlan,
    step: StepPlan,
    is_even: bool,
    speed: float | None,
) -> RunPlan:
    """The figures of the run. Composer stops after the first step that reaches the duration.

    Args:
        duration: the length of the run, its unit, and where it is set.
        is_even: all rows have one length.
        speed: positions that all devices together train in a second.
    """
    count, unit, said = duration
    sizes = {
        "ep": 1 / epoch.steps,
        "ba": 1,
        "sp": step.rows,
        "tok": step.tokens,
        "positions": step.positions,
    }
    one = sizes[unit]
    if not is_known(one):
        raise RecipeError(
            f"{said} cannot be turned into steps, since how many tokens a step holds is not known: a stream holds text that the "
            "loader itself tokenizes; convert it, or say the length in epochs (1ep) or steps (1000ba)."
        )
    if count < math.floor(one):
        raise RecipeError(
            f"{said} is less than one step, which holds {one:,.0f}: take a larger budget or a smaller batch."
        )
    # A billionth is subtracted against the rounding of floats.
    steps = mark_estimate(math.ceil(count / float(one) - 1e-9), not isinstance(one, Estimate))
    epochs = steps / epoch.steps
    # Tokens of whole epochs are known. Those of a part are a mean, unless every step holds equally
    # many tokens.
    are_alike = is_even and step.rows == step.global_batch
    times = mark_estimate(epochs, are_alike or float(epochs).is_integer())
    return RunPlan(
        budget=said,
        steps=steps,
        epochs=epochs,
        tokens=epoch.tokens * times,
        trained=epoch.trained * times,
        hours=Estimate(step.positions * steps / speed / 3600) if speed else UNKNOWN,
    )


def add_run_figures(
    streams: Sequence[StreamInEpoch], step: StepPlan, run: RunPlan, world: Machines
) -> Iterator[StreamInRun]:
    tokens = sum(s.tokens for s in streams)
    width = step.positions / step.rows if world.packing == 1 else UNKNOWN
    # Samples that are dropped or come twice are spread over all streams, so that the streams add up
    # to the run.
    times = run.tokens / tokens if tokens else UNKNOWN
    for each in streams:
        yield StreamInRun(
            **asdict(each),
            share=each.tokens / tokens if tokens else UNKNOWN,
            padding=_padding(each.tokens, width * each.delivered),
            passes=run.epochs * (each.delivered / max(1, float(each.samples))),
            run_tokens=each.tokens * times,
            run_trained=each.trained * times,
        )
