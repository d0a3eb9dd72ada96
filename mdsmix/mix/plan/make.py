"""A mix and the machines it is to run on -> the plan.

Closed form throughout: nothing is laid out sample by sample, so a plan of 15 T tokens takes as long as one of 15 M. What of it is
exact is held against Streaming's own partitions (tests/with_torch/test_mix_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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
from mdsmix.table import UNKNOWN, Estimate, about, is_known
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
    loader, origin = mix.train, mix.yaml.origin
    drawn = _drawn(loader, origin)
    disk = in_units(asked.disk, BYTE_UNITS)
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
        origin=origin,
        loader=loader.name,
        nodes=asked.nodes,
        gpus=asked.gpus,
        max_seq_len=loader.max_seq_len or 0,
        streams=tuple(_streams(loader, streams, step, run, world)),
        step=step,
        epoch=epoch,
        run=run,
        node=node,
        settings=settings,
        notes=tuple(_notes(loader, streams, epoch, step, world, settings)),
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


def _streams(
    loader: Loader, streams: Sequence[StreamInEpoch], step: StepPlan, run: RunPlan, world: World
) -> Iterator[StreamInRun]:
    tokens, trained = sum(s.tokens for s in streams), sum(s.trained for s in streams)
    width = step.positions / world.batch if world.packing == 1 else UNKNOWN
    is_fixed = loader.dataset.get("sampling_method") == "fixed"
    for stream, each in zip(loader.streams, streams, strict=True):
        passes = each.delivered / max(1, float(each.samples))
        yield StreamInRun(
            **{name: getattr(each, name) for name in StreamInEpoch.__slots__},
            state="looked at" if stream.survey else "published",
            shards=about(len(stream.shards), stream.survey is None),
            share=each.tokens / tokens if tokens else UNKNOWN,
            padding=padding_of(each.tokens, width * each.delivered),
            passes=run.epochs * passes,
            unseen=_unseen(float(passes), float(run.epochs), is_fixed),
            # What is dropped or comes twice is no stream's: so all streams add up to the run.
            run_tokens=each.tokens * (run.tokens / tokens) if tokens else UNKNOWN,
            run_trained=each.trained * (run.trained / trained) if trained else UNKNOWN,
        )


def _unseen(share: float, epochs: float, is_fixed: bool) -> float:
    """Of a stream of which an epoch draws this share: what no epoch draws. Whole passes miss nothing once an epoch is over."""
    full, rest = divmod(epochs, 1)
    if share >= 1:
        return 0.0 if full else Estimate((1 - rest) ** share)
    if is_fixed:
        return 1 - share if full else Estimate(1 - share * rest)
    return Estimate((1 - share) ** full * (1 - share * rest))


def _notes(
    loader: Loader,
    streams: Sequence[StreamInEpoch],
    epoch: EpochPlan,
    step: StepPlan,
    world: World,
    settings: Iterable[Setting],
) -> Iterator[str]:
    pairs = [*zip(loader.streams, streams, strict=True)]
    yield from (_surveyed(stream.survey, of) for stream, of in pairs if stream.survey)
    for stream, of in pairs:
        yield from _of_stream(of, has_manifest=stream.trusted_manifest is not None)
    yield from _of_epoch(loader, streams, epoch, step, world)
    if otherwise := [s.key for s in settings if s.now and s.use and s.now != s.use]:
        yield f"set otherwise in the config: {', '.join(otherwise)}"


def _of_stream(of: StreamInEpoch, has_manifest: bool) -> Iterator[str]:
    """What the loader cuts off of a stream, and what is not known of it."""
    if is_known(of.cut) and of.cut:
        share = of.cut / max(1, of.cut + of.tokens)
        yield f"{of.stream}: the loader cuts off {of.cut:,.0f} tokens an epoch at max_seq_len, {share:.1%} of all"
    if not is_known(of.tokens):
        yield f"{of.stream}: the loader itself tokenizes it, so its tokens are not known"
    elif not is_known(of.trained):
        yield (
            f"{of.stream}: what is trained of it is not known: no manifest counts it for this loader's max_seq_len and targets"
        )
    elif not has_manifest and not is_known(of.cut):
        yield f"{of.stream}: no manifest counts its tokens; the first samples of its first shard stand for all"


def _of_epoch(
    loader: Loader,
    streams: Sequence[StreamInEpoch],
    epoch: EpochPlan,
    step: StepPlan,
    world: World,
) -> Iterator[str]:
    """What of an epoch is dropped, comes twice, or waits."""
    drawn, came = (sum(getattr(s, name) for s in streams) for name in ("drawn", "delivered"))
    wanted = sum(s.tokens for s in streams) * (world.drawn_together / max(1, float(came)))
    if world.packing > 1 and wanted > step.positions:
        yield (
            f"packing_ratio {world.packing:g} draws {wanted:,.0f} tokens for {step.positions:,.0f} positions: what does not fit waits "
            "for later steps, and is dropped at the end of the epoch; take a smaller ratio"
        )
    if came < drawn:
        yield f"the batching method drops {drawn - came:,.0f} of {drawn:,.0f} samples an epoch"
    if epoch.repeated:
        come = "comes" if epoch.repeated == 1 else "come"
        yield f"{plural(int(epoch.repeated), 'sample')} of an epoch {come} twice, so that all devices draw equally many"
    if not epoch.dropped:
        return
    dropped = plural(int(epoch.dropped), "sample")
    if batching(loader) == "device_per_stream":
        yield f"{dropped} of an epoch fill batches of some devices alone, which then have one batch more than the others"
    else:
        yield f"{dropped} of an epoch fill no last batch and are dropped (drop_last)"


def _surveyed(survey: Survey, of: StreamInEpoch) -> str:
    """How far a stream that is not published is known."""
    seen = f"{plural(survey.records, 'record')} at {plural(survey.places, 'place')}"
    seen = "every record of it" if survey.is_all else seen
    said = f"{of.stream} is not converted yet: {seen} looked at"
    if reasons := left_out(survey):
        said += f"; {survey.left_out.total():,} of these records become no sample ({reasons})"
    return said
