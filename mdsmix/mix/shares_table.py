"""What shares came to, as a table: for a terminal, for programs and for the head of a rendered YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mdsmix.mix.apportion import Apportioned
from mdsmix.table import Column, Table, about, as_json
from mdsmix.words import listed

EPOCHS = (1, 2, 4)
"For which it is said how much of a stream was never drawn."
SHARES = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("choose"),
    Column("passes", "times"),
    Column("share asked", "fine", key="asked"),
    Column("reached", "fine"),
    *(
        Column(f"unseen in {n}" if n > 1 else "unseen in 1 epoch", "share", key=f"unseen_in_{n}")
        for n in EPOCHS
    ),
)


def shares_table(found: Apportioned) -> Table:
    """A row a stream: the share asked, what whole samples come to, and what of it is never seen."""
    rows = [
        (
            part.stream,
            part.samples,
            part.choose,
            part.passes,
            float(part.asked),
            about(float(part.reached), part.is_exact),
            *(found.unseen(part, epochs) for epochs in EPOCHS),
        )
        for part in found.parts
    ]
    return Table(columns=SHARES, rows=rows, notes=list(_notes(found)))


def shares_json(found: Apportioned) -> dict[str, Any]:
    keys = ("count", "is_absolute", "is_fixed", "is_exact")
    said = {key: getattr(found, key) for key in keys}
    return said | {"budget": found.budget and str(found.budget)} | as_json(shares_table(found))


def title(found: Apportioned) -> str:
    """Above the table: what the shares are of."""
    of = f"of the budget's {found.count}" if found.is_absolute else f"of an epoch's {found.count}"
    if found.budget:
        return f"shares {of}; budget: {found.budget}"
    return f"shares {of}; no budget: the largest epoch in which no stream is taken more than once"


def _notes(found: Apportioned) -> Iterator[str]:
    if guessed := [part.stream for part in found.parts if not part.is_exact]:
        yield f"~ {listed(guessed)}: not counted, taken from the first samples (--estimate)"
    if ended := [part.stream for part in found.parts if part.adds_eos]:
        yield f"{listed(ended)}: with the EOS that the loader adds to an answer without one, which no stream holds"
    if any(found.unseen(part, 1) for part in found.parts):
        yield (
            "unseen: sampling_method: fixed draws the same part of a stream in every epoch"
            if found.is_fixed
            else "unseen: every epoch draws a part of a stream anew; sampling_method: fixed would draw the same one"
        )
