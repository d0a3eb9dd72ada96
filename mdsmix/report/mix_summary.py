"""The table at the end of `mdsmix mix`: how many samples of each stream the new stream holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdsmix.mix.offline.mix_streams import MixOutcome
from mdsmix.shards.manifest import Mixed
from mdsmix.table import Column, Row, Table, as_json
from mdsmix.words import plural

COLUMNS = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("weight", "weight"),
    Column("drawn"),
    Column("share", "share", key="share_of_samples"),
    Column("tokens"),
    Column("share", "share", key="share_of_tokens"),
)


def mixture(outcome: MixOutcome) -> Table:
    """A row a stream, and the sum. The notes say where the new stream lies."""
    *rows, total = mixture_rows(outcome.record.mixed)
    return Table(columns=COLUMNS, rows=rows, total=total, notes=_sentences(outcome))


def mixture_json(outcome: MixOutcome) -> dict[str, Any]:
    return as_json(mixture(outcome)) | {"target": outcome.target, "seed": outcome.record.seed}


def mixture_rows(mixed: Sequence[Mixed]) -> list[Row]:
    """A row a stream and one for all; None for tokens that the columns do not tell."""
    drawn = sum(each.drawn for each in mixed)
    known = [each.tokens for each in mixed if each.tokens is not None]
    tokens = sum(known) if len(known) == len(mixed) else None
    rows: list[Row] = [
        (
            each.name,
            each.samples,
            dict(each.weight),
            each.drawn,
            each.drawn / drawn,
            each.tokens,
            None if tokens is None else (each.tokens or 0) / max(1, tokens),
        )
        for each in mixed
    ]
    samples = sum(each.samples for each in mixed)
    return [*rows, ("all", samples, "", drawn, 1.0, tokens, 1.0 if tokens else None)]


def _sentences(outcome: MixOutcome) -> list[str]:
    state = f"mixed in {outcome.seconds:.1f} s" if outcome.is_new else "up to date"
    size = f"{plural(outcome.shards, 'shard')}, {outcome.bytes:,} bytes"
    said = [f"{state}, seed {outcome.record.seed}, {size}: {outcome.target}"]
    if not outcome.has_manifest:
        said.append(
            "  a stream has no manifest, so the mix has none: only its index tells what it is"
        )
    return said
