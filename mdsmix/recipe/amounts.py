"""Amounts in a recipe: a stream's part of an epoch (`share: 30%`), an epoch's size (`budget: 2B
tokens`), a source's part (`sample: 5%`).

Shares and budgets are read into fractions, so that 0.1 + 0.2 is 0.3 and the counts of a mix are the
same on every machine.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Unit = Literal["tokens", "loss_tokens", "samples"]
UNITS: tuple[Unit, ...] = ("tokens", "loss_tokens", "samples")
"""The units of a share and a budget: tokens that the model sees, positions that give a loss,
samples.
"""
NUMBER = r"(?:\d[\d_,]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?"
SHARE = re.compile(rf"({NUMBER})\s*(%?)|(\d{{1,9}}/[1-9]\d{{0,8}})")
BUDGET = re.compile(
    rf"({NUMBER})\s*([kmbt]?)\s+(?:(token|loss_token|sample)s?|pass(?:es)?\s+of\s+(\S+))", re.I
)
A_SHARE = "a number of at least 0, such as 0.3, 30% or 1/3"
A_BUDGET = "above 0, with its unit: 2B tokens, 500M loss_tokens, 1M samples or 2 passes of STREAM"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The size of an epoch, all streams together: an amount of a unit, or passes of one stream."""

    amount: Fraction
    unit: Unit | None = None
    "None: passes over `stream`."
    stream: str | None = None

    def __str__(self) -> str:
        amount = float(self.amount) if self.amount.denominator > 1 else int(self.amount)
        return f"{amount:,} {self.unit or f'passes of {self.stream}'}"


def read_share(written: str | int | float) -> Fraction:
    """`30%`, 0.3, `1/3` or 7 as a fraction; ValueError where it is no number of at least 0."""
    if (found := SHARE.fullmatch(str(written).strip())) is None:
        raise ValueError(f"it must be {A_SHARE}")
    number, percent, ratio = found.groups()
    return Fraction(ratio) if ratio else _number(number) / (100 if percent else 1)


def read_budget(written: str | int | float) -> Budget:
    """`2B tokens` or `2 passes of chat`; ValueError says what it must be."""
    found = BUDGET.fullmatch(str(written).strip())
    if found is None or not _number(found[1]):
        raise ValueError(f"it must be {A_BUDGET}")
    number, letter, unit, stream = found.groups()
    units = {each[:-1]: each for each in UNITS}
    return Budget(
        amount=_number(number) * 1000 ** (" kmbt".index(letter.lower() or " ")),
        unit=units[unit.lower()] if unit else None,
        stream=stream,
    )


def with_unit(written: str) -> str:
    """The written budget, with ` tokens` after a number that has no unit: `2B` becomes `2B
    tokens`.
    """
    is_bare = re.fullmatch(rf"\s*{NUMBER}\s*[kmbt]?\s*", written, re.I)
    return f"{written} tokens" if is_bare else written


def _number(text: str) -> Fraction:
    return Fraction(re.sub("[_,]", "", text))


STEPS = (10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68, 82, 100)
MARGIN = 0.1
"""The least margin above an estimate, as a part of it: an estimate comes from the beginnings of a
few splits.
"""
DEVIATIONS = 2
"""Standard deviations that are added to the margin: of the estimate, and of the tokens that a
random sample happens to hold.
"""


def taken(part: float, records: float, error: float, spread: float) -> tuple[Fraction, float]:
    """The share of records to take for a `part` of the source's tokens, 1 at most, and the margin
    in that share: 0.1 is a tenth more. `records`: the number of the source's records. `error`: the
    relative standard error of the estimate of the source's tokens. `spread`: the standard deviation
    of a record's tokens, divided by their mean.
    """
    happen = max(1.0, records * part)
    margin = MARGIN + DEVIATIONS * (error + math.sqrt((1 + spread**2) / happen))
    return min(Fraction(1), step_above(part * (1 + margin))), margin


def step_above(share: float) -> Fraction:
    """A share above 0, rounded up to the next step: 0.0123 to 0.015."""
    decade = math.floor(math.log10(share)) - 1
    steps = (step * Fraction(10) ** place for place in (decade - 1, decade) for step in STEPS)
    return next(step for step in steps if step >= Fraction(share))
