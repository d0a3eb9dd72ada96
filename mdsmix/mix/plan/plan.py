"""A mix and the machines of its run -> the plan, a tree of frozen dataclasses that a terminal, JSON
and a page show alike.

A figure is a plain number where it is exact: it follows from indexes, manifests and settings, as
Streaming computes it. Otherwise it is an `Estimate`, as is every figure computed from one. NaN
means not known.

All figures are in closed form, and nothing is laid out sample by sample, so a plan of 15 T tokens
takes as long as one of 15 M. Exact figures are tested against Streaming's own partitions
(tests/with_torch/test_mix_plan.py). The length of a run is `--tokens`, else the `max_duration` of a
training YAML, else one epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.estimate.forecast import forecast_stream
from mdsmix.foundry_yaml.findings import Finding
from mdsmix.foundry_yaml.loader_keys import BYTE_UNITS, COUNT_UNITS, is_number, parse_quantity
from mdsmix.messages import join_names
from mdsmix.mix.check import run_checks
from mdsmix.mix.epoch.draws import (
    METHODS,
    Machines,
    count_delivered_on,
    count_loader_draws,
    get_batching_method,
    make_run_machines,
)
from mdsmix.mix.epoch.figures import StreamInEpoch, measure_epoch, measure_stream
from mdsmix.mix.plan.nodes import NodePlan, Setting, advise_settings, plan_node
from mdsmix.mix.plan.steps import (
    EpochPlan,
    RunPlan,
    StepPlan,
    StreamInRun,
    add_run_figures,
    fit_packed_rows,
    is_even,
    plan_epoch,
    plan_run,
    plan_step,
)
from mdsmix.mix.streams.mix import Loader, Mix
from mdsmix.mix.streams.resolve import resolve_mix
from mdsmix.table import Estimate, is_known

AUTO_FILL = 0.9
"""The part of a row that `packing_ratio: auto` is taken to fill. `auto` stops at the last ratio
that leaves no row over; first fit then fills 88 % of the rows of the demo's documents
(docs/one-loader.md).
"""
DURATION = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)\s*(ep|ba|sp|tok)?")
"The values of `max_duration` that count data: not seconds, not iterations."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run."""

    origin: str
    loader: str
    nodes: int
    gpus: int
    max_seq_len: int
    streams: tuple[StreamInRun, ...]
    step: StepPlan
    epoch: EpochPlan
    run: RunPlan
    node: NodePlan
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    "Sentences on guesses, on data that was not looked at, and on dropped samples."


@dataclass(frozen=True, kw_only=True)
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
    """The mix to train, without evaluations. Unpublished streams of a recipe are surveyed, and
    shares may be worked out from the survey.
    """
    return resolve_mix(targets, may_estimate=True, has_evals=False, survey=forecast_stream)


def find_plan_problems(mix: Mix) -> list[Finding]:
    """The errors of the published streams. Other streams are checked once they are published."""
    streams = tuple(s for s in mix.train.streams if s.survey is None)
    if mix.train.streams and not streams:
        return []
    published = replace(mix, train=replace(mix.train, streams=streams), evals=())
    return [finding for finding in run_checks(published) if finding.severity == "error"]


def make_plan(mix: Mix, asked: PlanOptions) -> Plan:
    """The plan of a mix's run. RecipeError where an option cannot be met, MixRefused where
    Streaming would refuse the mix.
    """
    loader, disk = mix.train, parse_quantity(asked.disk, BYTE_UNITS)
    loader.require_opened()
    if not loader.max_seq_len:
        raise RecipeError(f"{loader.label} of {mix.yaml.origin} has no max_seq_len, so no batch has a size.")  # fmt: skip
    if asked.disk is not None and not disk:
        raise RecipeError(f"--disk {asked.disk} is no size: write for example 500gb or 2tb.")
    world = make_run_machines(mix, asked.nodes, asked.gpus, asked.batch)
    world = replace(world, packing=_packing(loader))
    drawn = count_loader_draws(loader)
    if not drawn or not sum(drawn):
        raise MixRefused(
            f"the weights of {mix.yaml.origin} draw nothing that Streaming would take: `mdsmix check {mix.yaml.origin}` says why."
        )
    whole = _streams(loader, drawn, world)
    streams = fit_packed_rows(whole, loader, world)
    epoch = plan_epoch(streams, loader, world)
    step = plan_step(epoch, streams, loader, world)
    run = plan_run(_duration(mix, asked.tokens), epoch, step, is_even(loader), asked.speed)
    node = plan_node(drawn, loader, world, run.epochs)
    return Plan(
        origin=mix.yaml.origin,
        loader=loader.name,
        nodes=asked.nodes,
        gpus=asked.gpus,
        max_seq_len=loader.max_seq_len,
        streams=tuple(add_run_figures(streams, step, run, world)),
        step=step,
        epoch=epoch,
        run=run,
        node=node,
        settings=advise_settings(loader, node, world, disk),
        notes=tuple(_notes(loader, streams, epoch, step, world)),
    )


