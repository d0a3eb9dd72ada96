"""A plan for people: a table of the streams, the figures of a step, the run and a node, and the
settings with their reasons.

Every figure comes from the `Plan`, which `--json` prints whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from mdsmix.messages import plural
from mdsmix.mix.plan.plan import Plan, list_figures
from mdsmix.report.show import Item, NamedValues
from mdsmix.table import Column, Estimate, Table, Tree, cell_text, is_known

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
"Figure -> the form in which it is written, for figures other than counts."
LEGEND = "~ is estimated; ? is not known; all else is counted by manifests and indexes, or follows from them"


def plan_json(plan: Plan) -> Tree:
    """The plan as a tree, with null for unknown figures, and `estimated`: the paths of all
    estimated figures.
    """
    tree = asdict(plan)
    return tree | {
        "estimated": [path for path, of in list_figures(tree) if isinstance(of, Estimate)]
    }


def told(figure: float, form: str = "count") -> str:
    """A figure of the plan as text, marked `~` where it is estimated and `?` where it is
    not known.
    """
    return cell_text(Column("", form), figure)


def plan_shown(plan: Plan) -> Iterator[Item]:
    """The whole plan for a person."""
    yield (
        f"{plan.origin}: {plural(plan.nodes, 'node')} of {plural(plan.gpus, 'device')}, {plan.step.global_batch:,} rows a step, "
        f"{plan.loader} loader, max_seq_len {plan.max_seq_len:,}"
    )
    yield _streams(plan)
    parts = {name: asdict(getattr(plan, name)) for name in ("step", "epoch", "run", "node")}
    said = {
        name: ", ".join(f"{key}: {told(of, FIGURES.get(key, 'count'))}" for key, of in part.items())
        for name, part in parts.items()
    }
    yield NamedValues(said.items())
    yield from ("", "settings")
    yield NamedValues([(s.key, f"{s.use or 'leave out'}: {s.why}") for s in plan.settings])
    yield from ("", *plan.notes)
    yield LEGEND


def _streams(plan: Plan) -> Table:
    """The table of the streams: their samples in an epoch, and their tokens in the run."""
    keys, run = [column.key or column.heading for column in STREAMS], plan.run
    rows = [tuple(getattr(stream, key) for key in keys) for stream in plan.streams]
    delivered, share = sum(s.delivered for s in plan.streams), 1.0 if is_known(run.tokens) else None
    return Table(
        columns=STREAMS,
        rows=rows,
        total=("all", delivered, "", run.tokens, run.trained, share, plan.step.padding),
    )
