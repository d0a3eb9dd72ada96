"""Samples of a stream to show: the choice of samples, their text with trained tokens and control
tokens marked, and their images.

A sample is a list of segments, each trained or not. Its kind decides by the target policies of the
manifest, as the finetuning loader does for its labels. The first token of a row is never predicted,
so it is never marked. A packed row shows where each of its documents begins, with its number and
length.

A control token is recognised by its id, never by its text. A typed `<|im_start|>`, or one that a
template wrote for a tokenizer without such a token, is ordinary tokens, and trains something else.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from mdsmix.errors import RecipeError
from mdsmix.kinds import Piece, kind_of, stored_pieces
from mdsmix.kinds.kind import runs
from mdsmix.messages import WRITTEN, make_printable, plural
from mdsmix.report.show import Run
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.published import PublishedStream
from mdsmix.shards.shard_samples import Sample, read_first_samples, read_sample_table
from mdsmix.shards.side_files import RecordName
from mdsmix.shards.token_ids import PACKED_COLUMNS, find_id_columns, has_images, split_documents
from mdsmix.storage import map_threads
from mdsmix.table import Tree
from mdsmix.tokenizer.decoder import Decoder

TRAINED, CONTROL, DOCUMENT = "⟦⟧", "⟨⟩", "⟪⟫"
"""Brackets around trained tokens, around a control token, and around the heading of a document of a
packed row.
"""
SHARED = "⟮⟯"
"Brackets around tokens that a sample shares with another one."
_MARKS = str.maketrans({mark: ascii(mark)[1:-1] for mark in TRAINED + CONTROL + DOCUMENT + SHARED})
DOUBLED_WITHIN = 3
"An EOS among the last 3 tokens of an answer has white space behind it at most."
FORMATS = {
    b"\xff\xd8": "JPEG",
    b"\x89PNG": "PNG",
    b"RIFF": "WebP",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*": "TIFF",
    b"MM": "TIFF",
    b"": "unknown",
}
"""First bytes of an image -> name of its format. Conversions store no other formats but AVIF, which
has its name further in.
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that are all trained or all not trained."""

    ids: list[int]
    is_trained: bool
    document: int | None = None
    "In a packed row, the number of the segment's document, from 0."
    before: int | None = None
    "The token in front of the segment, which a decoder may need."
    gap: int = 0
    "Tokens that are left out in front of the segment."
    is_appended: bool = False
    "It is the EOS that the loader appends, and is not stored."


Shown = list[Segment] | Sample
"The segments of a sample with token ids, or the columns of another sample (raw text, bytes)."


def as_shown(sample: Sample, manifest: Manifest | None) -> Shown:
    """The segments of a decoded sample. A sample without ids, such as raw text, is returned
    unchanged.
    """
    names = find_id_columns(sample)
    if not names or (manifest is None and any(isinstance(sample[name], bytes) for name in names)):
        return sample
    if names == PACKED_COLUMNS:
        return [
            replace(segment, document=number)
            for number, document in enumerate(split_documents(sample))
            for segment in segments(runs(*document))
        ]
    if manifest is None:  # by LLM-Foundry's default policies
        return segments(stored_pieces(sample))
    kind = kind_of(manifest.encoding)
    return segments(kind.pieces(sample), kind.appended_eos(sample, manifest.tokenizer.eos_id))


def segments(pieces: Iterable[Piece], eos: int | None = None) -> list[Segment]:
    """The segments of the pieces of a stored sample, and of the EOS that the loader appends."""
    tokens = [(int(token), trained) for ids, trained in pieces for token in ids]
    tokens[:1] = [(token, False) for token, _ in tokens[:1]]
    found, before = list[Segment](), None
    for flag, run in groupby(tokens, lambda pair: pair[1]):
        found.append(Segment([token for token, _ in run], flag, before=before))
        before = found[-1].ids[-1]
    if eos is not None:
        found.append(Segment([eos], True, before=before, is_appended=True))
    return found


def doubles_eos(sample: Shown) -> bool:
    """Tell whether the loader appends EOS to a sample whose last answer ends in EOS and white
    space.
    """
    if isinstance(sample, Mapping) or len(sample) < 2 or not sample[-1].is_appended:
        return False
    return sample[-1].ids[0] in sample[-2].ids[-DOUBLED_WITHIN:]


def shortened(parts: Sequence[Segment], most: int) -> list[Segment]:
    """The first and the last `most` / 2 tokens of a sample with more than `most`. The end is kept
    since it is usually trained.
    """
    tokens, half = [(part, token) for part in parts for token in part.ids], most // 2
    if len(tokens) <= most:
        return list(parts)
    first, last = (
        [
            replace(part, ids=[token for _, token in run])
            for part, run in groupby(side, itemgetter(0))
        ]
        for side in (tokens[:half], tokens[-half:])
    )
    return [
        *first,
        replace(last[0], before=tokens[-half - 1][1], gap=len(tokens) - 2 * half),
        *last[1:],
    ]


def runs_of(sample: Shown, decoder: Decoder | None, marks: str = TRAINED) -> Iterator[Run]:
    """Give the sample as text: trained tokens in ⟦ ⟧, each control token in ⟨ ⟩; ids if no
    tokenizer is known.

    Escape codes in a text are escaped, since samples come from anyone, and so are these brackets.
    `marks`: the brackets around segments with `is_trained`, if that means something else.
    """
    if isinstance(sample, Mapping):
        yield make_printable(str(sample), WRITTEN), "text"
        return
    for document, run in groupby(sample, lambda part: part.document):
        parts = list(run)
        if document is not None:
            tokens = plural(sum(len(part.ids) for part in parts), "token")
            said = f"document {document}, {tokens}".join(DOCUMENT)
            yield "\n" * (parts[0] is not sample[0]) + said + "\n", "mark"
        for part in parts:
            if part.gap:
                yield f" ... {part.gap:,} tokens ... ", "text"
            ids = " ".join(map(str, part.ids))
            inside = _decoded(part, decoder) if decoder else [(f"{ids} ", "text")]
            yield from (
                [(marks[0], "mark"), *inside, (marks[1], "mark")] if part.is_trained else inside
            )


def _decoded(part: Segment, decoder: Decoder) -> Iterator[Run]:
    before = part.before
    for is_control, run in groupby(part.ids, decoder.control.__contains__):
        for some in ([token] for token in run) if is_control else [list(run)]:
            text = make_printable(decoder.text(some, before), WRITTEN).translate(_MARKS)
            yield (text.join(CONTROL), "control") if is_control else (text, "text")
            before = some[-1]


def sample_json(sample: Shown, decoder: Decoder | None) -> Any:
    """The sample for programs: its columns, or its segments with ids, text and `control`, the
    places of control tokens in the ids.
    """
    if isinstance(sample, Mapping):
        return {name: v if isinstance(v, str) else repr(v) for name, v in sample.items()}
    return [_segment_json(part, decoder) for part in sample]


def _segment_json(part: Segment, decoder: Decoder | None) -> Tree:
    control = [i for i, token in enumerate(part.ids) if decoder and token in decoder.control]
    return {
        "document": part.document,
        "ids": part.ids,
        "trained": part.is_trained,
        "appended": part.is_appended,
        "text": decoder.text(part.ids, part.before) if decoder else None,
        "control": control if decoder else None,
    }


@dataclass(frozen=True)
class Picture:
    """An image of a sample, not decoded."""

    height: int
    width: int
    "Height and width as stored, in pixels, after the turn that EXIF asks for."
    data: bytes

    @property
    def format(self) -> str:
        if self.data[4:11] == b"ftypavi":
            return "AVIF"
        return next(name for start, name in FORMATS.items() if self.data.startswith(start))

    def __str__(self) -> str:
        return f"{self.width:,} x {self.height:,} {self.format}, {plural(len(self.data), 'byte')}"

    def as_json(self) -> Tree:
        return {
            "height": self.height,
            "width": self.width,
            "bytes": len(self.data),
            "format": self.format,
        }


def pictures_of(sample: Sample) -> list[Picture]:
    """The images of a decoded sample; [] for a stream without images."""
    if not has_images(sample) or not isinstance(sample["images"], list):
        return []
    pairs = zip(sample["sizes"], sample["images"], strict=False)
    return [Picture(height, width, data) for (height, width), data in pairs]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options of `mdsmix inspect`: at most one of `places`, `longest` and `seed`. Without them
    the first samples are shown.
    """

    count: int
    places: Sequence[int] = ()
    "Numbers of samples, from 0."
    longest: bool = False
    seed: int | None = None
    "`count` samples at random; the same seed gives the same samples."

    @property
    def is_first(self) -> bool:
        return not self.places and self.seed is None and not self.longest


