"""What `inspect` shows of a stream: which samples are chosen, and the tree of a stream and its samples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mdsmix.encode.decoder import Decoder, find_decoder
from mdsmix.errors import RecipeError
from mdsmix.report.card import card, card_rows
from mdsmix.report.segments import Picture, Sample, as_shown, pictures_of, runs_of, sample_json
from mdsmix.report.show import Item, NamedValues, SampleText, Title
from mdsmix.shards.index import Index
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.published import Stream, find_published, read_in
from mdsmix.shards.shard_samples import read_head, sample_table
from mdsmix.shards.side_files import Name
from mdsmix.storage import locate, together
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was read of a stream."""

    stream: Stream
    samples: Sequence[Chosen]
    decoder: Decoder | None
    "None: this machine does not know the tokenizer."
    ids: Mapping[int, Name | list[Name]] = field(default_factory=dict)
    "Number of a sample -> the id of its record, or the ids of a packed row, if the stream keeps ids."


def inspect(stream: str, choice: Choice, tokenizer: str | None) -> Inspection:
    """Reads the stream; Unreachable without a published stream."""
    found = read_in(find_published(locate(stream)))
    samples, manifest = list(choose(found, choice)), found.manifest
    return Inspection(
        stream=found,
        samples=samples,
        ids={each.number: found.id_of(each.number) for each in samples},
        decoder=find_decoder(tokenizer, manifest.tokenizer.hash if manifest else None),
    )


def inspection_shown(found: Inspection, choice: Choice) -> Iterator[Item]:
    """The card, and the samples."""
    yield NamedValues(card_rows(found.stream))
    if choice.seed is not None:
        yield f"at random, --seed {choice.seed}"
    for chosen in found.samples:
        name = found.ids.get(chosen.number)
        of = "" if name is None else f", id {name}"
        if isinstance(name, list):
            of = f", ids {', '.join(map(str, name))}"
        yield Title(f"sample {chosen.number:,}{of}")
        yield SampleText(runs_of(chosen.sample, found.decoder))
        yield from (f"image {number}: {picture}" for number, picture in enumerate(chosen.pictures))
    is_first = choice.seed is None and not choice.places and not choice.longest
    if is_first and len(found.samples) < min(choice.count, found.stream.index.samples):
        yield (
            f"{len(found.samples):,} of {plural(found.stream.index.samples, 'sample')}: the first are read from the first mebibyte of the first "
            "shard; --sample N shows any other, --random some from anywhere"
        )


def inspection_json(found: Inspection) -> dict[str, Any]:
    """The card, and the samples with their numbers."""
    samples = [
        {
            "number": chosen.number,
            **({} if (name := found.ids.get(chosen.number)) is None else {"id": name}),
            "sample": sample_json(chosen.sample, found.decoder),
            **({"images": [p.as_json() for p in chosen.pictures]} if chosen.pictures else {}),
        }
        for chosen in found.samples
    ]
    return card(found.stream) | {"shown": samples}
