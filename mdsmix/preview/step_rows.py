"""Samples of a step -> the rows that the devices train on, by the loader's own rules, and what these hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from mdsmix.load.collate import Collate
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import IGNORED, RowRules, TrainingRow, row_of
from mdsmix.load.vision import expanded
from mdsmix.preview.shard_reader import Images, Sample
from mdsmix.shards.token_ids import turns_of


class SampleRow(TrainingRow):
    """A row that knows its sample."""

    place: SampleAt
    stored: TrainingRow
    "With one token an image."
    images: Sequence[tuple[int, int, int]]
    "Height, width and tokens of each."
    counts: tuple[int, int, int]
    "Tokens, of both sides of an encoder-decoder; positions that give a loss; tokens of the sample that the loader cuts off."
    number_of_documents: int


class StreamInStep(NamedTuple):
    """What a step trains of one stream."""

    samples: int = 0
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    cut_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class StepContent:
    """The rows of all devices' batches."""

    parts: Mapping[int, StreamInStep]
    "Number of a stream -> what of it is in the rows."
    rows: int
    slots: int
    "Places for tokens, padding included."
    documents: Sequence[int]
    "Of each row."

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())

    @property
    def padding(self) -> float:
        """The share of the slots that is padding."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one device draws in a step."""

    rank: int
    node: int
    worker: int
    "Of its DataLoader."
    ids: Sequence[int]
    "Streaming's sample ids, in the order in which they are drawn."
    places: Sequence[SampleAt]


class Shown(NamedTuple):
    """A row of a step, decoded for a person."""

    rank: int
    row: SampleRow


@dataclass(frozen=True, kw_only=True)
class Step:
    """A global batch."""

    epoch: int
    step: int
    "Of the epoch, the first is 0."
    ranks: Sequence[Rank]
    drawn: int
    "Samples that all devices draw."
    looked: int
    "Of which so many were read."
    unread: int
    "Those that the bound left out; text that the loader tokenizes itself is not wanted."
    content: StepContent | None
    "None where a batch cannot be packed, since a sample of it was not read."
    waiting: int
    "Samples that were drawn and wait to be packed."
    shown: Sequence[Shown]


def sample_row(place: SampleAt, sample: Sample, rules: RowRules, images: Images | None) -> SampleRow:  # fmt: skip
    """The sample's row; MixRefused where the loader raises when it comes to it."""
    stored = grown = row_of(sample, rules)
    counts = images.counts(stored) if images else []
    if images and (pictures := stored.pictures):
        pieces = [{"input_ids": np.full(n, images.token)} for n in counts]
        grown = expanded(stored, pictures, pieces, rules)
    row = SampleRow(*grown)
    row.place, row.stored = place, stored
    sizes = stored.pictures.sizes if stored.pictures else []
    row.images = [(h, w, n) for (h, w), n in zip(sizes, counts, strict=True)]
    turns, shifted = turns_of(sample, rules.token_encoding_type), rules.decoder_only_format
    whole = sum(part.size for turn in turns for part in turn) + sum(counts) - len(counts)
    tokens = int(row.input_ids.size + (0 if shifted else row.labels.size))
    # Position 0 is predicted by none, and a document's first token behind another is not trained.
    trained = int((row.labels[shifted:] != IGNORED).sum())
    row.counts = tokens, trained, max(0, whole - tokens)
    # Under the finetuning loader the first token of a pretraining row is stored as a prompt.
    is_text = row.is_plain or [turn.prompt.size for turn in turns] == [1]
    row.number_of_documents = _documents(row, rules) if is_text or row.documents is not None else 1
    return row


def _documents(row: TrainingRow, rules: RowRules) -> int:
    """Documents that a row holds a part of: a packed row says so, others tell them apart by EOS, else by BOS."""
    if row.documents is not None:
        return int(row.documents.size)
    inner, eos, bos = row.input_ids, rules.ids.eos, rules.ids.bos
    ends = 0 if eos is None else int((inner[:-1] == eos).sum())
    return 1 + (ends or (0 if bos is None else int((inner[1:] == bos).sum())))


Bins = Sequence[Sequence[SampleRow]]
"Rows of a device's batch, each of one sample or of several that are packed."


def bins_of(rows: Sequence[SampleRow], collate: Collate) -> Bins:
    if collate.packer is None:
        return [[row] for row in rows]
    return [
        [row for row in rows if isinstance(row, SampleRow)] for rows in collate.packer.pack(rows)
    ]


def slots_of(bins: Bins, collate: Collate, is_text: bool) -> int:
    """Places for tokens that the batch has, padding included. `is_text`: LLM-Foundry's text loader pads to the longest row."""
    width, is_first = collate.rules.max_seq_len, not collate.has_seen_a_batch
    collate.has_seen_a_batch = True
    longest = max((max(r.input_ids.size, r.labels.size) for rows in bins for r in rows), default=0)
    if not collate.packer:
        if is_text or collate.pad_to_longest:
            width = longest
        if collate.allow_pad_trimming and not is_first:
            width = min(width, -(-longest // 8) * 8)
    return len(bins) * width * (1 if collate.rules.decoder_only_format else 2)


def content_of(bins: Bins, slots: int) -> StepContent:
    """The rows of all devices' batches. `slots`: the places for tokens that these have together."""
    parts, stream_of = dict[int, StreamInStep](), attrgetter("place.stream")
    for stream, rows in groupby(sorted(chain.from_iterable(bins), key=stream_of), stream_of):
        counts = [(1, *row.counts, row.counts[-1] > 0) for row in rows]
        parts[stream] = StreamInStep(*map(sum, zip(*counts, strict=True)))
    documents = [sum(row.number_of_documents for row in rows) for rows in bins]
    return StepContent(parts=parts, rows=len(bins), slots=slots, documents=documents)
