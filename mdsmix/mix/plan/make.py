"""A mix and the machines it is to run on -> the plan.

Closed form throughout: nothing is laid out sample by sample, so a plan of 15 T tokens takes as long as one of 15 M. What of it is
exact is held against Streaming's own partitions (tests/with_torch/test_mix_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.kinds.survey import Survey
from mdsmix.mix.checking import findings
from mdsmix.mix.draws import (
    METHODS,
    World,
    batch_of,
    batching,
    delivered_in,
    draws_of,
    machines_of,
)
from mdsmix.mix.epoch import StreamInEpoch, in_epoch
from mdsmix.mix.plan.figures import EpochPlan, Plan, RunPlan, Setting, StepPlan, StreamInRun
from mdsmix.mix.plan.forecast import forecast, left_out
from mdsmix.mix.plan.nodes import node_plan, settings_for
from mdsmix.mix.plan.steps import (
    ONE_EPOCH,
    Duration,
    epoch_plan,
    is_even,
    of_option,
    of_yaml,
    packing_of,
    padding_of,
    run_plan,
    step_plan,
)
from mdsmix.mix.resolve import resolve
from mdsmix.mix.stream_counts import eos_of
from mdsmix.mix.streams import Loader, Mix
from mdsmix.table import UNKNOWN, is_known
from mdsmix.training.findings import Finding
from mdsmix.training.loader_keys import BYTE_UNITS, in_units, whole
from mdsmix.words import listed, plural


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the command line says."""

    nodes: int = 1
    gpus: int = 8
    batch: int | None = None
    tokens: str | None = None
    disk: str | None = None
    speed: float | None = None
    "Positions a second, of all devices."


def resolve_for_plan(targets: Sequence[str]) -> Mix:
    """The mix that is trained. Of a recipe, streams that are not published are surveyed, and shares may be worked out from that."""
    return resolve(targets, may_estimate=True, has_evals=False, survey=forecast)


def problems(mix: Mix) -> list[Finding]:
    """The errors of the published streams; those that are not there yet are checked when they are."""
    streams = tuple(s for s in mix.train.streams if s.survey is None)
    if not streams:
        return []
    published = replace(mix, train=replace(mix.train, streams=streams), evals=())
    return [finding for finding in findings(published) if finding.severity == "error"]


def make_plan(mix: Mix, asked: PlanOptions) -> Plan:
    """RecipeError where what was asked cannot be, MixRefused where Streaming would refuse the mix."""
    loader = mix.train
    drawn, disk = _drawn(loader, mix.yaml.origin), in_units(asked.disk, BYTE_UNITS)
    if asked.disk is not None and (not disk or disk < 1):
        raise RecipeError(f"--disk {asked.disk} is no size: write for example 500gb or 2tb.")
    if asked.speed is not None and not asked.speed > 0:
        raise RecipeError(f"--tokens-per-second {asked.speed:g}: it must be above 0.")
    world = _world(mix, asked)
    streams = [
        in_epoch(s, loader, n, m, eos_of(s, loader))
        for s, n, m in zip(loader.streams, drawn, _delivered(loader, drawn, world), strict=True)
    ]
    epoch = epoch_plan(streams, loader, world)
    step = step_plan(epoch, streams, loader, world)
    are_alike = is_even(loader) and not float(epoch.samples) % world.drawn_together
    run = run_plan(_duration(mix, asked), epoch, step, are_alike, asked.speed)
    node = node_plan(drawn, loader, world, run.epochs)
    settings = settings_for(loader, node, world, disk)
    return Plan(
        origin=mix.yaml.origin,
        loader=loader.name,
        nodes=asked.nodes,
        gpus=asked.gpus,
        max_seq_len=loader.max_seq_len or 0,
        streams=tuple(_in_run(streams, step, run, world)),
        step=step,
        epoch=epoch,
        run=run,
        node=node,
        settings=settings,
        notes=(
            *_of_streams(loader, streams),
            *_of_epoch(streams, epoch, step, world),
            *_of_settings(settings),
        ),
    )


def _drawn(loader: Loader, origin: str) -> list[int]:
    if not loader.streams:
        raise RecipeError(f"{origin} names no stream to train on, so there is nothing to plan.")
    if not loader.max_seq_len:
        raise RecipeError(f"{loader.label} of {origin} has no max_seq_len, so no batch has a size.")
    drawn = draws_of(loader)
    if not drawn or not sum(drawn):
        raise MixRefused(
            f"the weights of {origin} draw nothing that Streaming would take: `mdsmix check {origin}` says why."
        )
    return drawn