@dataclass(frozen=True)
class Chosen:
    """A sample and its number in the stream."""

    number: int
    sample: Shown
    pictures: Sequence[Picture]
    ids: Sequence[RecordName]
    "The id of its record, or the ids of a packed row's records; [] where the stream keeps no ids."


def choose(stream: PublishedStream, choice: Choice) -> Iterator[Chosen]:
    """The chosen samples; RecipeError for a number beyond the last sample, Unreachable for a sample
    that cannot be read.
    """
    read: Iterable[Sample]
    if choice.is_first:
        first = stream.first_filled
        wants_some = first is not None and choice.count > 0
        read = (
            read_first_samples(stream.folder, first, choice.count) if first and wants_some else []
        )
        numbers: Iterable[int] = count()
    else:
        numbers = _numbers(stream, choice)
        read = map(stream.read, numbers)
    for number, sample in zip(numbers, read, strict=False):
        found = stream.id_of(number)
        ids = [each for each in (found if isinstance(found, list) else [found]) if each is not None]
        yield Chosen(number, as_shown(sample, stream.manifest), pictures_of(sample), ids)


def _numbers(stream: PublishedStream, choice: Choice) -> Sequence[int]:
    total = stream.index.samples
    if choice.seed is not None:
        return sorted(random.Random(choice.seed).sample(range(total), min(choice.count, total)))
    if choice.longest and total:
        # The tables at the heads of the shards give the bytes of each sample.
        sizes = map_threads(
            lambda shard: np.diff(read_sample_table(stream.folder, shard)), stream.shards
        )
        return [int(np.concatenate(sizes).argmax())]
    for number in choice.places:
        if number >= total:
            raise RecipeError(
                f"--sample {number}: {stream.folder} holds {plural(total, 'sample')}, the first is 0; name one that is there."
            )
    return choice.places
