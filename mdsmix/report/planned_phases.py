"""A plan over several phases as text: a table of the phases, a table of what each draws, and the
notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from mdsmix.messages import plural
from mdsmix.mix.plan.phases_plan import PhasesPlan
from mdsmix.mix.plan.plan import list_figures
from mdsmix.report.planned_run import LEGEND
from mdsmix.report.result import Result
from mdsmix.report.show import Item
from mdsmix.table import Column, Estimate, Table, Tree

PHASES = (
    Column("phase", "text"),
    Column("budget", "text"),
    Column("steps"),
    Column("to step"),
    Column("tokens"),
    Column("trained"),
)
STREAMS = (
    Column("phase", "text"),
    Column("stream", "text"),
    Column("samples"),
    Column("tokens"),
    Column("share", "share"),
    Column("passes so far", "times"),
    Column("drawn before"),
    Column("its tokens"),
)
REPEATS_LEGEND = (
    "drawn before: samples of the phase that an earlier phase has drawn too, by the seeds of the "
    "phases"
)


class PlannedPhases(PhasesPlan, Result):
    """The plan of a run in phases, as `mdsmix.plan_phases` returns it."""

    def items(self) -> Iterator[Item]:
        first = self.phases[0].plan
        yield (
            f"{self.origin}: {plural(len(self.phases), 'phase')}, {plural(first.nodes, 'node')} of "
            f"{plural(first.gpus, 'device')}, {first.step.global_batch:,} rows a step, "
            f"{first.loader} loader, max_seq_len {first.max_seq_len:,}"
        )
        yield self._make_phases_table()
        yield self._make_streams_table()
        yield ""
        phases_of = dict[str, list[str]]()  # a note -> the phases that have it
        for phase in self.phases:
            for note in phase.plan.notes:
                phases_of.setdefault(note, []).append(phase.name)
        yield from (f"{', '.join(names)}: {note}" for note, names in phases_of.items())
        yield REPEATS_LEGEND
        yield LEGEND
        name = self.phases[-1].name
        yield f"one phase with its nodes and settings: mdsmix plan RECIPE phase={name}"

    def to_dict(self) -> Tree:
        """Return the plan as `mdsmix plan --json` prints it."""
        tree = asdict(self) | {"steps": self.steps, "tokens": self.tokens, "trained": self.trained}
        figures = list_figures(tree)
        estimated = [path for path, figure in figures if isinstance(figure, Estimate)]
        return tree | {"estimated": estimated}

    def _make_phases_table(self) -> Table:
        """Return a table with a row for each phase: its steps and tokens."""
        rows = [
            (
                phase.name,
                phase.budget,
                phase.plan.run.steps,
                phase.steps_before + phase.plan.run.steps,
                phase.plan.run.tokens,
                phase.plan.run.trained,
            )
            for phase in self.phases
        ]
        total = ("all", "", self.steps, "", self.tokens, self.trained)
        return Table(columns=PHASES, rows=rows, total=total)

    def _make_streams_table(self) -> Table:
        """Return a table with a row for each stream of each phase."""
        rows = [
            (
                phase.name,
                stream.stream,
                stream.drawn,
                stream.tokens,
                stream.share,
                stream.passes,
                stream.repeated,
                stream.repeated_tokens,
            )
            for phase in self.phases
            for stream in phase.streams
        ]
        return Table(columns=STREAMS, rows=rows)
