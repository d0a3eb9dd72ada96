"""A mix and the machines of its run -> the plan.

All figures are in closed form, and nothing is laid out sample by sample, so a plan of 15 T tokens takes as long as one of 15 M. Exact
figures are tested against Streaming's own partitions (tests/with_torch/test_mix_plan.py). The length of a run is `--tokens`, else the
`max_duration` of a training YAML, else one epoch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.mix.checking import findings
from mdsmix.mix.draws import (
    METHODS,
    World,
    batching,
    delivered_in,
    draws_of,
    machines_of,
    per_device,
)
from mdsmix.mix.epoch import StreamInEpoch, epoch_of, in_epoch
from mdsmix.mix.plan.figures import EpochPlan, Plan, RunPlan, StepPlan, StreamInRun
from mdsmix.mix.plan.forecast import forecast
from mdsmix.mix.plan.nodes import node_plan, settings_for
from mdsmix.mix.resolve import resolve
from mdsmix.mix.stream_counts import eos_of, lengths_of, mean_longest, row_length
from mdsmix.mix.streams import Loader, Mix
from mdsmix.table import UNKNOWN, Estimate, about, is_known
from mdsmix.training.findings import Finding
from mdsmix.training.loader_keys import BYTE_UNITS, COUNT_UNITS, in_units, is_number
from mdsmix.words import listed, plural

AUTO_FILL = 0.9
"""The part of a row that `packing_ratio: auto` is taken to fill. `auto` stops at the last ratio that leaves no row over; first fit then
fills 88 % of the rows of the demo's documents (docs/one-loader.md)."""
DURATION = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)\s*(ep|ba|sp|tok)?")
"The values of `max_duration` that count data: not seconds, not iterations."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `mdsmix plan`."""

    nodes: int = 1
    gpus: int = 8
    batch: int | None = None
    tokens: str | None = None
    disk: str | None = None
    speed: float | None = None
    "Positions that all devices together train in a second."


def resolve_for_plan(targets: Sequence[str]) -> Mix:
    """The mix to train, without evaluations. Unpublished streams of a recipe are surveyed, and shares may be worked out from the survey."""
    return resolve(targets, may_estimate=True, has_evals=False, survey=forecast)


def problems(mix: Mix) -> list[Finding]:
    """The errors of the published streams. Other streams are checked once they are published."""
    streams = tuple(s for s in mix.train.streams if s.survey is None)
    if mix.train.streams and not streams:
        return []
    published = replace(mix, train=replace(mix.train, streams=streams), evals=())
    return [finding for finding in findings(published) if finding.severity == "error"]


def make_plan(mix: Mix, asked: PlanOptions) -> Plan:
    """The plan of a mix's run. RecipeError where an option cannot be met, MixRefused where Streaming would refuse the mix."""
    loader, disk = mix.train, in_units(asked.disk, BYTE_UNITS)
    if not loader.max_seq_len:
        raise RecipeError(f"{loader.label} of {mix.yaml.origin} has no max_seq_len, so no batch has a size.")  # fmt: skip
    if asked.disk is not None and not disk:
        raise RecipeError(f"--disk {asked.disk} is no size: write for example 500gb or 2tb.")
    world = machines_of(mix, asked.nodes, asked.gpus, asked.batch)
    world = replace(world, packing=_packing(loader))
    drawn = draws_of(loader)
    if not drawn or not sum(drawn):
        raise MixRefused(
            f"the weights of {mix.yaml.origin} draw nothing that Streaming would take: `mdsmix check {mix.yaml.origin}` says why."
        )
    streams = _streams(loader, drawn, world)
    epoch = _epoch(streams, loader, world)
    step = _step(epoch, streams, loader, world)
    run = _run(mix, asked, epoch, step)
    node = node_plan(drawn, loader, world, run.epochs)
    return Plan(
        origin=mix.yaml.origin,
        loader=loader.name,
        nodes=asked.nodes,
        gpus=asked.gpus,
        max_seq_len=loader.max_seq_len,
        streams=tuple(_in_run(streams, step, run, world)),
        step=step,
        epoch=epoch,
        run=run,
        node=node,
        settings=settings_for(loader, node, world, disk),
        notes=tuple(_notes(loader, streams, epoch, step, world)),
    )


