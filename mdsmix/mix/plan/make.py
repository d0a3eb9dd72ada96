"""A mix and the machines it is to run on -> the plan.

Closed form throughout: nothing is laid out sample by sample, so a plan of 15 T tokens takes as long as one of 15 M. What of it is
exact is held against Streaming's own partitions (tests/with_torch/test_mix_plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.mix.check import findings
from mdsmix.mix.delivered import METHODS
from mdsmix.mix.draws import batching, delivered_in, draws_of, shuffle_algo
from mdsmix.mix.epoch import StreamInEpoch, in_epoch
from mdsmix.mix.plan.duration import ONE_EPOCH, Duration, of_option, of_yaml, run_plan
from mdsmix.mix.plan.figures import Plan, RunPlan, StepPlan, StreamInRun
from mdsmix.mix.plan.forecast import forecast
from mdsmix.mix.plan.nodes import node_plan
from mdsmix.mix.plan.notes import notes_of
from mdsmix.mix.plan.settings import settings_for, unheld
from mdsmix.mix.plan.steps import epoch_plan, is_even, packing_of, padding_of, step_plan
from mdsmix.mix.resolve import resolve
from mdsmix.mix.stream_counts import eos_of
from mdsmix.mix.streams import Loader, Mix
from mdsmix.mix.world import World, batch_of
from mdsmix.table import UNKNOWN, Estimate, about
from mdsmix.training.findings import Finding
from mdsmix.training.keys import BYTE_UNITS, in_units, whole
from mdsmix.words import listed


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
    loader, origin = mix.train, mix.yaml.origin
    drawn = _drawn(loader, origin)
    disk = _bytes(asked.disk)
    if asked.speed is not None and not asked.speed > 0:
        raise RecipeError(f"--tokens-per-second {asked.speed:g}: it must be above 0.")
    eos = [0.0 if stream.survey else eos_of(stream, loader) for stream in loader.streams]
    whole_epoch = [
        in_epoch(s, loader, n, n, e) for s, n, e in zip(loader.streams, drawn, eos, strict=True)
    ]
    mean = sum(s.tokens for s in whole_epoch) / max(1, sum(drawn))
    world, is_guessed = _world(mix, asked, mean)
    came = _delivered(loader, drawn, world)
    streams = [
        in_epoch(s, loader, n, m, e)
        for s, n, m, e in zip(loader.streams, drawn, came, eos, strict=True)
    ]
    epoch = epoch_plan(streams, loader, world)
    step = step_plan(epoch, streams, loader, world, is_guessed)
    are_alike = is_even(loader) and not float(epoch.samples) % world.drawn_together
    run = run_plan(_duration(mix, asked), epoch, step, are_alike, asked.speed)
    node = node_plan(drawn, loader, world, run.epochs)
    settings = settings_for(loader, node, world, disk)
    is_fixed = loader.dataset.get("sampling_method") == "fixed"
    return Plan(
        origin=origin,
        loader=loader.name,
        nodes=asked.nodes,
        gpus=asked.gpus,
        max_seq_len=loader.max_seq_len or 0,
        streams=tuple(_streams(loader, streams, step, run, world, is_fixed)),
        step=step,
        epoch=epoch,
        run=run,
        node=node,
        settings=settings,
        notes=tuple(notes_of(loader, streams, epoch, step, world, unheld(settings))),
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


def _world(mix: Mix, asked: PlanOptions, mean: float) -> tuple[World, bool]:
    """The machines, and whether how many samples fill a row is guessed. `mean`: tokens of a mean sample."""
    loader = mix.train
    packing = packing_of(loader, mean)
    world = World(
        batch=batch_of(asked.batch, mix.yaml.batch_size),
        nodes=asked.nodes,
        gpus=asked.gpus,
        replication=whole(loader.dataset.get("replication")) or 1,
        packing=packing.ratio,
        num_canonical_nodes=max(0, whole(loader.dataset.get("num_canonical_nodes")) or 0),
        algo=shuffle_algo(loader),
    )
    return world, packing.is_guessed


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = in_units(text, BYTE_UNITS)
    if not size or size < 1:
        raise RecipeError(f"--disk {text} is no size: write for example 500gb or 2tb.")
    return size


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


def _streams(
    loader: Loader,
    streams: Sequence[StreamInEpoch],
    step: StepPlan,
    run: RunPlan,
    world: World,
    is_fixed: bool,
) -> list[StreamInRun]:
    tokens, trained = sum(s.tokens for s in streams), sum(s.trained for s in streams)
    width = step.positions / world.batch if world.packing == 1 else UNKNOWN
    return [
        StreamInRun(
            **{name: getattr(each, name) for name in StreamInEpoch.__slots__},
            state="looked at" if stream.survey else "published",
            shards=about(len(stream.shards), stream.survey is None),
            share=each.tokens / tokens if tokens else UNKNOWN,
            padding=padding_of(each.tokens, width * each.delivered),
            passes=run.epochs * each.delivered / max(1, float(each.samples)),
            unseen=_unseen(
                float(each.delivered / max(1, each.samples)), float(run.epochs), is_fixed
            ),
            # What is dropped or comes twice is no stream's: so all streams add up to the run.
            run_tokens=each.tokens * (run.tokens / tokens) if tokens else UNKNOWN,
            run_trained=each.trained * (run.trained / trained) if trained else UNKNOWN,
        )
        for stream, each in zip(loader.streams, streams, strict=True)
    ]


def _unseen(share: float, epochs: float, is_fixed: bool) -> float:
    """Of a stream of which an epoch draws this share: what no epoch draws. Whole passes miss nothing once an epoch is over."""
    full, rest = divmod(epochs, 1)
    if share >= 1:
        return 0.0 if full else Estimate((1 - rest) ** share)
    if is_fixed:
        return 1 - share if full else Estimate(1 - share * rest)
    return Estimate((1 - share) ** full * (1 - share * rest))
