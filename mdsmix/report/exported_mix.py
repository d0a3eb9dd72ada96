"""The output of `mdsmix export`: what was written, and the settings that a trainer needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mdsmix.exporting.run import ExportOutcome
from mdsmix.frozen import frozen
from mdsmix.report.result import Result
from mdsmix.report.show import Item
from mdsmix.table import Column, Table, Tree, table_to_json

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
        columns = list(COLUMNS)
        rows = list[Any]()
        for outcome in self.streams:
            counts = outcome.counts
            row: list[Any] = [outcome.stream, len(outcome.files), outcome.bytes]
            row += [counts.samples, counts.tokens, counts.trained, outcome.state]
            rows.append(row)
        total: list[Any] = ["all", *(sum(row[n] for row in rows) for n in range(1, 6)), ""]
        if self.weights:
            columns.append(WEIGHT)
            total.append("")
            for row in rows:
                row.append(self.weights.get(row[0], ""))  # evaluations have no weight
        return Table(
            columns=columns,
            rows=[tuple(row) for row in rows],
            total=tuple(total) if len(rows) > 1 else None,
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
