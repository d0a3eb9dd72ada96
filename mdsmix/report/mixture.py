"""The table at the end of `mdsmix mix`: what the new stream holds of each stream that it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence

from mdsmix.mix.offline.run import MixOutcome
from mdsmix.shards.manifest import Mixed

HEADINGS = ("stream", "in it", "weight", "drawn", "share", "tokens", "share")


def print_mixture(outcome: MixOutcome) -> None:
    """One row a stream, the sum, then where it lies and what should be known of it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "stream" else "right", no_wrap=True)
    *rows, total = mixture_rows(outcome.record.mixed)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*total)
    console.print(table)
    for sentence in _sentences(outcome):
        console.print(sentence, markup=False)


def mixture_rows(mixed: Sequence[Mixed]) -> list[tuple[str, ...]]:
    """A row a stream and one for all; `?` for tokens that the columns do not tell."""
    drawn = sum(each.drawn for each in mixed)
    known = [each.tokens for each in mixed if each.tokens is not None]
    tokens = sum(known) if len(known) == len(mixed) else None
    rows = [
        (
            each.name,
            f"{each.samples:,}",
            ", ".join(f"{k} {v}" for k, v in each.weight.items()) or "all",
            f"{each.drawn:,}",
            f"{each.drawn / drawn:.1%}",
            _grouped(each.tokens),
            f"{(each.tokens or 0) / max(1, tokens):.1%}" if tokens is not None else "?",
        )
        for each in mixed
    ]
    samples = f"{sum(each.samples for each in mixed):,}"
    return [
        *rows,
        ("all", samples, "", f"{drawn:,}", "100.0%", _grouped(tokens), "100.0%" if tokens else "?"),
    ]


def _sentences(outcome: MixOutcome) -> list[str]:
    state = f"mixed in {outcome.seconds:.1f} s" if outcome.is_new else "up to date"
    shards = (
        f"{outcome.shards:,} shard{'s' if outcome.shards != 1 else ''}, {outcome.bytes:,} bytes"
    )
    said = [f"{state}, seed {outcome.record.seed}, {shards}: {outcome.target}"]
    if not outcome.has_manifest:
        said.append(
            "  a stream has no manifest, so the mix has none: only its index tells what it is"
        )
    return said


def _grouped(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
