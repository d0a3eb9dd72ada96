"""How much of its source a stream takes for its share of a budget. A survey estimates the tokens of
the source, and `mdsmix.recipe.amounts` makes a share of records of that. The survey is kept in the
cache of this machine and holds as long as the parts of the source that it looked at are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction

import xxhash

from mdsmix import sources
from mdsmix.cache import cache_folder
from mdsmix.conversion.job import Job
from mdsmix.conversion.source_cache import recall, remember, unit_stamp
from mdsmix.conversion.unit import open_tokenizer_backend
from mdsmix.errors import RecipeError
from mdsmix.kinds.read_records import Reading, open_reading
from mdsmix.kinds.survey import Rates, look, rates_of
from mdsmix.messages import format_percent, plural
from mdsmix.recipe import Recipe, StreamSpec, read_share
from mdsmix.recipe.amounts import step_above, taken
from mdsmix.recipe.rules import budget_of, tokens_wanted
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import SourceFile

FAR = 0.05
"A mean that differs by more than 5 % from the expected one is told."


@dataclass(frozen=True, kw_only=True)
class SourceEstimate(Rates):
    """An estimate of what a stream would hold if all of its source were converted."""

    tokens: float
    "Tokens, without those that the loader would cut off."
    records: float
    "Records that would be written."


def estimate_source(job: Job, files: Sequence[sources.SourceFile]) -> SourceEstimate | None:
    """Surveys the source; None where the parts that were looked at give no token."""
    encoding = replace(job.encoding, sample=None, holdout=None, held_out=False, duplicates="keep")
    job = replace(job, encoding=encoding)
    units = sources.choose_splits(files, fields=job.fields_read, parsed=job.fields_parsed)
    key = " ".join([job.settings_hash, *map(unit_stamp, units)])
    path = cache_folder() / "looks" / f"{xxhash.xxh128_hexdigest(key)}.json"
    known = recall(path)
    if known is None:
        # Images are read only for a processor, which says how many tokens each becomes; without one
        # it is one token.
        reads_images = "processor" in job.encoding.images
        root = job.images_root if reads_images else None

        def reading(backend: str) -> Reading:
            found = open_tokenizer_backend(replace(job, backend=backend))
            return open_reading(job.encoding, job.tokenizer, found, root)

        looks = look(units, reading, job.backend, reads_images and not root)
        if (rates := rates_of(looks)) is None:
            return None
        remember(path, known := asdict(rates))
    tokens = known["each"] * sources.estimate_size(files)
    return SourceEstimate(**known, tokens=tokens, records=tokens / known["mean"])


@dataclass(frozen=True, kw_only=True)
class BudgetShare:
    """A stream's share of a budget in tokens, and the share of its records that is taken for it."""

    tokens: int
    budget: str
    source: SourceEstimate
    "The estimate for all of its source, on both sides of a holdout."
    margin: float
    "The part by which the sample is to exceed `tokens`: 0.1 for a tenth."
    share: Fraction
    "The share of the records that is taken; 1: all of them."

    @property
    def said(self) -> str:
        """A sentence on what is taken and why; its numbers are estimates, but for the share."""
        said = "all records are taken"
        if self.share < 1:
            said = f"{format_percent(self.share)} of the records are taken, with a margin of {self.margin:.0%}"
        return (
            f"its share of {self.budget} is {self.tokens:,}; estimated from {plural(self.source.places, 'place')} of its source, all of "
            f"it holds about {self.source.tokens:,.0f}, so {said}"
        )

    def missing(self, manifest: Manifest) -> int:
        """Tokens that the converted stream lacks."""
        return max(0, self.tokens - manifest.totals.seen_tokens)

    def next_share(self, manifest: Manifest) -> Fraction:
        """The share that would have been enough, with 2 % to spare."""
        came = max(1, manifest.totals.seen_tokens)
        return min(Fraction(1), step_above(float(self.share) * 1.02 * self.tokens / came))


def sampled(
    recipe: Recipe, stream: StreamSpec, job: Job, files: Sequence[SourceFile]
) -> tuple[Job, BudgetShare | None]:
    """Sets the sample of a job so that the stream fills its share of the budget, where its recipe
    says so.

    Under `--limit` all of the first records are taken: a small share of a few records would be
    none.
    """
    if stream.sample != BY_BUDGET or job.limit:
        return job, None
    source = estimate_source(job, files)
    if source is None:
        raise RecipeError(
            f"stream {stream.name}: not one token came of the records that were looked at, so nothing tells how much of the source its "
            "share of the budget is: look at some with --limit 100, or write sample: 5%."
        )
    tokens = tokens_wanted(recipe, stream)
    trained = 1.0 if stream.holdout is None else 1 - float(read_share(stream.holdout))
    part = float(tokens) / (source.tokens * trained)
    share, margin = taken(part, source.records * trained, source.error, source.spread)
    job = replace(job, encoding=replace(job.encoding, sample=None if share == 1 else str(share)))
    wanted = BudgetShare(
        tokens=math.ceil(tokens),
        budget=str(budget_of(recipe)),
        source=source,
        margin=margin,
        share=share,
    )
    return job, None if stream.held_out_of else wanted


def said_of_mean(mean: float, expected: float | None) -> str | None:
    """Says how far the mean tokens of a record are from the recipe's expected_mean_tokens; None
    within 5 %.
    """
    if not expected or not mean or abs(mean / expected - 1) <= FAR:
        return None
    return (
        f"{mean / expected - 1:+.1%} of the expected_mean_tokens of {expected:,g}: another tokenizer, other records, or others "
        "among them"
    )
