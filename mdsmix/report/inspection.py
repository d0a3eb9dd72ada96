"""The index, the manifest and some samples of a published stream, as `mdsmix inspect` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mdsmix.encode.decoder import Decoder, find_decoder
from mdsmix.report.card import card, card_rows
from mdsmix.report.segments import runs_of, sample_json
from mdsmix.report.show import Item, NamedValues, SampleText, Title
from mdsmix.report.which_samples import Choice, Chosen, choose
from mdsmix.shards.published import Stream, find_published, read_in
from mdsmix.shards.side_files import Name
from mdsmix.storage import locate
from mdsmix.words import plural


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
