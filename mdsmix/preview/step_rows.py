"""Samples of a step -> the rows that the devices train on, by the loader's own rules, and what these hold.

A batch is packed where the loader packs, by a packer for each worker of each device, as the collator lives in the workers:
what waits in its bins comes with that worker's next batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from mdsmix.errors import MixRefused
from mdsmix.load.collate import Collate
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import IGNORED, RowRules, TrainingRow, row_of
from mdsmix.preview.shard_reader import Images, Sample
from mdsmix.shards.token_ids import turns_of


class SampleRow(TrainingRow):
    """A row that knows its sample."""

    place: SampleAt
    cut: int
    "Tokens of the sample that the loader cuts off."
    is_text: bool
    "Pretraining text, of several documents perhaps; under the finetuning loader its first token is stored as a prompt."
    stored: TrainingRow
    "With one token an image."
    images: Sequence[tuple[int, int, int]]
    "Height, width and tokens of each."


@dataclass(frozen=True, kw_only=True)
class StreamInStep:
    """What a step trains of one stream."""

    samples: int = 0
    tokens: int = 0
    "Of both sides of an encoder-decoder."
    trained: int = 0
    "Positions that give a loss."
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


def sample_row(
    place: SampleAt, sample: Sample, collate: Collate, images: Images | None = None
) -> SampleRow:
    """The sample's row; MixRefused where the loader raises when it comes to it."""
    stored = row_of(sample, collate.rules)
    row = SampleRow(*(images.grown(stored, collate.rules) if images else stored))
    counts = images.counts(stored) if images else []
    row.place, row.stored = place, stored
    sizes = stored.pictures.sizes if stored.pictures else []
    row.images = [(h, w, n) for (h, w), n in zip(sizes, counts, strict=True)]
    turns = turns_of(sample, collate.rules.token_encoding_type)
    row.is_text = row.is_plain or [turn.prompt.size for turn in turns] == [1]
    sides = [row.input_ids.size] if collate.rules.decoder_only_format else [_size(row)]
    whole = sum(part.size for turn in turns for part in turn) + sum(counts) - len(counts)
    row.cut = max(0, whole - sum(sides))
    return row


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


def content_of(bins: Bins, slots: int, rules: RowRules) -> StepContent:
    """The rows of all devices' batches. `slots`: the places for tokens that these have together."""
    by_stream = defaultdict[int, list[SampleRow]](list)
    for row in chain.from_iterable(bins):
        by_stream[row.place.stream].append(row)
    return StepContent(
        parts={stream: _part(by_stream[stream], rules) for stream in sorted(by_stream)},
        rows=len(bins),
        slots=slots,
        documents=[sum(_documents(row, rules) for row in rows) for rows in bins],
    )


def _part(rows: Sequence[SampleRow], rules: RowRules) -> StreamInStep:
    shifted = rules.decoder_only_format
    return StreamInStep(
        samples=len(rows),
        tokens=sum(row.input_ids.size if shifted else _size(row) for row in rows),
        # Position 0 is predicted by none, and a document's first token behind another is not trained.
        trained=sum(int((row.labels[shifted:] != IGNORED).sum()) for row in rows),
        cut=sum(row.cut for row in rows),
        cut_samples=sum(row.cut > 0 for row in rows),
    )


def _documents(row: SampleRow, rules: RowRules) -> int:
    """Documents that a row holds a part of: a packed row says so, a row of text may be cut out of several, told apart by EOS, else
    by BOS."""
    if row.documents is not None:
        return int(row.documents.size)
    if not row.is_text:
        return 1
    ends = int((row.input_ids[:-1] == rules.ids.eos).sum()) if rules.ids.eos is not None else 0
    if ends or rules.ids.bos is None:
        return 1 + ends
    return 1 + int((row.input_ids[1:] == rules.ids.bos).sum())


def _size(row: TrainingRow) -> int:
    return int(row.input_ids.size + row.labels.size)


def rows_of(
    places: Sequence[SampleAt],
    samples: Mapping[SampleAt, Sample],
    collate: Collate,
    told: Callable[[SampleAt], str],
    images: Images | None = None,
) -> Iterator[SampleRow]:
    """The rows of those samples that were read; MixRefused names the step and the sample with which the run would end."""
    for place in places:
        if (sample := samples.get(place)) is None:
            continue
        try:
            yield sample_row(place, sample, collate, images)
        except MixRefused as refusal:
            why = str(refusal).removeprefix(
                ": "
            )  # of a row with images, which the loader names itself
            raise MixRefused(f"{told(place)}: {why}") from None


def first_of_each(rows: Sequence[SampleRow], most: int) -> list[SampleRow]:
    """Rows to show: the first of each stream, then others in their order."""
    firsts = {row.place.stream: i for i, row in reversed(list(enumerate(rows)))}.values()
    order = sorted(range(len(rows)), key=lambda i: (i not in firsts, i))
    return [rows[i] for i in order[:most]]
