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
SIZES = ("run_bytes", "kept_bytes", "largest_shard")
FIGURES = {"padding": "share", "epochs": "times", "hours": "times", **dict.fromkeys(SIZES, "size")}
"How figures other than counts are written."
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
    """A step, an epoch, the run, and what a node reads and keeps: every figure by its name in the JSON."""
    for name in ("step", "epoch", "run", "node"):
        part = asdict(getattr(plan, name))
        yield (
            name,
            ", ".join(f"{key}: {told(of, FIGURES.get(key, 'count'))}" for key, of in part.items()),
        )