def _packing(loader: Loader) -> float:
    """Samples that are drawn for each row; an Estimate where training works the ratio out when it begins."""
    given, limit = loader.dataset.get("packing_ratio") or 1, loader.max_seq_len or 1
    if given == "auto":
        epoch = epoch_of(loader)
        mean = sum(s.tokens for s in epoch) / max(1, float(sum(s.delivered for s in epoch)))
        best = AUTO_FILL * limit / mean if is_known(mean) and mean else 1.0
        return Estimate(max(1.0, round(best, 1))) if limit > 100 else 1.0
    if not is_number(given) or given < 1:
        raise RecipeError(f"packing_ratio is {given!r}; it must be auto, or a number of at least 1.")  # fmt: skip
    return float(given)


def _streams(loader: Loader, drawn: Sequence[int], world: World) -> list[StreamInEpoch]:
    """The figures of each stream in an epoch on these machines; MixRefused where batches cannot be built."""
    came = delivered_in(loader, drawn, world)
    if batching(loader) in METHODS and not all(came):
        empty = [s.name for s, n in zip(loader.streams, came, strict=True) if not n]
        raise MixRefused(
            f"batching_method: {batching(loader)} cannot fill a batch of {world.batch:,} rows with {listed(empty)}, and Streaming ends "
            "before the first step: take a larger batch for stratified, a smaller one for the others, or batching_method: random."
        )
    counts = zip(loader.streams, drawn, came, strict=True)
    return [in_epoch(stream, loader, n, m, eos_of(stream, loader)) for stream, n, m in counts]


def _is_even(loader: Loader) -> bool:
    """Whether all rows of all streams have one length, so that any part of an epoch holds exactly its mean."""
    lengths = {row_length(stream) for stream in loader.streams}
    return len(lengths) == 1 and lengths != {None}


def _epoch(streams: Sequence[StreamInEpoch], loader: Loader, world: World) -> EpochPlan:
    """The figures of an epoch: the delivered samples that are in steps of all devices. RecipeError where no step is filled."""
    drawn = samples = int(sum(s.delivered for s in streams))
    drops = batching(loader) in METHODS or loader.section.get("drop_last")
    if batching(loader) not in METHODS:
        # Under `random` each device gets equally many, and Streaming repeats samples until they do.
        drawn = per_device(samples, world) * world.ranks
    steps, rest = divmod(drawn, world.drawn_together)
    dropped = rest if drops else 0
    if not (steps := steps + (rest > dropped)):
        raise RecipeError(
            f"an epoch of {drawn:,} samples does not fill one step, which draws {world.drawn_together:,}: take a smaller batch, or more data."
        )
    taken, is_counted = drawn - dropped, not any(s.survey for s in loader.streams)
    part = about(taken / samples, taken == samples or _is_even(loader))
    return EpochPlan(
        steps=about(steps, is_counted),
        samples=about(taken, is_counted),
        tokens=sum(s.tokens for s in streams) * part,
        trained=sum(s.trained for s in streams) * part,
        dropped=about(dropped, is_counted),
    )


def _step(
    epoch: EpochPlan, streams: Sequence[StreamInEpoch], loader: Loader, world: World
) -> StepPlan:
    """The mean step of the epoch; a last step that is not full counts with the rows that it has."""
    steps, (width, how) = float(epoch.steps), _width(streams, loader, world)
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
        padding=_padding(tokens, positions),
        how_padded=how,
    )


def _padding(tokens: float, positions: float) -> float:
    """The share of the positions that hold no token, 0 to 1."""
    if not is_known(tokens):
        return UNKNOWN
    return 1 - tokens / positions if tokens < positions else tokens * 0


def _width(streams: Sequence[StreamInEpoch], loader: Loader, world: World) -> tuple[float, str]:
    """The mean padded length of a row in tokens, and a phrase on how the loader pads."""
    limit, dataset = loader.max_seq_len or 0, loader.dataset
    if world.packing > 1:
        is_guessed = isinstance(world.packing, Estimate)
        said = " (auto: guessed here, found when training begins)" if is_guessed else ""
        return limit, f"packed: {world.packing:g} samples a row of {limit:,} tokens{said}"
    if dataset.get("decoder_only_format") is False and not loader.is_text:
        return 2 * limit, f"context and target padded to {plural(limit, 'token')} each"
    multiple = 8 if dataset.get("allow_pad_trimming") else 1
    lengths = [lengths_of(stream, loader) for stream in loader.streams]
    known = [(of, float(each.delivered)) for of, each in zip(lengths, streams, strict=True) if of]
    is_trimmed = loader.is_text or multiple > 1 or dataset.get("pad_to_longest")
    if is_trimmed and len(known) == len(streams):
        longest = about(mean_longest(known, world.rows, multiple), _is_even(loader))
        return longest, "every row padded to the longest of a device's batch"
    return limit, f"every row padded to max_seq_len, {plural(limit, 'token')}"


