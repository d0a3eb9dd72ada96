"""The output of `mdsmix convert` and `mdsmix mix`: a table, and notes below it
(conversion_notes.py). `mdsmix inspect` shows the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mdsmix.conversion.run import Outcome, PartOutcome
from mdsmix.frozen import frozen
from mdsmix.messages import plural
from mdsmix.report.conversion_notes import describe_outcome, list_warnings
from mdsmix.report.drawings import Ribbon, RibbonPart, choose_colours, make_records_ribbon
from mdsmix.report.result import Result
from mdsmix.report.show import Item
from mdsmix.report.trained_tokens import count_trained_tokens
from mdsmix.shards.counts import Records
from mdsmix.table import BLANK, UNKNOWN, Column, Row, Table, Tree, Worded, table_to_json

if TYPE_CHECKING:
    from mdsmix.mix.offline.mix_streams import MixOutcome

COLUMNS = (
    Column("stream", "text"),
    *map(Column, ("read", "written", "filtered", "quarantined", "tokens", "shards", "bytes")),
    Column("seconds", "seconds"),
    Column("tokens/s", key="tokens_per_second"),
)
MIXTURE = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("weight", "weight"),
    Column("drawn"),
    Column("share", "share", key="share_of_samples"),
    Column("tokens"),
    Column("share", "share", key="share_of_tokens"),
)


@frozen
class Conversion(Result):
    """The result of a conversion, as `mdsmix.convert` returns it."""

    streams: tuple[Outcome, ...]
    "One outcome for each stream, in the order of the recipe."

    def items(self) -> list[Item]:
        return show_conversion(self.streams)[0] if self.streams else []

    def items_with_drawings(self) -> list[Item | Ribbon]:
        colours = choose_colours(outcome.stream for outcome in self.streams)
        parts = []
        for outcome in self.streams:
            tokens = count_trained_tokens(outcome.manifest)
            parts.append(RibbonPart(outcome.stream, colours[outcome.stream], tokens))
        drawn = list[Item | Ribbon](self.items())
        if any(part.amount for part in parts):
            drawn.append(Ribbon("tokens", parts))
        for outcome in self.streams:
            records = outcome.manifest.records
            if records.filtered or records.quarantined:
                css = colours[outcome.stream]
                drawn.append(make_records_ribbon(f"records of {outcome.stream}", records, css))
        return drawn

    def to_dict(self) -> Tree:
        """Return the result as `mdsmix convert --json` prints it."""
        return show_conversion(self.streams)[1]

    @property
    def warnings(self) -> list[str]:
        """Sentences on data that may be trained wrongly, each after the name of its stream."""
        return list(list_warnings(self.streams))


@frozen
class ConvertedPart(Result):
    """The result of one job of an array (several jobs that share a conversion), as
    `mdsmix.convert_part` returns it.
    """

    part: str
    "K/N."
    streams: tuple[PartOutcome, ...]

    def items(self) -> list[Item]:
        return show_parts(self.part, self.streams)[0]

    def to_dict(self) -> Tree:
        """Return the result as `mdsmix convert --part K/N --json` prints it."""
        return show_parts(self.part, self.streams)[1]

    @property
    def warnings(self) -> list[str]:
        """Sentences on data that may be trained wrongly, each after the name of its stream."""
        return list(list_warnings(self.streams))


def show_conversion(outcomes: Sequence[Outcome]) -> tuple[list[Item], Tree]:
    """Return the result of a conversion as items to show, and as JSON."""
    table = make_conversion_table(outcomes)
    tree = table_to_json(table)
    # The JSON of a stream also has what the table leaves out.
    for row, outcome in zip(tree["rows"], outcomes, strict=True):
        manifest = outcome.manifest
        records = manifest.records
        budget = None
        if outcome.budget_share:
            budget = {
                "wanted_tokens": outcome.budget_share.tokens,
                "missing_tokens": outcome.budget_share.missing(manifest),
            }
        row |= {
            "target": outcome.target,
            "state": outcome.state,
            "reasons": {"filtered": records.filtered, "quarantined": records.quarantined},
            "duplicates": records.duplicates,
            "budget": budget,
            "index_hash": manifest.index_hash,
            "peak_bytes": outcome.peak,
        }
    return [table], tree


def make_conversion_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row for each stream, and a total if there are several."""
    rows = [_sum_row(outcome.stream, [outcome]) for outcome in outcomes]
    notes = list[str]()
    for outcome in outcomes:
        notes += describe_outcome(outcome)
    peak = max((outcome.peak for outcome in outcomes), default=0)
    if peak:
        notes.append(f"peak memory: {peak / 1e6:,.0f} MB")
    return Table(
        columns=COLUMNS,
        rows=rows,
        total=_sum_row("all", outcomes) if len(outcomes) > 1 else None,
        notes=notes,
    )


