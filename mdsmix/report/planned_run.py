"""A plan as text: a table of the streams, the figures of a step, the run and a node, and the
settings with their reasons.

Every figure comes from the `Plan`, which `--json` prints whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from mdsmix.messages import plural
from mdsmix.mix.plan.plan import Plan, list_figures
from mdsmix.report.drawings import Ribbon, RibbonPart, choose_colours
from mdsmix.report.result import Result
from mdsmix.report.show import Item, NamedValues
from mdsmix.table import Column, Estimate, Table, Tree, format_cell, is_known

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
"Figure that is not a count -> how it is written, as a key of `mdsmix.table.NUMBERS` or FORMS."
MEASURES = (("delivered", "samples"), ("tokens", "tokens"), ("trained", "trained tokens"))
"Field of a StreamInEpoch, and its name in a drawing."
LEGEND = (
    "~ estimated, ? unknown; other figures come from manifests and indexes, or follow from them"
)


class PlannedRun(Plan, Result):
    """The plan of a run, as `mdsmix.plan` returns it. Figures that are not exact are an `Estimate`,
    which is a float.
    """

    def items(self) -> Iterator[Item]:
        return show_plan(self)

    def items_with_drawings(self) -> Iterator[Item | Ribbon]:
        yield from make_mix_ribbons(self, choose_colours(s.stream for s in self.streams))
        yield from make_step_ribbon(self)
        yield from self.items()

    def to_dict(self) -> Tree:
        """Return the plan as `mdsmix plan --json` prints it."""
        return plan_to_json(self)


def make_mix_ribbons(plan: Plan, colours: Mapping[str, str]) -> Iterator[Ribbon]:
    """Yield each stream's share of an epoch: in samples, tokens and trained tokens. A share that
    is unknown is not drawn.

    Args:
        plan: the plan.
        colours: the class of each stream's colour.
    """
    for key, label in MEASURES:
        parts = []
        for stream in plan.streams:
            count = getattr(stream, key)
            parts.append(RibbonPart(stream.stream, colours[stream.stream], count))
        total = sum(part.amount for part in parts)
        if is_known(total) and total:
            yield Ribbon(f"{label} of an epoch", parts)


def make_step_ribbon(plan: Plan) -> Iterator[Ribbon]:
    """Yield one bar: the positions of a step, divided into trained tokens, other tokens and
    padding. Yield nothing if the number of trained tokens is unknown, or if the step has no
    positions.
    """
    step = plan.step
    if is_known(step.trained) and step.positions:
        tokens = min(step.tokens, step.positions)
        trained = min(step.trained, tokens)
        parts = (
            RibbonPart("trained tokens", "trained", trained),
            RibbonPart("other tokens", "read", tokens - trained),
            RibbonPart("padding", "padding", step.positions - tokens),
        )
        yield Ribbon("the positions of a step", parts)


def plan_to_json(plan: Plan) -> Tree:
    """Return the plan as JSON, with null for unknown figures. The key `estimated` lists the paths
    of the estimated figures, such as `streams.0.tokens`.
    """
    tree = asdict(plan)
    figures = list_figures(tree)
    return tree | {"estimated": [path for path, figure in figures if isinstance(figure, Estimate)]}


def format_figure(figure: float, form: str = "count") -> str:
    """Return a figure of the plan as text: `1,024`, `~1,024` if it is estimated, `?` if unknown.

    Args:
        form: the form of a column of a table, such as `share` or `size`.
    """
    return format_cell(Column("", form), figure)


def show_plan(plan: Plan) -> Iterator[Item]:
    """Yield the whole plan as text: a headline, the streams, the figures, and the settings."""
    yield (
        f"{plan.origin}: {plural(plan.nodes, 'node')} of {plural(plan.gpus, 'device')}, "
        f"{plan.step.global_batch:,} rows a step, {plan.loader} loader, "
        f"max_seq_len {plan.max_seq_len:,}"
    )
    yield _make_streams_table(plan)
    lines = []
    for name in ("step", "epoch", "run", "node"):
        figures = asdict(getattr(plan, name)).items()
        texts = [
            f"{key}: {format_figure(value, FIGURES.get(key, 'count'))}" for key, value in figures
        ]
        lines.append((name, ", ".join(texts)))
    yield NamedValues(lines)
    yield from ("", "settings")
    settings = []
    for setting in plan.settings:
        value = setting.use or "leave out"
        settings.append((setting.key, f"{value}: {setting.why}"))
    yield NamedValues(settings)
    yield from ("", *plan.notes)
    yield LEGEND


def _make_streams_table(plan: Plan) -> Table:
    """Return a table of the streams: their samples in an epoch, and their tokens in the run."""
    keys = [column.key or column.heading for column in STREAMS]
    rows = [tuple(getattr(stream, key) for key in keys) for stream in plan.streams]
    run = plan.run
    delivered = sum(stream.delivered for stream in plan.streams)
    share = 1.0 if is_known(run.tokens) else None
    return Table(
        columns=STREAMS,
        rows=rows,
        total=("all", delivered, "", run.tokens, run.trained, share, plan.step.padding),
    )
