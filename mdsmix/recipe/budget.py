"""`share: 30%` and `budget: 2B tokens`: which part of an epoch a stream is, and how large an epoch is.

Both are read into fractions, so that 0.1 + 0.2 is 0.3 and the counts of a mix are the same on every machine. What they come to
in samples is worked out from the streams, in `mdsmix.mix.apportion`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from mdsmix.typed import brief

Unit = Literal["tokens", "loss_tokens", "samples"]
UNITS: tuple[Unit, ...] = ("tokens", "loss_tokens", "samples")
"What a share and a budget may count: tokens that the model sees, positions that give a loss, samples."
THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
NUMBER = r"(?:\d[\d_,]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?"
SHARE = re.compile(rf"({NUMBER})\s*(%?)|(\d{{1,9}})/([1-9]\d{{0,8}})")
BUDGET = re.compile(
    rf"({NUMBER})\s*([kmbt]?)\s+(tokens?|loss_tokens?|samples?|pass(?:es)?\s+of\s+(\S+))", re.I
)
WAYS = "write 2B tokens, 500M loss_tokens, 1M samples or 2 passes of STREAM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What an epoch is to hold, of all streams together."""

    amount: Fraction
    unit: Unit | None = None
    "None: passes over `stream`."
    stream: str | None = None

    def __str__(self) -> str:
        amount = float(self.amount) if self.amount.denominator > 1 else int(self.amount)
        number = f"{amount:,}"
        return f"{number} {self.unit}" if self.unit else f"{number} passes of {self.stream}"


def read_share(written: str | int | float) -> Fraction:
    """`30%`, 0.3, `1/3` or 7 as a fraction; ValueError where it is no number of at least 0."""
    found = SHARE.fullmatch(str(written).strip())
    if found is None:
        raise ValueError("a share is a number of at least 0, such as 0.3, 30% or 1/3")
    number, percent, above, below = found.groups()
    if above:
        return Fraction(int(above), int(below))
    return _number(number) / (100 if percent else 1)


def read_budget(written: str | int | float) -> Budget:
    """`2B tokens` or `2 passes of chat`; ValueError says what is amiss."""
    text = str(written).strip()
    if re.fullmatch(rf"{NUMBER}\s*[kmbt]?", text, re.I):
        raise ValueError(f"it has no unit, and {text} tokens are not {text} samples: {WAYS}")
    found = BUDGET.fullmatch(text)
    if found is None:
        raise ValueError(f"it is no number with a unit: {WAYS}")
    number, thousands, unit, stream = found.groups()
    amount = _number(number) * THOUSANDS[thousands.lower()]
    if not amount:
        raise ValueError("nothing would be drawn: it must be above 0")
    if stream:
        return Budget(amount=amount, stream=stream)
    return Budget(
        amount=amount,
        unit=next(u for u in UNITS if u.startswith(unit.lower().rstrip("s"))),
    )


def _number(text: str) -> Fraction:
    return Fraction(re.sub("[_,]", "", text))


def told(written: object) -> str:
    """A value as a sentence names it."""
    return written if isinstance(written, str) and len(written) <= 60 else brief(written)
