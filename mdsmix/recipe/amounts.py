"""Amounts in a recipe: a stream's share of an epoch (`share: 30%`), an epoch's size (`budget: 2B
tokens`), the share of a source that is read (`sample: 5%`).

Shares and budgets are read into fractions, so that 0.1 + 0.2 is 0.3 and the counts of a mix are the
same on every machine.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from mdsmix.frozen import frozen

Unit = Literal["tokens", "loss_tokens", "samples"]
UNITS: tuple[Unit, ...] = ("tokens", "loss_tokens", "samples")
"""The units of a share and a budget: tokens that the model sees, positions that give a loss,
samples.
"""
NUMBER = r"(?:\d[\d_,]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?"
SHARE = re.compile(rf"({NUMBER})\s*(%?)|(\d{{1,9}}/[1-9]\d{{0,8}})")
LONE_SHARE = re.compile(rf"\s*(?:{NUMBER}\s*%|\d{{1,9}}/[1-9]\d{{0,8}})\s*")
"""A share that no other weight looks like: `30%` or `1/3`. `mix: {web: 30%}` is the short form of
`mix: {web: {share: 30%}}`.
"""
BUDGET = re.compile(
    rf"({NUMBER})\s*([kmbt]?)\s+(?:(token|loss_token|sample)s?|pass(?:es)?\s+of\s+(\S+))", re.I
)
BUDGET_PATTERN = (
    rf"^\s*{NUMBER}\s*[kKmMbBtT]?\s+(?:(?:[tT][oO][kK][eE][nN]|[lL][oO][sS][sS]_[tT][oO][kK][eE][nN]"
    r"|[sS][aA][mM][pP][lL][eE])[sS]?|[pP][aA][sS][sS](?:[eE][sS])?\s+[oO][fF]\s+\S+)\s*$"
)
"BUDGET as a pattern of a JSON Schema, which cannot ignore case."
_EXPONENT = r"(?:[eE][+-]?\d{1,2})?"
NO_BUDGET = rf"^\s*(?:0[0_,]*(?:\.0*)?|\.0+){_EXPONENT}\s*[kKmMbBtT]?\s"
"A budget of 0, as a pattern of a JSON Schema."
NOTHING = rf"^\s*(?:0[0_,]*(?:\.0*)?|\.0+){_EXPONENT}\s*%?\s*$|^\s*0+/"
"A share of 0, as a pattern of a JSON Schema."
WHOLE = r"^\s*0*(?:100(?:\.0*)?\s*%|1(?:\.0*)?)\s*$"
"A share of 1 without separators or exponent, as a pattern of a JSON Schema."
ABOVE_WHOLE = (
    r"^\s*0*(?:(?:[1-9]\d{3,}|[2-9]\d\d|1[1-9]\d|10[1-9])(?:\.\d*)?\s*%|100\.0*[1-9]\d*\s*%"
    r"|(?:[1-9]\d+|[2-9])(?:\.\d*)?|1\.0*[1-9]\d*)\s*$"
)
"A share above 1 without separators or exponent, as a pattern of a JSON Schema."
POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}
"Letter after a number -> the power of 1000 that it means."
A_SHARE = "a number of at least 0, such as 0.3, 30% or 1/3"
A_BUDGET = "above 0, with its unit: 2B tokens, 500M loss_tokens, 1M samples or 2 passes of STREAM"


@frozen(kw_only=True)
class Budget:
    """The size of an epoch, all streams together: a number of tokens, loss tokens or samples; or a
    number of passes over one stream.
    """

    amount: Fraction
    unit: Unit | None = None
    "None: the amount is passes over `stream`."
    stream: str | None = None
    "The name of the stream whose passes are counted; None if `unit` is set."

    def __str__(self) -> str:
        """Return `2,000,000 tokens`, or `2 passes of chat`."""
        amount = float(self.amount) if self.amount.denominator > 1 else int(self.amount)
        noun = "pass" if amount == 1 else "passes"
        unit = self.unit if self.unit else f"{noun} of {self.stream}"
        return f"{amount:,} {unit}"


def read_share(value: str | int | float) -> Fraction:
    """Read `30%`, 0.3, `1/3` or 7 as a fraction.

    Raises ValueError if it is not a number of at least 0.
    """
    match = SHARE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"it must be {A_SHARE}")
    number, percent, ratio = match.groups()
    if ratio:
        return Fraction(ratio)
    return _parse_number(number) / (100 if percent else 1)


def match_share(*words: str) -> str:
    """Return a pattern of a JSON Schema that matches a share, or one of the words."""
    word_choices = "".join(f"|{word}" for word in words)
    return rf"^\s*(?:{NUMBER}\s*%?|\d{{1,9}}/[1-9]\d{{0,8}}{word_choices})\s*$"


def read_budget(value: str | int | float) -> Budget:
    """Read `2B tokens` or `2 passes of chat`. Raises ValueError if it is neither."""
    match = BUDGET.fullmatch(str(value).strip())
    if match is None or not _parse_number(match[1]):
        raise ValueError(f"it must be {A_BUDGET}")
    number, letter, unit, stream = match.groups()
    units = {name.removesuffix("s"): name for name in UNITS}  # {"token": "tokens", ...}
    return Budget(
        amount=_parse_number(number) * 1000 ** POWERS[letter.lower()],
        unit=units[unit.lower()] if unit else None,
        stream=stream,
    )


def is_phase_budget(value: str | int | float) -> bool:
    """Check whether a value is the budget of a phase: a budget, or a share of the recipe's budget
    above 0 that is written with % or as a ratio. Raises ValueError for a budget of 0.
    """
    if is_lone_share(value):
        return read_share(value) > 0
    return read_budget(value) is not None


def is_lone_share(value: str | int | float) -> bool:
    """Check whether a value is a share that is written with % or as a ratio: `30%` or `1/3`."""
    return isinstance(value, str) and LONE_SHARE.fullmatch(value) is not None


def add_unit(budget: str) -> str:
    """Add ` tokens` to a budget without a unit: `2B` becomes `2B tokens`."""
    is_bare = re.fullmatch(rf"\s*{NUMBER}\s*[kmbt]?\s*", budget, re.I)
    return f"{budget} tokens" if is_bare else budget


def _parse_number(text: str) -> Fraction:
    return Fraction(re.sub("[_,]", "", text))
