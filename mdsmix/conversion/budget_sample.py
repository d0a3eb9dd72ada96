"""The sample of a stream whose recipe leaves it to the budget. The survey of its source is kept in
the cache of this machine. It is used again as long as the surveyed parts of the source are
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from mdsmix.cache import cache_folder
from mdsmix.conversion.job import Job
from mdsmix.conversion.source_cache import recall, remember, unit_stamp
from mdsmix.conversion.unit import open_tokenizer_backend
from mdsmix.encode.backends import Backend
from mdsmix.errors import RecipeError
from mdsmix.estimate.budget_share import BudgetShare, SourceEstimate, choose_sampling_share
from mdsmix.estimate.survey import Rates, Survey, estimate_rates
from mdsmix.recipe import Recipe, StreamSpec, read_share
from mdsmix.recipe.rules import count_budget_tokens, find_budget
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.sources import SourceFile, Unit


def set_budget_sample(
    recipe: Recipe, stream: StreamSpec, job: Job, files: Sequence[SourceFile]
) -> tuple[Job, BudgetShare | None]:
    """Return the job with the sample that fills its stream's share of the budget, if the recipe
    asks for that, and the share that is taken.

    Under `--limit` all of the first records are taken: a small share of a few records would be
    none.
    """
    if stream.sample != BY_BUDGET or job.limit:
        return job, None
    source = estimate_source(job, files)
    if source is None:
        raise RecipeError(
            f"stream {stream.name}: the records that were read gave no token, so it is unknown how "
            "much of the source its share of the budget is: look at some with --limit 100, or "
            "write sample: 5%."
        )
    tokens = count_budget_tokens(recipe, stream)
    trained_part = 1.0 if stream.holdout is None else 1 - float(read_share(stream.holdout))
    sampling = choose_sampling_share(source, tokens, trained_part)
    job = job.with_settings(sample=sampling.setting)
    if stream.held_out_of:
        return job, None
    return job, BudgetShare(
        tokens=math.ceil(tokens),
        budget=str(find_budget(recipe)),
        source=source,
        margin=sampling.margin,
        share=sampling.share,
    )


def estimate_source(job: Job, files: Sequence[SourceFile]) -> SourceEstimate | None:
    """Estimate all of a stream's source, by a survey or by the cache of an earlier one. None if the
    surveyed parts give no token.
    """
    job = job.with_settings(sample=None, holdout=None, held_out=False, duplicates="keep")

    def open_backend(name: str) -> Backend:
        return open_tokenizer_backend(replace(job, backend=name))

    survey = Survey(
        stream=job.stream,
        tokenizer=job.tokenizer,
        open_backend=open_backend,
        backend=job.backend,
        images_root=job.images_root,
        # Images are read only for a processor, which tells how many tokens each becomes; without
        # one it is one token.
        reads_images="processor" in job.encoding.images,
    )
    units = survey.choose_units(files)
    path = _cache_path(job, units)
    rates = _recall_rates(path)
    if rates is None:
        rates = estimate_rates(survey.read(units))
        if rates is None:
            return None
        _remember_rates(path, rates)
    return SourceEstimate.of(rates, files)


def _cache_path(job: Job, units: Sequence[Unit]) -> Path:
    key = " ".join([job.settings_hash, *map(unit_stamp, units)])
    return cache_folder() / "looks" / f"{xxhash.xxh128_hexdigest(key)}.json"


def _recall_rates(path: Path) -> Rates | None:
    cached: Mapping[str, Any] | None = recall(path)
    if cached is None:
        return None
    return Rates(
        tokens_per_byte=cached["each"],
        error=cached["error"],
        mean=cached["mean"],
        spread=cached["spread"],
        splits=cached["places"],
    )


def _remember_rates(path: Path, rates: Rates) -> None:
    """Keep rates in the cache, under the keys that its files have."""
    cached = {
        "each": rates.tokens_per_byte,
        "error": rates.error,
        "mean": rates.mean,
        "spread": rates.spread,
        "places": rates.splits,
    }
    remember(path, cached)
