"""Samples of a step -> the rows that the devices train on, by the loader's own rules, and what these hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from mdsmix.load.collate import Collate
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import IGNORED, RowRules, TrainingRow, row_of
from mdsmix.load.vision import expanded
from mdsmix.preview.shard_reader import Images, ImageSize, Sample
from mdsmix.shards.token_ids import turns_of


class StreamInStep(NamedTuple):
    """What a step trains of one stream."""

    samples: int = 0
    tokens: int = 0
    "Of both sides of an encoder-decoder."
    trained: int = 0
    "Positions that give a loss."
    cut: int = 0
    "Tokens of the samples that the loader cuts off."
    cut_samples: int = 0


class SampleRow(TrainingRow):
    """A row that knows its sample."""

    place: SampleAt
    stored: TrainingRow
    "With one token an image."
    images: Sequence[ImageSize]
    held: StreamInStep
    number_of_documents: int


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
        return 1 - self.tokens / max(1, self.slots)


class Rank(NamedTuple):
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
    looked: int
    "Samples that were read."
    unread: int
    "Those that the bound left out; text that the loader tokenizes itself is not wanted."
    content: StepContent | None
    "None where a batch cannot be packed, since a sample of it was not read."
    waiting: int
    "Samples that were drawn and wait to be packed."
    shown: Sequence[Shown]

    @property
    def drawn(self) -> int:
        """Samples that all devices draw."""
        return sum(len(rank.places) for rank in self.ranks)


def sample_row(place: SampleAt, sample: Sample, rules: RowRules, images: Images | None) -> SampleRow:  # fmt: skip
    """The sample's row; MixRefused where the loader raises when it comes to it."""
    stored = grown = row_of(sample, rules)
    seen: Sequence[ImageSize] = ()
    if images and stored.pictures:
        seen = images.sizes(stored.pictures)
        pieces = [{"input_ids": np.full(size.tokens, images.token)} for size in seen]
        grown = expanded(stored, pieces, rules)
    row, shifted = SampleRow(*grown), rules.decoder_only_format
    row.place, row.stored, row.images = place, stored, seen
    turns = turns_of(sample, rules.token_encoding_type)
    whole = sum(part.size for turn in turns for part in turn) + sum(n.tokens - 1 for n in seen)
    tokens = int(row.input_ids.size + (0 if shifted else row.labels.size))
    # Position 0 is predicted by none, and a document's first token behind another is not trained.
    trained = int((row.labels[shifted:] != IGNORED).sum())
    row.held = StreamInStep(1, tokens, trained, max(0, whole - tokens), whole > tokens)
    # A pretraining row has no prompt, or, under the finetuning loader, its first token as one.
    is_text = [turn.prompt.size for turn in turns] in ([0], [1])
    row.number_of_documents = _documents(row, rules) if is_text or row.documents is not None else 1
    return row


def _documents(row: TrainingRow, rules: RowRules) -> int:
    """Documents that a row holds a part of: a packed row says so, others tell them apart by EOS, else by BOS."""
    if row.documents is not None:
        return int(row.documents[-1]) + 1
    sides = (row.input_ids[:-1] == rules.ids.eos, row.input_ids[1:] == rules.ids.bos)
    return 1 + next((int(np.sum(side)) for side in sides if np.any(side)), 0)


Bins = Sequence[Sequence[SampleRow]]
"Rows of a device's batch, each of one sample or of several that are packed."


def bins_of(rows: Sequence[SampleRow], collate: Collate) -> Bins:
    packed: Any = collate.packer.pack(rows) if collate.packer else [[row] for row in rows]
    return packed  # type: ignore[no-any-return]


def slots_of(bins: Bins, collate: Collate) -> int:
    """Places for tokens that the batch has, padding included."""
    if collate.packer or not bins:
        return len(bins) * collate.rules.max_seq_len
    batch = collate([row for (row,) in bins])
    sides = ("input_ids",) if collate.rules.decoder_only_format else ("input_ids", "labels")
    return sum(batch[side].numel() for side in sides)


def content_of(bins: Bins, slots: int) -> StepContent:
    """The rows of all devices' batches. `slots`: the places for tokens that these have together."""
    held = defaultdict[int, list[StreamInStep]](list)
    for row in chain.from_iterable(bins):
        held[row.place.stream].append(row.held)
    return StepContent(
        parts={n: StreamInStep(*map(sum, zip(*rows, strict=True))) for n, rows in held.items()},
        rows=len(bins),
        slots=slots,
        documents=[sum(row.number_of_documents for row in rows) for rows in bins],
    )
