"""The rows that devices train on in a step, made by the loader's own rules, and their tokens by
stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import MixRefused
from mdsmix.frozen import frozen
from mdsmix.load.collate import Collate
from mdsmix.load.internals import Ids
from mdsmix.load.layout import NO_SAMPLE, EpochLayout, SamplePlace
from mdsmix.load.loader import make_collate
from mdsmix.load.loader_settings import LoaderSettings
from mdsmix.load.training_rows import RowRules, TrainingRow, make_training_row
from mdsmix.load.vision import expand_images
from mdsmix.mix.epoch.draws import Machines
from mdsmix.preview.shard_reader import Images, ImageSize, ShardReader, has_ids
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import IGNORED_LABEL

COUNTED = ("samples", "tokens", "trained")
"""What is counted for each stream in a step. `tokens` counts both sides of an encoder-decoder;
`trained` counts positions that give a loss.
"""


class RankDraws(NamedTuple):
    """The samples that one device draws in a step: their ids, and where they are stored. To draw is
    to choose by Streaming's order of the epoch.
    """

    rank: int
    "The device's number among all devices, from 0."
    node: int
    "The number of the device's node, from 0."
    worker: int
    "The worker of the device's DataLoader, from 0."
    ids: Sequence[int]
    "Streaming's sample ids, the first that is drawn first."
    places: Sequence[SamplePlace]
    "The stream, shard and position of each of these samples."


class DeviceLoader(NamedTuple):
    """How one device makes its batch of a step."""

    draws: RankDraws
    "The samples that the device draws."
    collate: Collate
    "The collator of the worker that makes the batch."


class SampleRow(TrainingRow):
    """A row together with facts about its sample."""

    rank: int
    "The device that draws the sample."
    place: SamplePlace
    "Where the sample is stored."
    stored: TrainingRow
    "The row as stored, with one placeholder token for each image."
    images: Sequence[ImageSize]
    counts: Sequence[int]
    "One number for each name in COUNTED."


@frozen(kw_only=True)
class Step:
    """A step of the run: the samples that all devices draw, and the rows of these samples."""

    step: int
    "The number of the step in its epoch, from 0."
    ranks: Sequence[RankDraws]
    is_unread: bool
    """Whether the step's samples were not read because they exceed the limit on bytes. Text that
    the loader tokenizes is never read, and does not count here.
    """
    counts: NDArray[np.int64] | None
    "int64 [streams, 3], one column for each name in COUNTED; None if no rows were made."
    rows: int
    "Rows of the global batch, after packing."
    slots: int
    "Token positions in these rows, padding included."
    shown: Sequence[SampleRow]
    "The rows to show."

    @property
    def drawn(self) -> int:
        """The number of samples that all devices together draw."""
        return sum(len(rank.places) for rank in self.ranks)

    @property
    def padding(self) -> float | None:
        """The share of token positions that are padding, 0 to 1; None if no rows were made."""
        if self.counts is None:
            return None
        tokens = float(self.counts[:, COUNTED.index("tokens")].sum())
        return 1 - tokens / max(1, self.slots)


@frozen
class Loaders:
    """The loaders of all devices of a run, which make rows from samples."""

    settings: LoaderSettings
    rules: RowRules
    world: Machines
    reader: ShardReader
    images: Images | None

    def steps(
        self, layout: EpochLayout, ids: Ids, first: int, rows_shown: int, is_packed: bool
    ) -> Iterator[Step]:
        """Yield the given steps, with the rows of all devices.

        Args:
            layout: the epoch, which knows where each sample is stored.
            ids: int64 [steps, ranks, drawn], the sample ids of the steps.
            first: the number of the first step in its epoch.
            rows_shown: the most rows to keep of each step for showing.
            is_packed: whether rows are packed.
        """
        # (rank, worker) -> collator. Each worker of a device packs its own rows. Samples that do
        # not fit wait in the worker's packer for its next batch, so each worker has a collator.
        collators = defaultdict[tuple[int, int], Collate](lambda: self._make_collate(is_packed))
        for number, ids_of_step in enumerate(ids, first):
            # A device takes its batches from its workers in turn.
            worker = (number - first) % max(1, self.world.workers)
            loaders = []
            for rank, ids_of_rank in enumerate(ids_of_step):
                draws = make_rank_draws(layout, self.world, rank, worker, ids_of_rank)
                loaders.append(DeviceLoader(draws, collators[draws.rank, worker]))
            yield self._step(number, loaders, rows_shown)

    def _make_collate(self, is_packed: bool) -> Collate:
        """Make the collator of one worker."""
        collate = make_collate(self.settings, self.rules, self.world.rows if is_packed else None)
        collate.pad_to_longest |= self.settings.section.is_text  # as LLM-Foundry's text loader does
        return collate

    def _step(self, number: int, loaders: Sequence[DeviceLoader], rows_shown: int) -> Step:
        """Make one step, with the rows of all devices.

        Args:
            number: the number of the step in its epoch.
            loaders: the loader of each device.
            rows_shown: the most rows to keep for showing.
        """
        # Read the samples of all devices, apart from text that the loader tokenizes.
        streams = self.reader.streams
        drawn = list[SamplePlace]()
        for loader in loaders:
            drawn += loader.draws.places
        readable = [sample for sample in drawn if has_ids(streams[sample.stream])]
        samples = self.reader.samples(readable)

        # Make each device's rows. If text is among the samples of a packed step, it is unknown how
        # the step is packed, so no rows are made.
        is_packed = any(loader.collate.packer for loader in loaders)
        has_text = readable != drawn
        has_rows = bool(samples) and not (is_packed and has_text)
        bins = list[Sequence[SampleRow]]()
        slots = 0
        for draws, collate in loaders if has_rows else ():
            rows = self.rows(draws, samples or {}, f"Step {number}, rank {draws.rank}")
            packed = collate.packer.pack(rows) if collate.packer else [[row] for row in rows]
            slots += count_slots(packed, collate)
            bins += packed  # type: ignore[arg-type]

        # Count by stream.
        all_rows = list(chain.from_iterable(bins))
        counts = np.zeros((len(streams), len(COUNTED)), np.int64)
        for row in all_rows:
            counts[row.place.stream] += row.counts
        return Step(
            step=number,
            ranks=[loader.draws for loader in loaders],
            is_unread=samples is None,
            counts=counts if has_rows else None,
            rows=len(bins),
            slots=slots,
            shown=_with_each_stream_first(all_rows)[:rows_shown],
        )

    def rows(
        self, draws: RankDraws, samples: Mapping[SamplePlace, Sample], when: str
    ) -> list[SampleRow]:
        """Return the rows of a device's samples. Samples that were not read are left out.

        Raises MixRefused if the loader would raise on a sample.

        Args:
            draws: the samples that the device draws.
            samples: the samples that were read, of all devices.
            when: the beginning of the error's message, such as `Step 3, rank 0`.
        """
        rows = []
        for sample_place in draws.places:
            if sample_place not in samples:
                continue
            try:
                row = make_sample_row(samples[sample_place], self.rules, self.images)
            except MixRefused as refusal:
                why = str(refusal).removeprefix(": ")  # errors on images begin with `: `
                where = "stream {stream}, shard {shard}, row {row}"
                where = where.format(**self.reader.describe_place(sample_place))
                raise MixRefused(f"{when}: {where}: {why}") from None
            row.rank = draws.rank
            row.place = sample_place
            rows.append(row)
        return rows


def make_rank_draws(
    layout: EpochLayout, world: Machines, rank: int, worker: int, ids: Ids
) -> RankDraws:
    """Return the samples that a device draws in a step.

    Args:
        rank: the number of the group of devices that draw the same samples (`replication`).
        worker: the worker of the device that makes the batch.
        ids: int64 [drawn], sample ids, or NO_SAMPLE at the end of a batch that is not full.
    """
    sample_ids = ids[ids != NO_SAMPLE]
    # The first device of the group is shown for all.
    device = rank * world.replication
    places = layout.locate_samples(sample_ids)
    return RankDraws(device, device // world.gpus, worker, sample_ids.tolist(), places)


def make_sample_row(sample: Sample, rules: RowRules, images: Images | None) -> SampleRow:
    """Return a sample's row, with its counts. Raises MixRefused if the loader would raise on the
    sample.

    Args:
        images: how images become tokens; None if the mix has no images.
    """
    stored = make_training_row(sample, rules)
    trained = stored
    sizes: Sequence[ImageSize] = ()
    if images and stored.pictures:
        # Repeat an image's placeholder as often as the processor would make tokens of the image.
        sizes = images.sizes(stored.pictures)
        pieces = [{"input_ids": np.full(size.tokens, images.token)} for size in sizes]
        trained = expand_images(stored, pieces, rules)
    row = SampleRow(*trained)
    row.stored = stored
    row.images = sizes
    tokens = int(row.input_ids.size)
    labels = row.labels
    if rules.decoder_only_format:
        labels = labels[1:]  # no position predicts position 0
    else:
        tokens += int(row.labels.size)
    row.counts = (1, tokens, int((labels != IGNORED_LABEL).sum()))
    return row


def count_slots(bins: Sequence[Sequence[TrainingRow]], collate: Collate) -> int:
    """Return the number of token positions in a device's batch, padding included.

    Args:
        bins: for each row of the batch, the rows that are packed into it; without packing, a list
            of one row.
    """
    if collate.packer or not bins:
        return len(bins) * collate.rules.max_seq_len
    batch = collate([row for (row,) in bins])  # without packing each bin is one row
    sides = ("input_ids",) if collate.rules.decoder_only_format else ("input_ids", "labels")
    return sum(batch[side].numel() for side in sides)


def _with_each_stream_first(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """Put the first row of each stream before all other rows, so that every stream is shown. Both
    groups keep their order.
    """
    firsts = list[SampleRow]()
    further_rows = list[SampleRow]()
    seen_streams = set[int]()
    for row in rows:
        is_first = row.place.stream not in seen_streams
        seen_streams.add(row.place.stream)
        if is_first:
            firsts.append(row)
        else:
            further_rows.append(row)
    return firsts + further_rows
