"""Samples of a step -> the rows that devices train on, by the loader's own rules, with their tokens
counted by stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import MixRefused
from mdsmix.load.collate import Collate
from mdsmix.load.internals import Ids
from mdsmix.load.layout import NO_SAMPLE, EpochLayout, SamplePlace
from mdsmix.load.loader import make_collate
from mdsmix.load.loader_settings import LoaderSettings
from mdsmix.load.training_rows import RowRules, TrainingRow, make_row
from mdsmix.load.vision import expand_images
from mdsmix.mix.epoch.draws import World
from mdsmix.preview.shard_reader import Images, ImageSize, ShardReader, has_ids
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import IGNORED_LABEL

COUNTED = ("samples", "tokens", "trained")
"""The counts of each stream in a step. `tokens`: of both sides of an encoder-decoder; `trained`:
positions that give a loss.
"""


class Rank(NamedTuple):
    """The samples that one device draws in a step."""

    rank: int
    node: int
    worker: int
    "The worker of the device's DataLoader, from 0."
    ids: Sequence[int]
    "Streaming's sample ids, in the order in which they are drawn."
    places: Sequence[SamplePlace]


class SampleRow(TrainingRow):
    """A row that knows its sample."""

    rank: int
    place: SamplePlace
    stored: TrainingRow
    "The row as stored, with one token for each image."
    images: Sequence[ImageSize]
    counts: Sequence[int]
    "One number for each word of COUNTED."


@dataclass(frozen=True, kw_only=True)
class Step:
    """A global batch."""

    step: int
    "The number of the step in its epoch, from 0."
    ranks: Sequence[Rank]
    is_unread: bool
    """The bound on bytes left its samples unread. Text that the loader itself tokenizes is never
    read.
    """
    counts: NDArray[np.int64] | None
    "int64 [streams, COUNTED]; None where no rows were made."
    rows: int
    slots: int
    "Places for tokens in these rows, padding included."
    shown: Sequence[SampleRow]

    @property
    def drawn(self) -> int:
        """Samples that all devices together draw."""
        return sum(len(rank.places) for rank in self.ranks)

    @property
    def padding(self) -> float | None:
        """The share of places for tokens that hold padding, 0 to 1; None where no rows
        were made.
        """
        if self.counts is None:
            return None
        return 1 - float(self.counts[:, COUNTED.index("tokens")].sum()) / max(1, self.slots)


@dataclass(frozen=True)
class Loaders:
    """The loaders of a run, which turn samples into rows."""

    settings: LoaderSettings
    rules: RowRules
    world: World
    reader: ShardReader
    images: Images | None

    def steps(
        self, layout: EpochLayout, ids: Ids, first: int, most: int, is_packed: bool
    ) -> Iterator[Step]:
        """The global batches of `ids`, int64 [steps, ranks, drawn]. `first`: the first step's
        number; `most`: rows to show of each step.
        """
        # Each worker of a device packs for itself; samples that wait in its bins come with its next
        # batch.
        collators = defaultdict[tuple[int, int], Collate](lambda: self._collate(is_packed))
        for at, step in enumerate(ids, first):
            worker = (at - first) % max(1, self.world.workers)
            ranks = [rank_of(layout, self.world, n, worker, own) for n, own in enumerate(step)]
            yield self._step(at, [(rank, collators[rank.rank, worker]) for rank in ranks], most)

    def _collate(self, is_packed: bool) -> Collate:
        collate = make_collate(self.settings, self.rules, self.world.rows if is_packed else None)
        collate.pad_to_longest |= self.settings.section.is_text  # as LLM-Foundry's text loader does
        return collate

    def _step(self, at: int, loaders: Sequence[tuple[Rank, Collate]], most: int) -> Step:
        streams, ranks = self.reader.streams, [rank for rank, _ in loaders]
        drawn = [place for rank in ranks for place in rank.places]
        wanted = [place for place in drawn if has_ids(streams[place.stream])]
        samples = self.reader.samples(wanted)
        # Packing is not known where a sample of the step is text.
        is_made = bool(samples) and (wanted == drawn or not loaders[0][1].packer)
        bins, slots = list[Sequence[SampleRow]](), 0
        for rank, collate in loaders if is_made else ():
            rows = self.rows(rank, samples or {}, f"Step {at}, rank {rank.rank}")
            own = collate.packer.pack(rows) if collate.packer else [[row] for row in rows]
            slots += slots_of(own, collate)
            bins += own  # type: ignore[arg-type]
        counts = np.zeros((len(streams), len(COUNTED)), np.int64)
        for row in chain.from_iterable(bins):
            counts[row.place.stream] += row.counts
        return Step(
            step=at,
            ranks=ranks,
            is_unread=samples is None,
            counts=counts if is_made else None,
            rows=len(bins),
            slots=slots,
            shown=_various([*chain(*bins)])[:most],
        )

    def rows(self, rank: Rank, samples: Mapping[SamplePlace, Sample], when: str) -> list[SampleRow]:
        """The rows of the samples that hold token ids. MixRefused, with the step and the sample,
        where the run would end there.
        """
        rows = []
        for place in rank.places:
            if place in samples:
                try:
                    row = sample_row(samples[place], self.rules, self.images)
                except MixRefused as refusal:
                    why = str(refusal).removeprefix(": ")  # errors on images begin with `: `
                    where = "stream {stream}, shard {shard}, row {row}"
                    where = where.format(**self.reader.named(place))
                    raise MixRefused(f"{when}: {where}: {why}") from None
                row.rank, row.place = rank.rank, place
                rows.append(row)
        return rows


def rank_of(layout: EpochLayout, world: World, rank: int, worker: int, own: Ids) -> Rank:
    """The samples that a device draws. `own`: its sample ids."""
    ids, device = own[own != NO_SAMPLE], rank * world.replication
    return Rank(device, device // world.gpus, worker, ids.tolist(), layout.places(ids))


def sample_row(sample: Sample, rules: RowRules, images: Images | None) -> SampleRow:
    """The sample's row; MixRefused where the loader would raise on the sample."""
    stored = grown = make_row(sample, rules)
    seen: Sequence[ImageSize] = ()
    if images and stored.pictures:
        seen = images.sizes(stored.pictures)
        pieces = [{"input_ids": np.full(size.tokens, images.token)} for size in seen]
        grown = expand_images(stored, pieces, rules)
    row, shifted = SampleRow(*grown), rules.decoder_only_format
    row.stored, row.images = stored, seen
    tokens = int(row.input_ids.size + (0 if shifted else row.labels.size))
    # No position predicts position 0, and the first token of a later document in a row is not
    # trained.
    row.counts = 1, tokens, int((row.labels[shifted:] != IGNORED_LABEL).sum())
    return row


def slots_of(bins: Sequence[Sequence[TrainingRow]], collate: Collate) -> int:
    """Places for tokens in a device's batch, padding included. `bins`: its rows, each of one sample
    or of several packed samples.
    """
    if collate.packer or not bins:
        return len(bins) * collate.rules.max_seq_len
    batch = collate([row for (row,) in bins])
    sides = ("input_ids",) if collate.rules.decoder_only_format else ("input_ids", "labels")
    return sum(batch[side].numel() for side in sides)


def _various(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """The first row of each stream before all others."""
    firsts = {row.place.stream: row for row in reversed(rows)}
    return sorted(rows, key=lambda row: row is not firsts[row.place.stream])
