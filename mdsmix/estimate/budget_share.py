"""How large a part of its source a stream needs for its share of a budget. A survey estimates the
tokens of the source. The sample of records has a margin above that estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from mdsmix import sources
from mdsmix.estimate.survey import Rates
from mdsmix.messages import format_percent, plural
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import SourceFile

STEPS = (10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68, 82, 100)
MARGIN = 0.1
"""The smallest margin above an estimate, as a fraction of it. There is always a margin, since an
estimate comes from the beginnings of a few splits only.
"""
DEVIATIONS = 2
"""How many standard deviations are added to the margin: those of the estimate, and those of the
tokens that a random sample happens to contain.
"""
SPARE = 1.02
"If a share was too small, the next one is 2 % larger than would just have been enough."


@dataclass(frozen=True, kw_only=True)
class SourceEstimate:
    """An estimate of what a stream would contain if all of its source were converted."""

    rates: Rates
    tokens: float
    "Tokens, without those that the loader would cut off."
    records: float
    "Records that would be written."

    @classmethod
    def of(cls, rates: Rates, files: Sequence[SourceFile]) -> SourceEstimate:
        """Return the estimate for a source of these files."""
        tokens = rates.tokens_per_byte * sources.estimate_size(files)
        return cls(rates=rates, tokens=tokens, records=tokens / rates.mean)


class SamplingShare(NamedTuple):
    """The share of a source's records that is sampled."""

    share: Fraction
    "Above 0, at most 1."
    margin: float
    "The margin in the share: 0.1 is a tenth more than needed by the estimate."

    @property
    def setting(self) -> str | None:
        """The share as a value of `Encoding.sample`, such as `3/200`; None for all records."""
        return None if self.share == 1 else str(self.share)


def choose_sampling_share(
    source: SourceEstimate, tokens: Fraction, trained_part: float = 1.0
) -> SamplingShare:
    """Choose the share of records to sample so that the sample has at least `tokens` tokens.

    Args:
        source: the estimate of the whole source.
        tokens: the tokens that are needed.
        trained_part: the fraction of the source that is not held out for evaluation.
    """
    needed_part = float(tokens) / (source.tokens * trained_part)
    records = max(1.0, source.records * trained_part * needed_part)
    # The relative standard deviation of the tokens of a random sample of `records` records.
    deviation = math.sqrt((1 + source.rates.spread**2) / records)
    margin = MARGIN + DEVIATIONS * (source.rates.error + deviation)
    return SamplingShare(min(Fraction(1), round_up_share(needed_part * (1 + margin))), margin)


def round_up_share(share: float) -> Fraction:
    """Return a share above 0, rounded up to one of STEPS times a power of ten: 0.0123 to 0.015."""
    # STEPS begin at 10, not at 1, so the exponent is one less.
    decade = math.floor(math.log10(share)) - 1
    steps = [step * Fraction(10) ** exponent for exponent in (decade - 1, decade) for step in STEPS]
    return next(step for step in steps if step >= Fraction(share))


@dataclass(frozen=True, kw_only=True)
class BudgetShare:
    """A stream's share of a budget in tokens, and the share of its records that is sampled."""

    tokens: int
    "The stream's share of the budget."
    budget: str
    "The budget, for messages."
    source: SourceEstimate
    "The estimate for all of its source, including records that are held out for evaluation."
    margin: float
    "By how much the sample should exceed `tokens`: 0.1 is a tenth."
    share: Fraction
    "The share of the records that is sampled; 1: all of them."

    @property
    def explanation(self) -> str:
        """A sentence for the user on the share and the estimate from which it was chosen."""
        if self.share < 1:
            records = (
                f"{format_percent(self.share)} of the records are taken, with a margin of "
                f"{self.margin:.0%}"
            )
        else:
            records = "all records are taken"
        return (
            f"its share of {self.budget} is {self.tokens:,}; estimated from "
            f"{plural(self.source.rates.splits, 'place')} of its source, all of it has about "
            f"{self.source.tokens:,.0f}, so {records}"
        )

    def missing(self, manifest: Manifest) -> int:
        """Return how many tokens the converted stream has too few for its share of the budget."""
        return max(0, self.tokens - manifest.totals.seen_tokens)

    def next_share(self, manifest: Manifest) -> Fraction:
        """Return the share of records that would have been enough for the budget, plus 2 %, by the
        tokens that the converted stream has.
        """
        converted_tokens = max(1, manifest.totals.seen_tokens)
        needed = float(self.share) * SPARE * self.tokens / converted_tokens
        return min(Fraction(1), round_up_share(needed))
