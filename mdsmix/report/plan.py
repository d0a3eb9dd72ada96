"""A plan for people: two tables of the streams, what a step, the run and a node come to, and the settings with their reasons.

All of it is the `Plan` itself; `--json` gives that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mdsmix.mix.plan.figures import Plan, StreamInRun, as_tree, figures
from mdsmix.report.show import Item, NamedValues
from mdsmix.table import Column, Estimate, Row, Table, cell_text, is_known
from mdsmix.words import plural

EPOCH = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("an epoch", key="delivered"),
    Column("tokens"),
    Column("trained"),
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
    """The tree, null where a figure is not known, and the paths of all figures that are estimated."""
    estimated = [path for path, figure in figures(plan) if isinstance(figure, Estimate)]
    return {**as_tree(plan), "estimated": estimated}


def epoch_of(plan: Plan) -> Table:
    """An epoch, a row a stream."""
    sums = {
        key: sum(getattr(s, key) for s in plan.streams)
        for key in ("samples", "delivered", "tokens", "trained")
    }
    share = 1.0 if is_known(sums["tokens"]) else None
    total = ("all", *sums.values(), share, plan.step.padding)
    return Table(columns=EPOCH, rows=_rows(plan.streams, EPOCH), total=total)


def run_of(plan: Plan) -> Table:
    """The run, a row a stream."""
    total = ("all", "", "", plan.run.tokens, plan.run.trained, "")
    return Table(columns=RUN, rows=_rows(plan.streams, RUN), total=total)


def _rows(streams: Sequence[StreamInRun], columns: Sequence[Column]) -> list[Row]:
    return [tuple(getattr(s, column.key or column.heading) for column in columns) for s in streams]


def step_pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """A step and the run."""
    step, epoch, run = plan.step, plan.epoch, plan.run
    packed = "" if step.drawn == step.global_batch else f", {cell_text(COUNT, step.drawn)} samples"
    yield (
        "a step",
        f"on average {cell_text(COUNT, step.tokens)} tokens, {cell_text(COUNT, step.trained)} trained, in {step.global_batch:,} rows, {step.device_batch:,} a device{packed}",
    )
    yield (
        "padding",
        f"{cell_text(SHARE, step.padding)} of {cell_text(COUNT, step.positions)} positions; {step.how_padded}",
    )
    yield (
        "an epoch",
        f"{cell_text(COUNT, epoch.steps)} steps of {plural(step.global_batch, 'row')}, {cell_text(COUNT, epoch.tokens)} tokens",
    )
    yield (
        "the run",
        f"{cell_text(COUNT, run.steps)} steps, {cell_text(TIMES, run.epochs)} epochs, {cell_text(COUNT, run.tokens)} tokens, "
        f"{cell_text(COUNT, run.trained)} trained ({run.budget})",
    )
    if is_known(run.hours):
        yield "hours", cell_text(TIMES, run.hours)


def node_pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a node reads and keeps."""
    node = plan.node
    yield (
        "a node reads",
        f"{cell_text(COUNT, node.epoch_shards)} shards in the first epoch, {cell_text(COUNT, node.run_shards)} in the run",
    )
    if not node.remote_streams:
        yield "a node fetches", "nothing: every stream lies on its own disk"
        return
    yield (
        "a node fetches",
        f"{cell_text(SIZE, node.epoch_bytes)} in the first epoch, {cell_text(SIZE, node.run_bytes)} in the run",
    )
    yield "a node keeps", f"{cell_text(SIZE, node.kept_bytes)} on its disk"


def plan_shown(plan: Plan) -> Iterator[Item]:
    """All of it for a person."""
    yield _headline(plan)
    yield from (epoch_of(plan), run_of(plan), NamedValues([*step_pairs(plan), *node_pairs(plan)]))
    yield from ("", "settings")
    yield NamedValues([(s.key, f"{s.use or 'leave out'}: {s.why}") for s in plan.settings])
    yield from ("", *plan.notes, *filter(None, [_legend(plan)]))


def _headline(plan: Plan) -> str:
    return (
        f"{plan.origin}: {plural(plan.nodes, 'node')} of {plural(plan.gpus, 'device')}, {plan.step.global_batch:,} rows a step, "
        f"{plan.loader} loader, max_seq_len {plan.max_seq_len:,}"
    )


def _legend(plan: Plan) -> str:
    """What the marks mean, where there are any."""
    estimates = [
        is_known(figure)
        for path, figure in figures(plan)
        if isinstance(figure, Estimate) and path != "run.hours"
    ]
    marks = ((any(estimates), "~ is estimated"), (not all(estimates), "? is not known"))
    said = [words for is_there, words in marks if is_there]
    rest = "all else is counted by manifests and indexes, or follows from them"
    return "; ".join([*said, rest]) if said else ""
