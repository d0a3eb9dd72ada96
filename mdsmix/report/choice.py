"""Which samples of a stream are shown: its first ones, those at given places, the longest, or some at random.

The longest is found by the tables at the heads of shards, which say how many bytes a sample takes. Tables are read up to a
bound, and of token lists as JSON, whose bytes do not tell how many they are, the largest few are counted; so it is said
whether the one that is shown is the longest or only among those that were looked at.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.report.pictures import Picture, pictures_of
from mdsmix.report.samples import Sample, as_shown
from mdsmix.shards.index import Index, Shard
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.sample import HEAD_BYTES, read_head, read_sample, sample_sizes
from mdsmix.storage import Location, together
from mdsmix.words import plural

MOST_TABLES = 4096
"Shards whose tables are read for the longest sample: 256 GB of stream, some seconds at a store."
MOST_ROWS = 1 << 24
"Samples in these tables: 64 MiB of offsets."
COUNTED = 16
"The largest samples, whose tokens are counted."


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was asked for; at most one of `places`, `longest` and `seed`."""

    count: int = 3
    places: Sequence[int] = ()
    "Samples by their numbers, the first is 0."
    longest: bool = False
    seed: int | None = None
    "`count` at random: the same seed, the same samples."


@dataclass(frozen=True, slots=True)
class Chosen:
    """A sample and its number in the stream."""

    number: int
    sample: Sample
    note: str = ""
    "What is known of it: that it is the longest."
    pictures: Sequence[Picture] = ()
    "Its images."


def choose(
    folder: Location, index: Index, manifest: Manifest | None, choice: Choice
) -> Iterator[Chosen]:
    """The samples that were asked for; RecipeError where there is no such sample, Unreachable where one cannot be read."""
    if choice.longest:
        yield from _longest(folder, index, manifest)
        return
    places = _random(index, choice) if choice.seed is not None else choice.places
    for place in places:
        yield _chosen(place, _read(folder, index, place), manifest)
    if not places and choice.seed is None and index.shards and choice.count:
        for number, sample in enumerate(read_head(folder, index.shards[0], choice.count)):
            yield _chosen(number, sample, manifest)


def _chosen(number: int, sample: Mapping[str, Any], manifest: Manifest | None) -> Chosen:
    return Chosen(number, as_shown(sample, manifest), pictures=pictures_of(sample, manifest))


def _random(index: Index, choice: Choice) -> list[int]:
    drawn = random.Random(choice.seed).sample(
        range(index.samples), min(choice.count, index.samples)
    )
    return sorted(drawn)


def _read(folder: Location, index: Index, place: int) -> dict[str, Any]:
    if place >= index.samples:
        raise RecipeError(
            f"--sample {place}: {folder} holds {plural(index.samples, 'sample')}, the first is 0; name one that is there."
        )
    ends = list(accumulate(shard.samples for shard in index.shards))
    number = bisect_right(ends, place)
    shard = index.shards[number]
    return read_sample(folder, shard, place - (ends[number] - shard.samples))


def _longest(folder: Location, index: Index, manifest: Manifest | None) -> Iterator[Chosen]:
    shards = _bounded(index.shards)
    if not index.samples:
        return
    if not any(shard.samples for shard in shards):
        raise Unreachable(
            f"the first shard of {folder} is said to hold more than {MOST_ROWS:,} samples, too many to look through for the "
            "longest: name one by --sample, or let --random choose."
        )
    sizes = np.concatenate(together(lambda shard: sample_sizes(folder, shard), shards))
    candidates = np.argsort(-sizes, kind="stable")[:COUNTED].tolist()
    budget, read = COUNTED * HEAD_BYTES, list[Chosen]()
    for place in candidates:
        if not read or budget >= sizes[place]:
            read.append(_chosen(place, _read(folder, index, place), manifest))
            budget -= int(sizes[place])
    found = max(read, key=lambda chosen: _length(chosen.sample))  # of equals the first
    is_sure = _is_longest(found, index, manifest, len(sizes))
    said = "the longest" if is_sure else _among(len(read), len(sizes), index, manifest)
    yield replace(found, note=f"{said}: {_measure(found.sample)}")


def _bounded(shards: Sequence[Shard]) -> list[Shard]:
    """The first shards, as many as may be looked at: none where the first is beyond the bound, as a hostile index may say."""
    rows = accumulate(shard.samples for shard in shards)
    first = zip(shards[:MOST_TABLES], rows, strict=False)
    return [shard for shard, total in first if total <= MOST_ROWS]


def _is_longest(found: Chosen, index: Index, manifest: Manifest | None, seen: int) -> bool:
    if isinstance(found.sample, Mapping):
        return False
    if manifest and manifest.index_hash == index.hash:
        return _length(found.sample) == manifest.totals.longest
    columns = index.shards[0].columns.values()
    return seen == index.samples and all(encoding.startswith("ndarray") for encoding in columns)


def _among(counted: int, seen: int, index: Index, manifest: Manifest | None) -> str:
    of = "all" if seen == index.samples else f"the first {seen:,} of {index.samples:,}"
    longest = f", the manifest says {manifest.totals.longest:,} tokens" if manifest else ""
    return f"the longest of the {counted} that are largest in bytes among {of} samples{longest}"


def _length(sample: Sample) -> int:
    if isinstance(sample, Mapping):
        return sum(len(str(value)) for value in sample.values())
    return sum(len(part.ids) for part in sample)


def _measure(sample: Sample) -> str:
    return plural(_length(sample), "character" if isinstance(sample, Mapping) else "token")
