"""A mix and the machines it is to run on -> the plan.

Closed form throughout: nothing is laid out sample by sample, so a plan of 15 T tokens takes as long as one of 15 M. What of it is
exact is held against Streaming's own partitions (tests/with_torch/test_mix_plan.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mdsmix.encode.tokenizer import open_tokenizer
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.mix.check import findings
from mdsmix.mix.delivered import METHODS, delivered
from mdsmix.mix.findings import Finding
from mdsmix.mix.plan.disk import node_plan
from mdsmix.mix.plan.duration import ONE_EPOCH, Duration, of_option, of_yaml, run_plan
from mdsmix.mix.plan.facts import Facts, facts_of
from mdsmix.mix.plan.figures import (
    UNKNOWN,
    Figure,
    Plan,
    RunPlan,
    StepPlan,
    StreamPlan,
)
from mdsmix.mix.plan.machines import Machines, machines
from mdsmix.mix.plan.notes import notes_of
from mdsmix.mix.plan.settings import settings_for, unheld
from mdsmix.mix.plan.steps import padding_of, step_plan
from mdsmix.mix.plan.survey import Survey, forecast
from mdsmix.mix.sections import is_train
from mdsmix.mix.streams import Mix
from mdsmix.mix.view import is_recipe, mix_of, view, view_recipe
from mdsmix.mix.weights import batching, draws_of, epoch_size, parts
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.read import parted
from mdsmix.shards.published import Published, read_published
from mdsmix.storage import locate, together
from mdsmix.training.keys import BYTE_UNITS, in_units
from mdsmix.training.read import read_text
from mdsmix.words import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says."""

    nodes: int = 1
    gpus: int = 8
    batch: int | None = None
    tokens: str | None = None
    disk: str | None = None
    speed: float | None = None
    "Positions a second, of all devices."
    limit: int = 1000
    "Records of a stream that is not published to look at."


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is planned: the mix, and of each stream that is not published the survey that it is known by."""

    mix: Mix
    surveys: Mapping[str, Survey]


def see(targets: Sequence[str], limit: int) -> Seen:
    """The mix of a recipe or a training YAML, its evaluations left aside."""
    named, overrides = parted(targets)
    if len(named) == 1 and os.path.isfile(named[0]):
        if is_recipe(named[0]):
            return _of_recipe(open_recipe(named[0], overrides), named[0], limit)
        if not overrides:
            return Seen(mix=mix_of(read_text(named[0]), named[0], evals=()), surveys={})
    return Seen(mix=view(targets), surveys={})


def _of_recipe(recipe: Recipe, path: str, limit: int) -> Seen:
    if limit < 1:
        raise RecipeError(f"--limit {limit}: look at one record at least.")
    train = {name: spec for name, spec in recipe.streams.items() if is_train(spec)}
    if not train:
        raise RecipeError(
            f"{path} has no stream of `split: train`, so there is nothing to train on."
        )
    recipe = replace(recipe, streams=train)
    absent = _absent(recipe)
    tokenizer = open_tokenizer(recipe.tokenizer) if absent else None
    forecasts = {
        spec.name: forecast(recipe, spec, tokenizer, limit) for spec in absent if tokenizer
    }  # one after the other: templates are rendered under an alarm, which only this thread gets
    known = {
        spec.name: Published(
            folder=locate(recipe.published(spec)) / spec.split,
            index=forecasts[spec.name].index,
            manifest=forecasts[spec.name].manifest,
        )
        for spec in absent
    }
    mix = view_recipe(recipe, path, may_estimate=True, known=known)
    return Seen(mix=mix, surveys={name: each.survey for name, each in forecasts.items()})


def _absent(recipe: Recipe) -> list[StreamSpec]:
    """The streams that are still to be converted."""
    specs = [spec for spec in recipe.streams.values() if spec.source]
    found = together(
        lambda spec: read_published(locate(recipe.published(spec)) / spec.split), specs
    )
    return [spec for spec, published in zip(specs, found, strict=True) if published is None]


def problems(seen: Seen) -> list[Finding]:
    """The errors of the published streams; those that are not there yet are checked when they are."""
    streams = tuple(s for s in seen.mix.train.streams if s.name not in seen.surveys)
    if not streams:
        return []
    mix = replace(seen.mix, train=replace(seen.mix.train, streams=streams), evals=())
    return [finding for finding in findings(mix) if finding.severity == "error"]


def make_plan(seen: Seen, asked: Asked) -> Plan:
    """RecipeError where what was asked cannot be, MixRefused where Streaming would refuse the mix."""
    loader, yaml = seen.mix.train, seen.mix.yaml
    if not loader.streams:
        raise RecipeError(
            f"{yaml.origin} names no stream to train on, so there is nothing to plan."
        )
    if not loader.max_seq_len:
        raise RecipeError(
            f"{loader.label} of {yaml.origin} has no max_seq_len, so no batch has a size."
        )
    disk = _bytes(asked.disk)
    if asked.speed is not None and not asked.speed > 0:
        raise RecipeError(f"--tokens-per-second {asked.speed:g}: it must be above 0.")
    facts = [facts_of(stream, loader, seen.surveys.get(stream.name)) for stream in loader.streams]
    drawn = draws_of(loader)
    if not drawn or not sum(drawn):
        raise MixRefused(
            f"the weights of {yaml.origin} draw nothing that Streaming would take: `mdsmix check {yaml.origin}` says why."
        )
    batch = asked.batch if asked.batch is not None else yaml.batch_size
    on = machines(loader, asked.nodes, asked.gpus, batch, _mean(facts, drawn))
    came = _came(seen.mix, drawn, on)
    step = step_plan(facts, came, loader, on)
    run = run_plan(_duration(seen.mix, asked), step, asked.speed)
    node, epochs = node_plan(facts, drawn, loader, on, run.epochs.known)
    settings = settings_for(facts, node, loader, on, disk)
    return Plan(
        origin=yaml.origin,
        loader=loader.name,
        nodes=asked.nodes,
        gpus=asked.gpus,
        max_seq_len=loader.max_seq_len,
        streams=tuple(_streams(facts, came, step, run, on, loader.dataset.get("sampling_method"))),
        step=step,
        run=run,
        node=node,
        settings=settings,
        notes=tuple(notes_of(facts, step, run, on, came, drawn, epochs, unheld(settings))),
    )


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = in_units(text, BYTE_UNITS)
    if not size or size < 1:
        raise RecipeError(f"--disk {text} is no size: write for example 500gb or 2tb.")
    return size


def _duration(mix: Mix, asked: Asked) -> Duration:
    if asked.tokens is not None:
        return of_option(asked.tokens)
    if mix.shares and mix.shares.budget:
        return replace(ONE_EPOCH, said=f"one epoch, the recipe's budget: {mix.shares.budget}")
    return of_yaml(mix.yaml.at("max_duration"), mix.train.is_text) or ONE_EPOCH


def _mean(facts: Sequence[Facts], drawn: Sequence[int]) -> float | None:
    tokens = [f.tokens_of(n).value for f, n in zip(facts, drawn, strict=True)]
    known = [n for n in tokens if n is not None]
    return sum(known) / max(1, sum(drawn)) if len(known) == len(tokens) else None


def _came(mix: Mix, drawn: Sequence[int], on: Machines) -> list[int]:
    """Samples of each stream that an epoch delivers on these machines."""
    loader = mix.train
    if batching(loader) not in METHODS:
        return list(drawn)
    weights, samples = zip(*((s.weight, s.index.samples) for s in loader.streams), strict=True)
    came = delivered(
        batching(loader), drawn, parts(weights, samples, epoch_size(loader)), on.devices
    )
    if not all(came):
        empty = [s.name for s, n in zip(loader.streams, came, strict=True) if not n]
        raise MixRefused(
            f"batching_method: {batching(loader)} cannot fill a batch of {on.batch:,} rows with {listed(empty)}, and Streaming ends before "
            "the first step: take a larger batch for stratified, a smaller one for the others, or batching_method: random."
        )
    return came


def _streams(
    facts: Sequence[Facts],
    came: Sequence[int],
    step: StepPlan,
    run: RunPlan,
    on: Machines,
    method: object,
) -> list[StreamPlan]:
    width = step.positions.times(1 / max(1, on.batch))
    return [
        _stream(each, n, step, run, width if on.packing == 1 else UNKNOWN, method == "fixed")
        for each, n in zip(facts, came, strict=True)
    ]


def _stream(
    facts: Facts, came: int, step: StepPlan, run: RunPlan, width: Figure, is_fixed: bool
) -> StreamPlan:
    tokens, trained = facts.tokens_of(came), facts.trained_of(came)
    total, epochs = step.epoch_tokens, run.epochs
    basis = facts.samples.basis
    # Not the epochs: what is dropped or does not fit is no stream's, so that all streams add up to the run.
    drawn = run.tokens.known / max(1.0, total.known) if total.value else epochs.known
    return StreamPlan(
        stream=facts.name,
        state="looked at" if facts.survey else "published",
        samples=facts.samples,
        shards=Figure(len(facts.shards.samples), basis),
        epoch_samples=Figure(came, basis),
        epoch_tokens=tokens,
        epoch_trained=trained,
        share=tokens.times(1 / total.value, total.basis) if total.value else UNKNOWN,
        cut_tokens=facts.cut_of(came),
        padding=padding_of(tokens, width.times(came)) if came else UNKNOWN,
        passes=epochs.times(came / max(1.0, facts.samples.known), basis),
        unseen=_unseen(came / max(1.0, facts.samples.known), epochs, is_fixed),
        run_tokens=tokens.times(drawn, run.firmness),
        run_trained=trained.times(drawn, run.firmness),
    )


def _unseen(share: float, epochs: Figure, is_fixed: bool) -> Figure:
    """Of a stream of which an epoch draws this share: what no epoch draws. Whole passes miss nothing once an epoch is over."""
    whole, rest = divmod(epochs.known, 1)
    if share >= 1:
        return Figure(0.0 if whole else (1 - rest) ** share, "exact" if whole else "estimated")
    if is_fixed:
        return Figure(1 - share if whole else 1 - share * rest, "exact" if whole else "estimated")
    return Figure((1 - share) ** whole * (1 - share * rest), "estimated")
