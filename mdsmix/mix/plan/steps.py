"""A step, an epoch of steps and the run: what is drawn, how rows are padded, how many steps there are.

A run is as long as `--tokens` says, else the `max_duration` of a training YAML, else one epoch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.mix.draws import METHODS, World, batching, per_device
from mdsmix.mix.epoch import StreamInEpoch, epoch_of
from mdsmix.mix.plan.figures import EpochPlan, RunPlan, StepPlan
from mdsmix.mix.stream_counts import Lengths, lengths_of, mean_longest, row_length
from mdsmix.mix.streams import Loader
from mdsmix.table import UNKNOWN, Estimate, about, is_known
from mdsmix.training.loader_keys import COUNT_UNITS, in_units, is_number
from mdsmix.words import plural

AUTO_FILL = 0.9
"""What `packing_ratio: auto` is taken to fill of a row: it stops at the last ratio that leaves no row over, and first fit fills 88 % of
the rows of the demo's documents so (docs/one-loader.md)."""


def packing_of(loader: Loader) -> float:
    """Samples that are drawn for each row; an Estimate where the ratio is found when training begins."""
    given, limit = loader.dataset.get("packing_ratio") or 1, loader.max_seq_len or 1
    if given == "auto":
        epoch = epoch_of(loader)
        mean = sum(s.tokens for s in epoch) / max(1, float(sum(s.delivered for s in epoch)))
        best = AUTO_FILL * limit / mean if is_known(mean) and mean else 1.0
        return Estimate(max(1.0, round(best, 1))) if limit > 100 else 1.0
    if not is_number(given) or given < 1:
        raise RecipeError(
            f"packing_ratio is {given!r}; it must be auto, or a number of at least 1."
        )
    return float(given)


def is_even(loader: Loader) -> bool:
    """Whether all rows have one length: then any of them hold what a mean one holds."""
    lengths = {row_length(stream) for stream in loader.streams}
    return len(lengths) == 1 and lengths != {None}


def epoch_plan(streams: Sequence[StreamInEpoch], loader: Loader, world: World) -> EpochPlan:
    """What of the delivered samples is in steps of all devices."""
    method, together = batching(loader), world.drawn_together
    drawn = samples = int(sum(s.delivered for s in streams))
    if method not in METHODS:
        # Under `random` each device gets equally many, and Streaming repeats samples until they do.
        drawn = per_device(samples, world) * world.ranks
    drops = method in METHODS or loader.section.get("drop_last")
    steps = drawn // together if drops else -(-drawn // together)
    taken = min(drawn, steps * together)
    is_exact = not isinstance(sum(s.samples for s in streams), Estimate)
    part = about(taken / max(1, samples), taken == samples or is_even(loader))
    return EpochPlan(
        steps=about(steps, is_exact),
        samples=about(taken, is_exact),
        tokens=sum(s.tokens for s in streams) * part,
        trained=sum(s.trained for s in streams) * part,
        dropped=about(drawn - taken, is_exact),
        repeated=about(drawn - samples, is_exact),
    )


def step_plan(
    epoch: EpochPlan, streams: Sequence[StreamInEpoch], loader: Loader, world: World
) -> StepPlan:
    """The mean step of the epoch: a last one that is not full counts as what it holds."""
    steps, (width, how) = max(1.0, float(epoch.steps)), _width(streams, loader, world)
    rows = float(epoch.samples) * world.batch / (steps * world.drawn_together)
    positions, tokens, trained = width * rows, epoch.tokens / steps, epoch.trained / steps
    if world.packing > 1 and tokens > positions:
        tokens, trained = Estimate(positions), trained * (positions / float(tokens))
    return StepPlan(
        global_batch=world.batch,
        device_batch=world.rows,
        rows=rows,
        drawn=about(world.drawn_together, not isinstance(world.packing, Estimate)),
        positions=positions,
        tokens=tokens,
        trained=trained,
        padding=padding_of(tokens, positions),
        how_padded=how,
    )


def padding_of(tokens: float, positions: float) -> float:
    """The share of the positions that hold no token."""
    if not is_known(tokens) or not positions:
        return UNKNOWN
    return 1 - tokens / positions if tokens < positions else tokens * 0