def _packing(loader: Loader) -> float:
    """Samples that are drawn for each row; an Estimate where training works the ratio out when it
    begins.
    """
    given, limit = loader.dataset.get("packing_ratio") or 1, loader.max_seq_len or 1
    if given == "auto":
        epoch = measure_epoch(loader)
        mean = sum(s.tokens for s in epoch) / max(1, float(sum(s.delivered for s in epoch)))
        best = AUTO_FILL * limit / mean if is_known(mean) and mean else 1.0
        return Estimate(max(1.0, round(best, 1))) if limit > 100 else 1.0
    if not is_number(given) or given < 1:
        raise RecipeError(f"packing_ratio is {given!r}; it must be auto, or a number of at least 1.")  # fmt: skip
    return float(given)


def _streams(loader: Loader, drawn: Sequence[int], world: Machines) -> list[StreamInEpoch]:
    """The figures of each stream in an epoch on these machines; MixRefused where batches cannot be
    built.
    """
    came = count_delivered_on(loader, drawn, world)
    if get_batching_method(loader) in METHODS and not all(came):
        empty = [s.name for s, n in zip(loader.streams, came, strict=True) if not n]
        raise MixRefused(
            f"batching_method: {get_batching_method(loader)} cannot fill a batch of {world.batch:,} rows with {join_names(empty)}, and Streaming ends "
            "before the first step: take a larger batch for stratified, a smaller one for the others, or batching_method: random."
        )
    counts = zip(loader.streams, drawn, came, strict=True)
    return [measure_stream(stream, loader, n, m) for stream, n, m in counts]


def _notes(
    loader: Loader,
    streams: Sequence[StreamInEpoch],
    epoch: EpochPlan,
    step: StepPlan,
    world: Machines,
) -> Iterator[str]:
    """Sentences on how far streams are known, on tokens that the loader cuts off, and on samples
    that are dropped or wait.
    """
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
            yield f"{of.stream}: {of.cut:,.0f} tokens an epoch are cut off at max_seq_len, {share:.1%} of all"
    if world.packing > 1 and step.tokens > (1 - 1e-9) * step.positions:
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


def _duration(mix: Mix, tokens: str | None) -> tuple[float, str, str]:
    """The run's length, its unit, and where it is set. Units: Composer's ep, ba, sp and tok, and
    `positions`, tokens with padding.
    """
    if tokens is not None:
        count = parse_quantity(tokens, COUNT_UNITS)
        if not count or count < 1:
            raise RecipeError(
                f"--tokens {tokens} is no number of tokens: write for example 100B, 1.5T or 400000."
            )
        return count, "tok", f"--tokens {tokens}"
    if mix.shares and mix.shares.budget:
        return 1, "ep", f"one epoch, the recipe's budget: {mix.shares.budget}"
    given = mix.yaml.value_at("max_duration")
    if not (found := DURATION.fullmatch(str(given).strip().lower())):
        return 1, "ep", "one epoch, since nothing says how long the run is"
    # Composer counts the tokens of text batches by their size, padding included, and those of the
    # finetuning loader by their mask.
    unit = "positions" if found[2] == "tok" and mix.train.is_text else found[2] or "ep"
    return float(found[1].replace("_", "")), unit, f"max_duration: {given}"


def list_figures(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in the tree of a plan by its path, such as `streams.0.tokens`."""
    if isinstance(tree, float | int):
        yield path[1:], tree
    elif isinstance(tree, dict | tuple):
        for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from list_figures(part, f"{path}.{name}")
