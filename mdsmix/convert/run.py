"""A recipe's streams, one after the other: plan, do what is not done, publish.

What a source file held is remembered by its size and stamp, so a second run reads nothing: it compares keys. Streams
are converted in turn rather than together, so that a stream is published as soon as it can be, and one tokenizer
backend's failure concerns one stream.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

from mdsmix import sources
from mdsmix.convert import engine
from mdsmix.convert.guard import published_manifest, refuse_replacing
from mdsmix.convert.job import Job, make_job
from mdsmix.convert.ledger import UnitRecord
from mdsmix.convert.outcome import Outcome, Watcher
from mdsmix.convert.publish import leftover_key, publish
from mdsmix.convert.seen import Seen
from mdsmix.convert.unit import UnitResult, convert_unit
from mdsmix.encode.backends import Unequal, remember_unequal
from mdsmix.encode.tokenizer import open_tokenizer
from mdsmix.errors import RecipeError
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.index import BASENAME, Index, parse_index
from mdsmix.shards.manifest import Manifest, SourceFile


def convert(
    recipe: Recipe,
    *,
    watcher: Watcher,
    only: Sequence[str] = (),
    limit: int | None = None,
    reencode: bool = False,
    workers: int | None = None,
) -> list[Outcome]:
    """Converts and publishes every stream that has a source, or those named by `only`."""
    chosen = _chosen(recipe, only)
    tokenizer = open_tokenizer(recipe.tokenizer)
    crew = workers or engine.cpu_count()
    outcomes = []
    for stream in chosen:
        job = make_job(recipe, stream, tokenizer, limit)
        assert stream.source is not None
        plan = Plan.of(job, stream.source.path)
        outcomes.append(_convert_stream(job, plan, reencode, crew, watcher))
    return outcomes