def _sum_row(name: str, outcomes: Sequence[Outcome]) -> Row:
    """Return one row of the table of conversions (COLUMNS): sums over one or more streams. If
    nothing was converted, the column of seconds has `up to date`, or `reused` if a stream was
    published again, which is 0 s for a program.
    """
    records = Records()
    shards = 0
    tokens: float = 0
    for outcome in outcomes:
        manifest = outcome.manifest
        records += manifest.records
        shards += sum(unit.shards for unit in manifest.parts)
        tokens += count_trained_tokens(manifest)
    is_published = any(outcome.units for outcome in outcomes)
    seconds: float | Worded = Worded("reused" if is_published else "up to date", 0.0)
    tokens_per_second: int | Worded = BLANK
    if any(outcome.done for outcome in outcomes):
        seconds = sum(outcome.seconds for outcome in outcomes)
        new_tokens = sum(outcome.new_tokens for outcome in outcomes)
        tokens_per_second = int(new_tokens / max(seconds, 1e-3))
    return (
        name,
        records.read,
        records.written,
        records.dropped,
        records.bad,
        tokens,
        shards,
        sum(outcome.bytes for outcome in outcomes),
        seconds,
        tokens_per_second,
    )


def show_parts(part: str, outcomes: Sequence[PartOutcome]) -> tuple[list[Item], Tree]:
    """Return the result of one job of an array as lines to show, and as JSON.

    Args:
        part: which part of the work the job did, such as `1/4`.
    """
    tree = {"part": part, "streams": [asdict(outcome) for outcome in outcomes]}
    lines = list[Item]()
    for outcome in outcomes:
        lines += describe_outcome(outcome)
    return lines, tree


def make_mixture_table(outcome: MixOutcome) -> Table:
    """Return a table of the streams that a mixed stream was drawn from: samples, tokens and shares.
    Tokens are unknown if columns contain no ids.
    """
    mixed = outcome.record.mixed
    index = outcome.index
    tokens = [UNKNOWN if stream.tokens is None else stream.tokens for stream in mixed]
    all_tokens = sum(tokens)
    all_drawn = sum(stream.drawn for stream in mixed)
    rows = []
    for stream, token_count in zip(mixed, tokens, strict=True):
        rows.append(
            (
                stream.name,
                stream.samples,
                stream.weight,
                stream.drawn,
                stream.drawn / all_drawn,
                token_count,
                token_count / max(1, all_tokens),
            )
        )
    samples = sum(stream.samples for stream in mixed)
    token_share = all_tokens / max(1, all_tokens)  # 1, unless tokens are unknown
    state = "mixed" if outcome.is_new else "up to date"
    size = f"{plural(len(index.shards), 'shard')}, {index.bytes:,} bytes"
    notes = [f"{state}, seed {outcome.record.seed}, {size}: {outcome.target}"]
    if not outcome.has_manifest:
        notes.append("  the mix has no manifest, because one of its streams has none")
    return Table(
        columns=MIXTURE,
        rows=rows,
        total=("all", samples, BLANK, all_drawn, 1.0, all_tokens, token_share),
        notes=notes,
    )
