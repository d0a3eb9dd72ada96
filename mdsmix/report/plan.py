"""A plan for people: two tables of the streams, what a step, the run and a node come to, and the settings with their reasons.

All of it is the `Plan` itself; `--json` gives that, with what each figure rests on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from mdsmix.mix.plan.figures import BASES, Figure, Plan, total, weakest
from mdsmix.report.show import Item, NamedValues
from mdsmix.table import Column, Table, shown
from mdsmix.words import plural

EPOCH = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("an epoch", key="epoch_samples"),
    Column("tokens", key="epoch_tokens"),
    Column("trained", key="epoch_trained"),
    Column("share", "share"),
    Column("padding", "share"),
)
RUN = (
    Column("stream", "text"),
    Column("passes", "times"),
    Column("never seen", "share", key="unseen"),
    Column("tokens", key="run_tokens"),
    Column("trained", key="run_trained"),
    Column("state", "text"),
)
COUNT, SHARE, TIMES, SIZE = (Column("", form) for form in ("count", "share", "times", "size"))


def plan_json(plan: Plan) -> dict[str, Any]:
    """The tree; each figure as its value, what it rests on, and its standard error where one is known."""
    return asdict(plan)


def epoch_of(plan: Plan) -> Table:
    """An epoch, a row a stream."""
    rows = [
        (
            s.stream,
            *(
                each.shown
                for each in (
                    s.samples,
                    s.epoch_samples,
                    s.epoch_tokens,
                    s.epoch_trained,
                    s.share,
                    s.padding,
                )
            ),
        )
        for s in plan.streams
    ]
    step = plan.step
    whole = (
        total(s.samples for s in plan.streams),
        step.samples,
        step.epoch_tokens,
        step.epoch_trained,
        Figure(1.0) if step.epoch_tokens.value else Figure(None),
        step.padding,
    )
    return Table(columns=EPOCH, rows=rows, total=("all", *(each.shown for each in whole)))


def run_of(plan: Plan) -> Table:
    """The run, a row a stream."""
    rows = [
        (
            s.stream,
            *(each.shown for each in (s.passes, s.unseen, s.run_tokens, s.run_trained)),
            s.state,
        )
        for s in plan.streams
    ]
    run = plan.run
    return Table(
        columns=RUN, rows=rows, total=("all", "", "", run.tokens.shown, run.trained.shown, "")
    )


def _told(column: Column, figure: Figure, word: str = "") -> str:
    said = shown(column, figure.shown)
    return f"{said} {word}".rstrip()


def step_pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """A step and the run."""
    step, run = plan.step, plan.run
    packed = (
        "" if step.drawn.value == step.global_batch else f", {_told(COUNT, step.drawn)} samples"
    )
    yield (
        "a step",
        f"on average {_told(COUNT, step.tokens)} tokens, {_told(COUNT, step.trained)} trained, in {step.global_batch:,} rows, {step.device_batch:,} a device{packed}",
    )
    yield (
        "padding",
        f"{_told(SHARE, step.padding)} of {_told(COUNT, step.positions)} positions; {step.how_padded}",
    )
    yield (
        "an epoch",
        (
            f"{_told(COUNT, step.steps)} steps of {plural(step.global_batch, 'row')}, "
            f"{_told(COUNT, step.epoch_tokens)} tokens"
        ),
    )
    yield (
        "the run",
        f"{_told(COUNT, run.steps)} steps, {_told(TIMES, run.epochs)} epochs, {_told(COUNT, run.tokens)} tokens, "
        f"{_told(COUNT, run.trained)} trained ({run.budget})",
    )
    if run.hours.value is not None:
        yield "hours", _told(TIMES, run.hours)


def node_pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a node reads and keeps."""
    node, every = plan.node, plural(plan.nodes, "node")
    yield (
        "a node reads",
        f"{_told(COUNT, node.epoch_shards)} shards in the first epoch, {_told(COUNT, node.run_shards)} in the run",
    )
    if not node.remote_streams:
        yield "a node fetches", "nothing: every stream lies on its own disk"
        return
    yield (
        "a node fetches",
        f"{_told(SIZE, node.epoch_bytes)} in the first epoch, {_told(SIZE, node.refetched_bytes)} in the run",
    )
    most = f"; {_told(SIZE, node.mean_kept_bytes)} on average of {every}" if plan.nodes > 1 else ""
    yield "a node keeps", f"{_told(SIZE, node.kept_bytes)} on its disk{most}"


def plan_shown(plan: Plan) -> Iterator[Item]:
    """All of it for a person."""
    yield _headline(plan)
    yield from (epoch_of(plan), run_of(plan), NamedValues([*step_pairs(plan), *node_pairs(plan)]))
    yield from ("", "settings")
    yield NamedValues(
        [(s.key, f"{s.use or 'leave out'}: {s.why} ({s.rests_on})") for s in plan.settings]
    )
    yield from ("", *plan.notes, *filter(None, [_legend(plan)]))


def _headline(plan: Plan) -> str:
    return (
        f"{plan.origin}: {plural(plan.nodes, 'node')} of {plural(plan.gpus, 'device')}, {plan.step.global_batch:,} rows a step, "
        f"{plan.loader} loader, max_seq_len {plan.max_seq_len:,}"
    )


def _legend(plan: Plan) -> str:
    """What the marks mean, where there are any."""
    found = {figure.basis for figure in _figures(plan) if figure is not plan.run.hours}
    said = []
    if "estimated" in found:
        said.append("~ is estimated")
    if "unknown" in found:
        said.append("? is not known")
    rest = "all else is counted by manifests and indexes, or follows from them"
    return "; ".join([*said, rest]) if weakest(found) in BASES[2:] else ""


def _figures(plan: Plan) -> Iterator[Figure]:
    parts: tuple[Any, ...] = (*plan.streams, plan.step, plan.run, plan.node)
    for part in parts:
        values = (getattr(part, field.name) for field in fields(part))
        yield from (value for value in values if isinstance(value, Figure))