def _width(streams: Sequence[StreamInEpoch], loader: Loader, world: World) -> tuple[float, str]:
    """The mean padded length of a row, and in words how the loader pads."""
    limit, dataset = loader.max_seq_len or 0, loader.dataset
    if world.packing > 1:
        is_guessed = isinstance(world.packing, Estimate)
        said = " (auto: guessed here, found when training begins)" if is_guessed else ""
        return limit, f"packed: {world.packing:g} samples a row of {limit:,} tokens{said}"
    if dataset.get("decoder_only_format") is False and not loader.is_text:
        return 2 * limit, f"context and target padded to {plural(limit, 'token')} each"
    multiple = 8 if dataset.get("allow_pad_trimming") else 1
    if loader.is_text or multiple > 1 or dataset.get("pad_to_longest"):
        longest = _longest(streams, loader, world.rows, multiple)
        if longest is not None:
            return longest, "every row padded to the longest of a device's batch"
    return limit, f"every row padded to max_seq_len, {plural(limit, 'token')}"


def _longest(
    streams: Sequence[StreamInEpoch], loader: Loader, rows: int, multiple: int
) -> float | None:
    """Tokens of the longest of so many rows; None where the loader itself tokenizes a stream."""
    known = list[tuple[Lengths, float]]()
    for stream, of in zip(loader.streams, streams, strict=True):
        if of.delivered:
            if (found := lengths_of(stream, loader)) is None:
                return None
            known.append((found, float(of.delivered)))
    return about(mean_longest(known, rows, multiple), is_even(loader))


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """So much of something."""

    count: float
    of: str
    "As Composer writes it behind a number: ep, ba, sp or tok; `positions` are tokens with padding."
    said: str


ONE_EPOCH = Duration(count=1, of="ep", said="one epoch, since nothing says how long the run is")


def of_option(text: str) -> Duration:
    """`--tokens 100B`."""
    count = in_units(text, COUNT_UNITS)
    if not count or count < 1:
        raise RecipeError(
            f"--tokens {text} is no number of tokens: write for example 100B, 1.5T or 400000."
        )
    return Duration(count=count, of="tok", said=f"--tokens {text}")


def of_yaml(value: Any, is_text: bool) -> Duration | None:
    """`max_duration`; None where there is none, or one that says nothing of the data (seconds, iterations).

    Composer counts the tokens of text batches by their size, padding included, and those of the finetuning loader by their mask.
    """
    number = r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)"
    found = re.fullmatch(rf"{number}\s*(ep|ba|sp|tok)?", str(value).strip().lower())
    if not found:
        return None
    of, count = found[2] or "ep", float(found[1].replace("_", ""))
    of = "positions" if of == "tok" and is_text else of
    return Duration(count=count, of=of, said=f"max_duration: {value}")


def run_plan(
    duration: Duration, epoch: EpochPlan, step: StepPlan, are_alike: bool, speed: float | None
) -> RunPlan:
    """`are_alike`: every step holds equally many tokens; `speed`: positions, padding among them, that all devices train a second."""
    steps = _steps(duration, epoch, step)
    epochs = steps / epoch.steps
    # Of whole epochs it is known what they hold; of a part only how much on average.
    times = about(epochs, are_alike or float(epochs).is_integer())
    return RunPlan(
        budget=duration.said,
        steps=steps,
        epochs=epochs,
        tokens=epoch.tokens * times,
        trained=epoch.trained * times,
        hours=Estimate(step.positions * steps / speed / 3600) if speed else UNKNOWN,
    )


def _steps(duration: Duration, epoch: EpochPlan, step: StepPlan) -> float:
    """The steps of the run: Composer stops after the first that reaches its duration."""
    if not epoch.steps:
        raise RecipeError(
            f"an epoch of {epoch.dropped:,.0f} samples does not fill one step, which draws {step.drawn:,.0f}: take a smaller batch, or "
            "more data."
        )
    sizes = {"ep": 1 / epoch.steps, "ba": 1, "sp": step.rows, "tok": step.tokens}
    one = sizes.get(duration.of, step.positions)
    if not is_known(one):
        raise RecipeError(
            f"{duration.said} cannot be turned into steps, since how many tokens a step holds is not known: a stream holds text that the "
            "loader itself tokenizes; convert it, or say the length in epochs (1ep) or steps (1000ba)."
        )
    if duration.count < math.floor(one):
        raise RecipeError(
            f"{duration.said} is less than one step, which holds {one:,.0f}: take a larger budget or a smaller batch."
        )
    # A billionth is the rounding of floats.
    return about(math.ceil(duration.count / float(one) - 1e-9), not isinstance(one, Estimate))
