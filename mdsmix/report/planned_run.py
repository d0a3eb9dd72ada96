"""A plan for people: a table of the streams, what a step, the run and a node come to, and the settings with their reasons.

All of it is the `Plan` itself; `--json` gives that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mdsmix.mix.plan.figures import Plan, figures
from mdsmix.report.show import Item, NamedValues
from mdsmix.table import Column, Estimate, Table, cell_text, is_known
from mdsmix.words import plural

STREAMS = (
    Column("stream", "text"),
    Column("an epoch", key="delivered"),
    Column("passes", "times"),
    Column("tokens", key="run_tokens"),
    Column("trained", key="run_trained"),
    Column("share", "share"),
    Column("padding", "share"),
)
LEGEND = "~ is estimated; ? is not known; all else is counted by manifests and indexes, or follows from them"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The tree, null where a figure is not known, and the paths of all figures that are estimated."""
    tree = asdict(plan)
    return tree | {"estimated": [path for path, of in figures(tree) if isinstance(of, Estimate)]}


def told(figure: float, form: str = "count") -> str:
    """A figure of the plan, with its mark."""
    return cell_text(Column("", form), figure)


def plan_shown(plan: Plan) -> Iterator[Item]:
    """All of it for a person."""
    yield (
        f"{plan.origin}: {plural(plan.nodes, 'node')} of {plural(plan.gpus, 'device')}, {plan.step.global_batch:,} rows a step, "
        f"{plan.loader} loader, max_seq_len {plan.max_seq_len:,}"
    )
    yield _streams(plan)
    yield NamedValues(run_pairs(plan))
    yield from ("", "settings")
    yield NamedValues([(s.key, f"{s.use or 'leave out'}: {s.why}") for s in plan.settings])
    yield from ("", *plan.notes)
    yield LEGEND


def _streams(plan: Plan) -> Table:
    """What each stream comes to in the run."""
    keys, run = [column.key or column.heading for column in STREAMS], plan.run
    rows = [tuple(getattr(stream, key) for key in keys) for stream in plan.streams]
    delivered, share = sum(s.delivered for s in plan.streams), 1.0 if is_known(run.tokens) else None
    total = ("all", delivered, "", run.tokens, run.trained, share, plan.step.padding)
    return Table(columns=STREAMS, rows=rows, total=total)


def run_pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """A step, the run, and what a node reads and keeps."""
    step, epoch, run, node = plan.step, plan.epoch, plan.run, plan.node
    packed = "" if step.drawn == step.global_batch else f", {told(step.drawn)} samples"
    yield (
        "a step",
        f"on average {told(step.tokens)} tokens, {told(step.trained)} trained, in {step.global_batch:,} rows, {step.device_batch:,} a device{packed}",
    )
    yield (
        "padding",
        f"{told(step.padding, 'share')} of {told(step.positions)} positions; {step.how_padded}",
    )
    yield (
        "an epoch",
        f"{told(epoch.steps)} steps of {plural(step.global_batch, 'row')}, {told(epoch.tokens)} tokens",
    )
    yield (
        "the run",
        f"{told(run.steps)} steps, {told(run.epochs, 'times')} epochs, {told(run.tokens)} tokens, {told(run.trained)} trained ({run.budget})",
    )
    if is_known(run.hours):
        yield "hours", told(run.hours, "times")
    if not node.remote_streams:
        yield "a node fetches", "nothing: every stream lies on its own disk"
        return
    yield "a node fetches", f"{told(node.run_bytes, 'size')} over the run"
    yield "a node keeps", f"{told(node.kept_bytes, 'size')} on its disk"
