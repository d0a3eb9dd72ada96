"""Tokens that are wanted of a stream, and about how many all of its source holds -> the share of its records that is taken.

A step that is large enough is taken, so that what a record says decides and not how exact the estimate of the source was. Steps are
those of resistors, twelve a decade: 1%, 1.2%, 1.5%, ... 8.2%, 10%. A source that grows a little takes the same step as before, so
nothing of it is done again, and a larger budget takes the same or a larger one, which only adds records.
"""

from __future__ import annotations

import math
from fractions import Fraction

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
