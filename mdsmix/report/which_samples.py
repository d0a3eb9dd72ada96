"""Which samples of a stream are shown: its first ones, those at given places, the one of the most bytes, or some at random."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from mdsmix.errors import RecipeError
from mdsmix.report.sample_images import Picture, pictures_of
from mdsmix.report.segments import Sample, as_shown
from mdsmix.shards.index import Index
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.sample import read_head, read_sample, sample_sizes
from mdsmix.storage import Location, together
from mdsmix.words import plural


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
    pictures: Sequence[Picture] = ()
    "Its images."


def choose(
    folder: Location, index: Index, manifest: Manifest | None, choice: Choice
) -> Iterator[Chosen]:
    """The samples that were asked for; RecipeError where there is no such sample, Unreachable where one cannot be read."""
    places = _random(index, choice) if choice.seed is not None else choice.places
    for place in _largest(folder, index) if choice.longest else places:
        yield _chosen(place, _read(folder, index, place), manifest)
    is_first = not places and choice.seed is None and not choice.longest
    if is_first and index.shards and choice.count:
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


def _largest(folder: Location, index: Index) -> list[int]:
    """The sample of the most bytes, by the tables at the heads of the shards; none of an empty stream."""
    sizes = together(lambda shard: sample_sizes(folder, shard), index.shards)
    return [int(np.concatenate(sizes).argmax())] if index.samples else []
