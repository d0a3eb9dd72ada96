"""The output of `mdsmix export`: what was written, and the settings that a trainer needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mdsmix.exporting.run import ExportOutcome
from mdsmix.exporting.stream_rows import sum_counts
from mdsmix.frozen import frozen
from mdsmix.report.result import Result
from mdsmix.report.show import Item
from mdsmix.table import BLANK, Column, Row, Table, Tree, table_to_json

COLUMNS = (
    Column("stream", "text"),
    Column("files"),
    Column("size", "size", key="bytes"),
    Column("samples"),
    Column("tokens"),
    Column("trained"),
    Column("", "text", key="state"),
)
WEIGHT = Column("weight", "finest")


@frozen(kw_only=True)
class ExportedMix(Result):
    """The streams that were exported, as `mdsmix.export` returns them."""

    format: str
    out: Path
    "The folder of the export."
    streams: Sequence[ExportOutcome]
    weights: Mapping[str, float]
    """Name of a training stream -> its share of what trainers of this format draw: samples, or
    tokens for Megatron. Empty if no recipe weighs the streams.
    """
    weighs: str
    "What the weights are shares of: `samples` or `tokens`."
    data_args: Path | None = None
    "The file with the arguments of Megatron's --data-path; None for other formats."
    deleted_args: Path | None = None
    "Such a file of an earlier export to Megatron, which was deleted since its datasets are gone."

    @property
    def table(self) -> Table:
        """A row for each stream, and the sums if there are several."""
        rows = list[Row]()
        for outcome in self.streams:
            row = self._make_row(outcome.stream, [outcome], outcome.state)
            if self.weights:
                row = (*row, self.weights.get(outcome.stream, BLANK))  # evaluations have no weight
            rows.append(row)
        total: Row | None = None
        if len(rows) > 1:
            total = self._make_row("all", self.streams, "")
            if self.weights:
                total = (*total, BLANK)
        columns = [*COLUMNS, WEIGHT] if self.weights else COLUMNS
        return Table(columns=columns, rows=rows, total=total)

    def _make_row(self, name: str, outcomes: Sequence[ExportOutcome], state: str) -> Row:
        """Return a row of the table, without its weight: the sums over one or more streams."""
        counts = sum_counts(outcome.counts for outcome in outcomes)
        return (
            name,
            sum(len(outcome.files) for outcome in outcomes),
            sum(outcome.bytes for outcome in outcomes),
            counts.samples,
            counts.tokens,
            counts.trained,
            state,
        )

    @property
    def notes(self) -> Sequence[str]:
        """The settings that a trainer needs and what was replaced, each sentence once."""
        notes = dict.fromkeys(note for outcome in self.streams for note in outcome.notes)
        if self.deleted_args:
            notes[f"deleted {self.deleted_args}, since it named datasets that were replaced"] = None
        return list(notes)

    def items(self) -> Iterator[Item]:
        yield self.table
        yield f"in {self.out}; samples, tokens and trained tokens are those of the manifests"
        if self.weights:
            yield f"weight: the share of an epoch's {self.weighs}, by the recipe"
        yield from self.notes
        if self.data_args:
            yield f"--data-args-path {self.data_args}, which contains:"
            yield f"--data-path {self.data_args.read_text().strip()}"

    def to_dict(self) -> Tree:
        """Return the result as `mdsmix export --json` prints it."""
        tree = table_to_json(self.table)
        for row, outcome in zip(tree["rows"], self.streams, strict=True):
            row["folder"] = str(outcome.folder)
        return tree | {
            "format": self.format,
            "out": str(self.out),
            "weights": dict(self.weights),
            "weighs": self.weighs,
            "notes": self.notes,
            "data_args": str(self.data_args) if self.data_args else None,
        }
