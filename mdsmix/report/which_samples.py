"""Which samples of a stream are shown: its first ones, those at given places, the one of the most bytes, or some at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdsmix.errors import RecipeError
from mdsmix.report.sample_images import Picture, pictures_of
from mdsmix.report.segments import Sample, as_shown
from mdsmix.shards.index import Index
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.published import Stream
from mdsmix.shards.shard_samples import read_head, sample_table
from mdsmix.storage import together
from mdsmix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The options of `mdsmix inspect`: at most one of `places`, `longest` and `seed`."""

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


def choose(stream: Stream, choice: Choice) -> Iterator[Chosen]:
    """The chosen samples; RecipeError for a number beyond the last sample, Unreachable for a sample that cannot be read."""
    places = _random(stream.index, choice) if choice.seed is not None else choice.places
    for place in _largest(stream) if choice.longest else places:
        yield _chosen(place, _read(stream, place), stream.manifest)
    is_first = not places and choice.seed is None and not choice.longest
    if is_first and stream.shards and choice.count:
        samples = read_head(stream.folder, stream.shards[0], choice.count)
        for number, sample in enumerate(samples):
            yield _chosen(number, sample, stream.manifest)


def _chosen(number: int, sample: Mapping[str, Any], manifest: Manifest | None) -> Chosen:
    return Chosen(number, as_shown(sample, manifest), pictures=pictures_of(sample, manifest))


def _random(index: Index, choice: Choice) -> list[int]:
    drawn = random.Random(choice.seed).sample(
        range(index.samples), min(choice.count, index.samples)
    )
    return sorted(drawn)


def _read(stream: Stream, place: int) -> dict[str, Any]:
    if place >= stream.index.samples:
        raise RecipeError(
            f"--sample {place}: {stream.folder} holds {plural(stream.index.samples, 'sample')}, the first is 0; name one that is there."
        )
    return stream.read(place)


def _largest(stream: Stream) -> list[int]:
    """The sample of the most bytes, by the tables at the heads of the shards; none of an empty stream."""
    sizes = together(lambda shard: np.diff(sample_table(stream.folder, shard)), stream.shards)
    return [int(np.concatenate(sizes).argmax())] if stream.index.samples else []