def _run(mix: Mix, asked: PlanOptions, epoch: EpochPlan, step: StepPlan) -> RunPlan:
    """The figures of the run. Composer stops after the first step that reaches the duration."""
    count, unit, said = _duration(mix, asked)
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
    steps = about(math.ceil(count / float(one) - 1e-9), not isinstance(one, Estimate))
    epochs = steps / epoch.steps
    # Tokens of whole epochs are known. Those of a part are a mean, unless every step holds equally many tokens.
    are_alike = _is_even(mix.train) and step.rows == step.global_batch
    times = about(epochs, are_alike or float(epochs).is_integer())
    return RunPlan(
        budget=said,
        steps=steps,
        epochs=epochs,
        tokens=epoch.tokens * times,
        trained=epoch.trained * times,
        hours=Estimate(step.positions * steps / asked.speed / 3600) if asked.speed else UNKNOWN,
    )


def _duration(mix: Mix, asked: PlanOptions) -> tuple[float, str, str]:
    """The run's length, its unit, and where it is set. Units: Composer's ep, ba, sp and tok, and `positions`, tokens with padding."""
    if asked.tokens is not None:
        count = in_units(asked.tokens, COUNT_UNITS)
        if not count or count < 1:
            raise RecipeError(
                f"--tokens {asked.tokens} is no number of tokens: write for example 100B, 1.5T or 400000."
            )
        return count, "tok", f"--tokens {asked.tokens}"
    if mix.shares and mix.shares.budget:
        return 1, "ep", f"one epoch, the recipe's budget: {mix.shares.budget}"
    given = mix.yaml.at("max_duration")
    if not (found := DURATION.fullmatch(str(given).strip().lower())):
        return 1, "ep", "one epoch, since nothing says how long the run is"
    # Composer counts the tokens of text batches by their size, padding included, and those of the finetuning loader by their mask.
    unit = "positions" if found[2] == "tok" and mix.train.is_text else found[2] or "ep"
    return float(found[1].replace("_", "")), unit, f"max_duration: {given}"


def _in_run(
    streams: Sequence[StreamInEpoch], step: StepPlan, run: RunPlan, world: World
) -> Iterator[StreamInRun]:
    tokens = sum(s.tokens for s in streams)
    width = step.positions / step.rows if world.packing == 1 else UNKNOWN
    # Samples that are dropped or come twice are spread over all streams, so that the streams add up to the run.
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


def _notes(
    loader: Loader,
    streams: Sequence[StreamInEpoch],
    epoch: EpochPlan,
    step: StepPlan,
    world: World,
) -> Iterator[str]:
    """Sentences on how far streams are known, on tokens that the loader cuts off, and on samples that are dropped or wait."""
    for stream, of in zip(loader.streams, streams, strict=True):
        if stream.survey:
            yield stream.survey
        elif stream.trusted_manifest is None:
            yield (
                f"{of.stream}: no manifest counts it; the first samples of its first shard stand for all, and tokens of text that the loader "
                "itself tokenizes are not known"
            )
        if is_known(of.cut) and of.cut:
            share = of.cut / max(1, of.cut + of.tokens)
            yield f"{of.stream}: the loader cuts off {of.cut:,.0f} tokens an epoch at max_seq_len, {share:.1%} of all"
    if world.packing > 1 and step.tokens == step.positions:
        yield (
            f"packing_ratio {world.packing:g} draws more tokens than the {step.positions:,.0f} positions of a step hold: what does not fit "
            "waits for later steps, and is dropped at the end of the epoch; take a smaller ratio"
        )
    drawn, came = (int(sum(getattr(s, name) for s in streams)) for name in ("drawn", "delivered"))
    for count, what in (
        (drawn - came, "are dropped by the batching method"),
        (epoch.dropped, "fill no last batch of all devices and are dropped"),
    ):
        if count > 0:
            yield f"{count:,.0f} of {drawn:,} samples of an epoch {what}"
