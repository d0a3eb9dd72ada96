"""`share: 30%`, `budget: 2B tokens`, `sample: 5%`: which part of an epoch a stream is, how large an epoch is, how much of a source is read.

Shares and budgets are read into fractions, so that 0.1 + 0.2 is 0.3 and the counts of a mix are the same on every machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from mdsmix.recipe.spec import Recipe, StreamSpec, WeightSpec, is_share, share_of
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


BY_BUDGET = "budget"


def written_shares(recipe: Recipe) -> dict[str, Fraction | None]:
    """Each stream that is trained on, with its share as it is written; None where it has none."""
    weights: Mapping[str, WeightSpec] = recipe.mix
    found = {s.name: weights[s.name].share if s.name in weights else None for s in recipe.trained}
    return {name: None if share is None else read_share(share) for name, share in found.items()}


def budget_of(recipe: Recipe) -> Budget | None:
    return None if recipe.budget is None else read_budget(recipe.budget)


def sample_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    """Sentences on the `sample` of a stream with a source."""
    if stream.sample is None:
        return
    if stream.sample == BY_BUDGET:
        try:
            tokens_wanted(recipe, stream)
        except ValueError as error:
            yield f"sample: budget takes what the stream's share of the budget wants, and {error}."
    elif not is_share(stream.sample) or not share_of(stream.sample):
        yield (
            f"sample is {told(stream.sample)}; it must be a share above 0 of at most 1, such as 5% or 0.05, or budget, which takes "
            "what the recipe's budget wants."
        )


def tokens_wanted(recipe: Recipe, stream: StreamSpec) -> Fraction:
    """What the stream's share of the budget comes to; ValueError says why it is not known before the streams are converted."""
    budget = budget_of(recipe)
    if budget is None:
        raise ValueError("there is none: add budget, for example 2B tokens, or write sample: 5%")
    if budget.unit != "tokens" or recipe.count not in (None, "tokens"):
        counts = budget if budget.unit != "tokens" else f"of {budget}, and shares count {recipe.count}"  # fmt: skip
        raise ValueError(
            f"it is {counts}: how many tokens that comes to only a conversion tells; give budget and shares in tokens, or write sample: 5%"
        )
    shares = written_shares(recipe)
    name = stream.held_out_of or stream.name
    if name not in shares:
        raise ValueError(
            f"a stream of the split {stream.split} is evaluated on and has no share: write sample: 5%, or take it out"
        )
    given = [share for share in shares.values() if share is not None]
    share = shares[name]
    if share is None and len(given) == len(shares) - 1 and not recipe.absolute:
        share = 1 - sum(given, Fraction(0))  # all that the others leave
    if share is None:
        raise ValueError(
            f"it has no share: write mix.{name}.share, since what other streams leave is divided by sizes that only a "
            "conversion tells, or write sample: 5%"
        )
    if not share:
        raise ValueError("its share is 0, so nothing of it is wanted: take the stream out")
    is_normal = len(given) == len(shares) and not recipe.absolute
    return budget.amount * share / (sum(given, Fraction(0)) if is_normal else 1)


def with_budget(recipe: Recipe) -> Recipe:
    """The recipe in which every stream that is converted and trained on takes what the budget wants, where it names no sample."""
    shares = written_shares(recipe)
    streams = {
        s.name: replace(s, sample=BY_BUDGET)
        if s.source and s.sample is None and (s.held_out_of or s.name) in shares
        else s
        for s in recipe.streams.values()
    }
    return replace(recipe, streams=streams)


def bare_budget(written: str) -> Budget:
    """A budget in which a number without a unit is tokens: `2B`; ValueError says what is amiss."""
    is_bare = re.fullmatch(rf"\s*{NUMBER}\s*[kmbt]?\s*", written, re.I)
    return read_budget(f"{written} tokens" if is_bare else written)


STEPS = (10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68, 82, 100)
MARGIN = 0.1
"More than the estimate says, at least: it comes from the beginnings of a few splits."
DEVIATIONS = 2
"Of the estimate, and of the lengths of the records that happen to be in the sample, by which the margin is larger."


def taken(part: float, records: float, error: float, spread: float) -> tuple[Fraction, float]:
    """The share of the records that is taken for a `part` of the source's tokens, 1 at most; and the margin that is in it: 0.1 for a
    tenth. `records`: of the source; `error`: the relative standard error of what it holds; `spread`: the standard deviation of a
    record's tokens, as a part of their mean."""
    happen = max(1.0, records * part)
    margin = MARGIN + DEVIATIONS * (error + math.sqrt((1 + spread**2) / happen))
    return min(Fraction(1), step_above(part * (1 + margin))), margin


def step_above(share: float) -> Fraction:
    """The smallest step that is not below a share above 0."""
    decade = math.floor(math.log10(share)) - 1
    steps = (step * Fraction(10) ** place for place in (decade - 1, decade) for step in STEPS)
    return next(step for step in steps if step >= Fraction(share))
