"""Chooses how many of its source's records a stream needs for its share of a token budget.

A survey (survey.py) estimates the tokens of the source. More records are sampled than the estimate
requires, by a margin, since the estimate may be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from mdsmix import sources
from mdsmix.estimate.survey import Rates
from mdsmix.frozen import frozen
from mdsmix.messages import format_percent, plural
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import SourceFile

STEPS = (10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68, 82, 100)
"The digits of a rounded share, such as 0.015 or 0.15. Each step is about a fifth above the last."
MARGIN = 0.1
"""The smallest margin above an estimate, as a fraction of the estimate. There is always a margin,
since an estimate comes from a few places of the source only.
"""
DEVIATIONS = 2
"""The margin also contains so many standard deviations: of the estimate, and of the tokens that
random samples of the same number of records contain.
"""
SPARE = 1.02
"If a share was too small, the user gets a share 2 % above the one that would just be enough."


@frozen(kw_only=True)
class SourceEstimate:
    """An estimate of what a stream would contain if all of its source were converted."""

    rates: Rates
    tokens: float
    "Tokens, without the tokens that the loader would cut off."
    records: float
    "Records that would be written."

    @classmethod
    def of(cls, rates: Rates, files: Sequence[SourceFile]) -> SourceEstimate:
        """Return the estimate for a source.

        Args:
            rates: tokens per byte and per record of the source.
            files: all files of the source.
        """
        tokens = rates.tokens_per_byte * sources.estimate_size(files)
        return cls(rates=rates, tokens=tokens, records=tokens / rates.mean)


class SamplingShare(NamedTuple):
    """The share of a source's records that is put into the sample, as a fraction such as 3/200."""

    share: Fraction
    "The part of the records that is sampled: above 0, at most 1."
    margin: float
    "How much more is sampled than the estimate requires: 0.1 is a tenth more."

    @property
    def setting(self) -> str | None:
        """The share as manifests store it (`Encoding.sample`): a string such as `3/200`; None if
        the share is all records.
        """
        return None if self.share == 1 else str(self.share)


def choose_sampling_share(
    source: SourceEstimate, tokens: Fraction, trained_part: float = 1.0
) -> SamplingShare:
    """Choose the share of records to sample so that the sample has at least `tokens` tokens, even
    if the estimate of the source is somewhat too high.

    Args:
        source: the estimate of the whole source.
        tokens: the tokens that are needed.
        trained_part: the fraction of the source that is not held out for evaluation.
    """
    needed_share = float(tokens) / (source.tokens * trained_part)
    needed_records = max(1.0, source.records * trained_part * needed_share)
    # How much the tokens of a random sample vary, relative to their mean: both the number of
    # sampled records and their lengths are random.
    deviation = math.sqrt((1 + source.rates.spread**2) / needed_records)
    margin = MARGIN + DEVIATIONS * (source.rates.error + deviation)
    share = round_up_share(needed_share * (1 + margin))
    return SamplingShare(min(Fraction(1), share), margin)


def round_up_share(share: float) -> Fraction:
    """Return a share above 0, rounded up to a number with few digits: 0.0123 to 0.015. The result
    is one of STEPS (10, 12, 15, 18, ...) times a power of ten.
    """
    # 0.0123 is 12.3 * 10^-3: STEPS are from 10 to 100, so the exponent is one less than usual.
    exponent = math.floor(math.log10(share)) - 1
    steps = [step * Fraction(10) ** exponent for step in STEPS]
    # The first step that is not below the share.
    return next(step for step in steps if step >= Fraction(share))


@frozen(kw_only=True)
class BudgetShare:
    """A stream's share of a budget in tokens, and the share of its records that is sampled."""

    tokens: int
    "The stream's share of the budget."
    budget: str
    "The whole budget, as messages write it: `4,000 tokens`."
    source: SourceEstimate
    "The estimate for all of its source, including records that are held out for evaluation."
    margin: float
    "How many more tokens than `tokens` are sampled by the estimate: 0.1 is a tenth more."
    share: Fraction
    "The share of the records that is sampled; 1 is all records."

    @property
    def explanation(self) -> str:
        """A phrase for the user: `its share of 4,000 tokens is 1,000 tokens; its source has about
        9,000 tokens (...), so 15% of the records are taken, ...`.
        """
        if self.share < 1:
            records = (
                f"{format_percent(self.share)} of the records are taken, with a margin of "
                f"{self.margin:.0%}"
            )
        else:
            records = "all records are taken"
        return (
            f"its share of {self.budget} is {self.tokens:,} tokens; its source has about "
            f"{self.source.tokens:,.0f} tokens (estimated from "
            f"{plural(self.source.rates.splits, 'place')} of it), so {records}"
        )

    def missing(self, manifest: Manifest) -> int:
        """Return how many tokens the converted stream lacks to fill its share of the budget; 0 if
        it has enough.

        Args:
            manifest: the manifest of the converted stream.
        """
        return max(0, self.tokens - manifest.totals.seen_tokens)

    def next_share(self, manifest: Manifest) -> Fraction:
        """Return the share of records that would have been just enough for the budget, plus 2 %,
        for a stream whose sample was too small. It is computed from the tokens of the converted
        stream, not from the estimate.

        Args:
            manifest: the manifest of the converted stream.
        """
        converted_tokens = max(1, manifest.totals.seen_tokens)
        needed = float(self.share) * SPARE * self.tokens / converted_tokens
        return min(Fraction(1), round_up_share(needed))
