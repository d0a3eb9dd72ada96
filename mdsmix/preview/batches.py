"""Samples of a step -> the rows that the devices train on, by the loader's own rules, and what these hold.

A batch is packed where the loader packs, by a packer for each worker of each device, as the collator lives in the workers:
what waits in its bins comes with that worker's next batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mdsmix.errors import MixRefused
from mdsmix.load.collate import Collate
from mdsmix.load.pack import Packer
from mdsmix.load.training_rows import IGNORED, Row, row_of
from mdsmix.preview.images import Images
from mdsmix.preview.layout import Place
from mdsmix.preview.reading import Sample
from mdsmix.shards.turns import turns_of


class Placed(Row):
    """A row that knows its sample."""

    place: Place
    cut: int
    "Tokens of the sample that the loader cuts off."
    is_text: bool
    "Pretraining text, of several documents perhaps; under the finetuning loader its first token is stored as a prompt."
    stored: Row
    "With one token an image."
    images: Sequence[tuple[int, int, int]]
    "Height, width and tokens of each."


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a step trains of one stream."""

    samples: int = 0
    tokens: int = 0
    "Of both sides of an encoder-decoder."
    trained: int = 0
    "Positions that give a loss."
    cut: int = 0
    cut_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Made:
    """The rows of one or more devices' batches."""

    parts: Mapping[int, Part] = field(default_factory=dict)
    "Number of a stream -> what of it is in the rows."
    rows: int = 0
    slots: int = 0
    "Places for tokens, padding included."
    documents: Sequence[int] = ()
    "Of each row."

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())

    @property
    def padding(self) -> float:
        """The share of the slots that is padding."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


def placed(place: Place, sample: Sample, collate: Collate, images: Images | None = None) -> Placed:
    """The sample's row; MixRefused where the loader raises when it comes to it."""
    stored = row_of(sample, collate.rules)
    row = Placed(*(images.grown(stored, collate.rules) if images else stored))
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


@dataclass(slots=True, kw_only=True)
class Worker:
    """The collator of one worker of one device, with what it keeps from batch to batch."""

    collate: Collate
    packer: Packer | None
    is_text: bool
    "LLM-Foundry's text loader pads a batch to its longest row."
    has_seen_a_batch: bool = False

    def bins(self, rows: Sequence[Placed]) -> list[list[Placed]]:
        """The rows of a batch, each of one sample or of several that are packed."""
        if self.packer is None:
            return [[row] for row in rows]
        return [[row for row in rows if isinstance(row, Placed)] for rows in self.packer.pack(rows)]

    @property
    def waiting(self) -> int:
        """Samples that were drawn and wait to be packed."""
        return sum(len(each.rows) for each in self.packer.waiting) if self.packer else 0

    def made(self, bins: Sequence[Sequence[Placed]]) -> Made:
        parts = dict[int, Part]()
        for stream in sorted({row.place.stream for rows in bins for row in rows}):
            parts[stream] = _part(
                [r for rows in bins for r in rows if r.place.stream == stream], self
            )
        sides = 1 if self.collate.rules.decoder_only_format else 2
        width = sides * self._width(bins)
        return Made(
            parts=parts,
            rows=len(bins),
            slots=len(bins) * width,
            documents=[sum(map(self._documents, rows)) for rows in bins],
        )

    def _width(self, bins: Sequence[Sequence[Placed]]) -> int:
        """Tokens that a row of the batch is padded to, of each side."""
        most, is_first = self.collate.rules.max_seq_len, not self.has_seen_a_batch
        self.has_seen_a_batch = True
        longest = max((_longest(rows) for rows in bins), default=0)
        if self.packer:
            return most
        if self.is_text or self.collate.pad_to_longest:
            most = longest
        if self.collate.allow_pad_trimming and not is_first:
            most = min(most, -(-longest // 8) * 8)
        return most

    def _documents(self, row: Placed) -> int:
        """Documents that a row holds a part of: a packed row says so, a row of text may be cut out of several, told apart by EOS, else
        by BOS."""
        if row.documents is not None:
            return int(row.documents.size)
        if not row.is_text:
            return 1
        ids = self.collate.rules.ids
        ends = int((row.input_ids[:-1] == ids.eos).sum()) if ids.eos is not None else 0
        if ends or ids.bos is None:
            return 1 + ends
        return 1 + int((row.input_ids[1:] == ids.bos).sum())


def joined(made: Sequence[Made]) -> Made:
    """The batches of several devices as one."""
    streams = sorted({stream for each in made for stream in each.parts})
    return Made(
        parts={s: _sum([each.parts[s] for each in made if s in each.parts]) for s in streams},
        rows=sum(each.rows for each in made),
        slots=sum(each.slots for each in made),
        documents=[n for each in made for n in each.documents],
    )


def _part(rows: Sequence[Placed], worker: Worker) -> Part:
    shifted = worker.collate.rules.decoder_only_format
    return Part(
        samples=len(rows),
        tokens=sum(row.input_ids.size if shifted else _size(row) for row in rows),
        # Position 0 is predicted by none, and a document's first token behind another is not trained.
        trained=sum(int((row.labels[shifted:] != IGNORED).sum()) for row in rows),
        cut=sum(row.cut for row in rows),
        cut_samples=sum(row.cut > 0 for row in rows),
    )


def _sum(parts: Sequence[Part]) -> Part:
    total = sum((Counter(vars(part)) for part in parts), Counter[str]())
    return Part(**total)


def _size(row: Row) -> int:
    return int(row.input_ids.size + row.labels.size)


def _longest(rows: Sequence[Row]) -> int:
    """Tokens of the longer side of a row of one sample."""
    return max(max(row.input_ids.size, row.labels.size) for row in rows)


def rows_of(
    places: Sequence[Place],
    samples: Mapping[Place, Sample],
    collate: Collate,
    told: Callable[[Place], str],
    images: Images | None = None,
) -> Iterator[Placed]:
    """The rows of those samples that were read; MixRefused names the step and the sample with which the run would end."""
    for place in places:
        if (sample := samples.get(place)) is None:
            continue
        try:
            yield placed(place, sample, collate, images)
        except MixRefused as refusal:
            why = str(refusal).removeprefix(
                ": "
            )  # of a row with images, which the loader names itself
            raise MixRefused(f"{told(place)}: {why}") from None


def first_of_each(rows: Sequence[Placed], most: int) -> list[Placed]:
    """Rows to show: the first of each stream, then others in their order."""
    firsts = {row.place.stream: i for i, row in reversed(list(enumerate(rows)))}.values()
    order = sorted(range(len(rows)), key=lambda i: (i not in firsts, i))
    return [rows[i] for i in order[:most]]