def _world(mix: Mix, asked: PlanOptions) -> World:
    return machines_of(
        mix.train,
        batch=batch_of(asked.batch, mix.yaml.batch_size),
        nodes=asked.nodes,
        gpus=asked.gpus,
        replication=whole(mix.train.dataset.get("replication")) or 1,
        packing=packing_of(mix.train),
    )


def _duration(mix: Mix, asked: PlanOptions) -> Duration:
    if asked.tokens is not None:
        return of_option(asked.tokens)
    if mix.shares and mix.shares.budget:
        return replace(ONE_EPOCH, said=f"one epoch, the recipe's budget: {mix.shares.budget}")
    return of_yaml(mix.yaml.at("max_duration"), mix.train.is_text) or ONE_EPOCH


def _delivered(loader: Loader, drawn: Sequence[int], world: World) -> list[int]:
    """Samples of each stream that an epoch delivers on these machines."""
    came = delivered_in(loader, drawn, world)
    if batching(loader) in METHODS and not all(came):
        empty = [s.name for s, n in zip(loader.streams, came, strict=True) if not n]
        raise MixRefused(
            f"batching_method: {batching(loader)} cannot fill a batch of {world.batch:,} rows with {listed(empty)}, and Streaming ends "
            "before the first step: take a larger batch for stratified, a smaller one for the others, or batching_method: random."
        )
    return came


def _in_run(
    streams: Sequence[StreamInEpoch], step: StepPlan, run: RunPlan, world: World
) -> Iterator[StreamInRun]:
    tokens, trained = sum(s.tokens for s in streams), sum(s.trained for s in streams)
    width = step.positions / step.rows if world.packing == 1 else UNKNOWN
    for each in streams:
        yield StreamInRun(
            **asdict(each),
            share=each.tokens / tokens if tokens else UNKNOWN,
            padding=padding_of(each.tokens, width * each.delivered),
            passes=run.epochs * (each.delivered / max(1, float(each.samples))),
            # What is dropped or comes twice is no stream's: so all streams add up to the run.
            run_tokens=each.tokens * (run.tokens / tokens) if tokens else UNKNOWN,
            run_trained=each.trained * (run.trained / trained) if trained else UNKNOWN,
        )


def _of_streams(loader: Loader, streams: Sequence[StreamInEpoch]) -> Iterator[str]:
    """How far streams are known, and what the loader cuts off of them."""
    for stream, of in zip(loader.streams, streams, strict=True):
        if stream.survey:
            yield _surveyed(of.stream, stream.survey)
        elif stream.trusted_manifest is None:
            yield (
                f"{of.stream}: no manifest counts it; the first samples of its first shard stand for all, and tokens of text that the loader "
                "itself tokenizes are not known"
            )
        if is_known(of.cut) and of.cut:
            share = of.cut / max(1, of.cut + of.tokens)
            yield f"{of.stream}: the loader cuts off {of.cut:,.0f} tokens an epoch at max_seq_len, {share:.1%} of all"


def _surveyed(stream: str, survey: Survey) -> str:
    """How far a stream that is not published was looked at."""
    seen = f"{plural(survey.records, 'record')} at {plural(survey.places, 'place')} looked at"
    said = f"{stream} is not converted yet: {seen}{', which are all' * survey.is_all}"
    if reasons := left_out(survey):
        said += f"; {survey.left_out.total():,} of these records become no sample ({reasons})"
    return said


def _of_epoch(
    streams: Sequence[StreamInEpoch], epoch: EpochPlan, step: StepPlan, world: World
) -> Iterator[str]:
    """What of an epoch is dropped, comes twice, or waits."""
    drawn, came = (int(sum(getattr(s, name) for s in streams)) for name in ("drawn", "delivered"))
    wanted = sum(s.tokens for s in streams) * (world.drawn_together / max(1, came))
    if world.packing > 1 and wanted > step.positions:
        yield (
            f"packing_ratio {world.packing:g} draws {wanted:,.0f} tokens for {step.positions:,.0f} positions: what does not fit waits "
            "for later steps, and is dropped at the end of the epoch; take a smaller ratio"
        )
    for count, what in (
        (drawn - came, "are dropped by the batching method"),
        (epoch.repeated, "come twice, so that all devices draw equally many"),
        (epoch.dropped, "fill no last batch of all devices and are dropped"),
    ):
        if count > 0:
            yield f"{count:,.0f} of {drawn:,} samples of an epoch {what}"


def _of_settings(settings: Iterable[Setting]) -> Iterator[str]:
    if otherwise := [s.key for s in settings if s.now and s.use and s.now != s.use]:
        yield f"set otherwise in the config: {', '.join(otherwise)}"
