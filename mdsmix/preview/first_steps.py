"""`preview`: the first steps of a run, and its epoch in windows, from a mix, its YAML and the devices that are asked for."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from streaming.base.world import World as Devices

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load.collate import Collate, best_ratio, ratios
from mdsmix.load.layout import NOBODY, Ids, Layout, SampleAt
from mdsmix.load.loader import PROFILED, collate_of, rules_of
from mdsmix.load.loader_settings import LoaderSettings, read_settings
from mdsmix.load.training_rows import RowRules, TokenIds
from mdsmix.load.vision import refuse_packing
from mdsmix.mix.draws import World
from mdsmix.mix.streams import Mix, StreamInMix
from mdsmix.preview.asked import Asked
from mdsmix.preview.shard_reader import Images, Sample, ShardReader, images_of, require_shards
from mdsmix.preview.step_rows import (
    Rank,
    SampleRow,
    Shown,
    Step,
    bins_of,
    content_of,
    sample_row,
    slots_of,
)
from mdsmix.preview.verdict import (
    Epoch,
    Preview,
    has_ids,
    sample_tokens,
    samples_by_step,
    windows_of,
)
from mdsmix.training.loader_keys import OTHERS


def preview(mix: Mix, asked: Asked) -> Preview:
    """RecipeError where Streaming refuses the epoch, Unreachable where a stream cannot be read, MixRefused where a row does not
    fit the loader."""
    if other := OTHERS.get(mix.train.name):
        raise RecipeError(
            f"a preview shows rows of LLM-Foundry's loaders and of mdsmix's, and name: {other.name} is the loader of {other.whose}: "
            "`mdsmix inspect` shows its samples, and mdsmix.load gives its batches."
        )
    require_shards(mix.train.streams)
    settings, images = read_settings(mix.yaml.config), images_of(mix)
    if asked.seed is not None:
        settings = replace(settings, streaming={**settings.streaming, "shuffle_seed": asked.seed})
    rules = rules_of(settings, _ids_of(mix))
    if images:
        refuse_packing(settings)
        rules = replace(rules, image=images.token)
    run = _Run(settings, rules, asked.world, ShardReader(mix.train.streams, asked.read), images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that are cut are counted
        return _preview(mix, asked, run)


def _preview(mix: Mix, asked: Asked, run: _Run) -> Preview:
    streams, ratio, rows = mix.train.streams, run.ratio(), asked.world.rows
    layout = _layout(run.settings, streams, asked.world, int(rows * ratio))
    epochs = _epochs(layout, asked)
    run.collators.default_factory = lambda: run.collate(rows if ratio > 1 else None)
    steps = list(run.steps(epochs, layout, asked))
    lengths = [sample_tokens(stream, mix.train) for stream in streams]
    return Preview(
        asked=asked,
        layout=layout,
        streams=streams,
        ratio=ratio,
        max_seq_len=run.rules.max_seq_len,
        epochs=epochs,
        steps=steps,
        lengths=lengths,
        windows=windows_of(samples_by_step(layout, epochs[0].ids), lengths, asked.windows),
        read=run.reader.read,
    )


def _ids_of(mix: Mix) -> TokenIds:
    card = mix.tokenizer
    if card is None:
        why = mix.tokenizer_problem or "it names none"
        raise RecipeError(
            f"The tokenizer of {mix.yaml.origin} is needed for the rows' EOS and padding, and cannot be opened: {why.rstrip('.')}."
        )
    return TokenIds(eos=card.eos_id, pad=card.pad_id, bos=card.bos_id)


def _layout(
    settings: LoaderSettings, streams: Sequence[StreamInMix], world: World, drawn: int
) -> Layout:
    return Layout(
        {stream.name: stream.weight for stream in streams},
        [[shard.samples for shard in stream.shards] for stream in streams],
        settings.streaming,
        Devices(world.nodes, world.gpus, max(1, world.workers), 0).replicate(world.replication),
        drawn,
        settings.loader.drop_last,
    )


def _epochs(layout: Layout, asked: Asked) -> list[Epoch]:
    """The epoch that is entered, by a state or by the steps behind, and the ones after it as far as the steps go."""
    state, per_step = asked.state, layout.world.num_ranks * layout.batch_size
    layout.enter(state.num_canonical_nodes, state.shuffle_seed, state.initial_physical_nodes)
    at, sample = state.epoch, state.sample_in_epoch or asked.from_step * per_step
    if sample > layout.epoch_size:
        raise RecipeError(
            f"an epoch of {layout.epoch_size:,} samples has no step behind {sample:,} of them: name a later epoch by --epoch, and a step of "
            f"its own, from 0 to {layout.epoch_size // per_step:,}."
        )
    epochs, left = list[Epoch](), max(1, asked.steps)
    while left > 0:
        ids = layout.steps(at, sample)
        if len(ids):
            epochs.append(Epoch(at, sample // per_step, ids))
        elif not sample:
            raise RecipeError(
                f"train_loader: an epoch of {layout.epoch_size:,} samples fills no batch of {per_step:,} with drop_last: true, so "
                "training would never take a step; set drop_last: false, or a smaller batch."
            )
        left, at, sample = left - len(ids), at + 1, 0
    return epochs


@dataclass(frozen=True)
class _Run:
    """How the loaders of a run make rows of samples."""

    settings: LoaderSettings
    rules: RowRules
    world: World
    reader: ShardReader
    images: Images | None
    collators: defaultdict[tuple[int, int], Collate] = field(default_factory=defaultdict)
    "By device and worker: each packs for itself, and what waits in its bins comes with its next batch."

    def collate(self, bins: int | None) -> Collate:
        collate = collate_of(self.settings, self.rules, bins)
        collate.pad_to_longest |= self.settings.section.is_text  # as LLM-Foundry's text loader does
        return collate

    def rows(
        self, places: Sequence[SampleAt], samples: Mapping[SampleAt, Sample], when: str
    ) -> Iterator[SampleRow]:
        """The rows of those samples that were read; MixRefused names the step and the sample with which the run would end."""
        for place in filter(samples.__contains__, places):
            try:
                yield sample_row(place, samples[place], self.rules, self.images)
            except MixRefused as refusal:
                why = str(refusal).removeprefix(": ")  # of a row with images, which the loader names itself  # fmt: skip
                raise MixRefused(f"{when}: {self.reader.name_of(place)}: {why}") from None

    def ratio(self) -> float:
        """The packing ratio; `auto` is worked out as the loader does it, from the first rows of every device."""
        given = self.settings.row_key("packing_ratio", 1)
        if given != "auto":
            return float(given)
        length, bins = self.rules.max_seq_len, self.world.rows
        tried, best = ratios(length, bins), list[float]()
        many = PROFILED * max(tried)
        layout = _layout(self.settings, self.reader.streams, replace(self.world, workers=0), many)
        layout.drop_last = False
        layout.enter()
        for ids in layout.steps(0)[0] if len(tried) > 1 else ():
            places = layout.places(ids[ids != NOBODY])
            rows = list(self.rows(places, self.reader.samples(places), "The first rows"))
            if len(rows) < len(places):
                raise RecipeError(
                    f"packing_ratio: auto is found from the first {many:,} samples of every device, more than {self.reader.read:,} bytes: raise "
                    "--read, or write the number that the run logs (Using packing ratio) into the YAML."
                )
            best.append(best_ratio(rows, tried, bins, length))
        return min(best, default=1.0)

    def steps(self, epochs: Sequence[Epoch], layout: Layout, asked: Asked) -> Iterator[Step]:
        left, workers = asked.steps, self.world.workers
        for epoch in epochs:
            for at, ids in enumerate(epoch.ids[:left]):
                worker = at % max(1, workers)
                ranks = [rank_of(layout, self.world, n, worker, own) for n, own in enumerate(ids)]
                yield self._step(epoch.epoch, epoch.first + at, ranks, asked.samples)
            left -= len(epoch.ids)
            if workers and not self.settings.loader.persistent_workers:
                self.collators.clear()  # workers that do not live on lose what waits in their bins

    def _step(self, epoch: int, at: int, ranks: Sequence[Rank], most: int) -> Step:
        """`most`: rows to show."""
        streams = self.reader.streams
        wanted = [p for rank in ranks for p in rank.places if has_ids(streams[p.stream])]
        samples = self.reader.samples(wanted)
        looked = sum(map(samples.__contains__, wanted))
        bins, slots, is_whole, shown = list[Sequence[SampleRow]](), 0, True, list[Shown]()
        for rank in ranks:
            collate = self.collators[rank.rank, rank.worker]
            when = f"Step {at} of epoch {epoch}, rank {rank.rank}"
            rows = list(self.rows(rank.places, samples, when))
            if collate.packer and len(rows) < len(rank.places):
                is_whole = False
                continue
            own = bins_of(rows, collate)
            slots += slots_of(own, collate)
            bins += own
            shown += [Shown(rank.rank, row) for row in chain(*own)]
        packers = [collate.packer for collate in self.collators.values() if collate.packer]
        return Step(
            epoch=epoch,
            step=at,
            ranks=ranks,
            looked=looked,
            unread=len(wanted) - looked,
            content=content_of(bins, slots) if is_whole else None,
            waiting=sum(len(rows) for packer in packers for rows in packer.waiting),
            shown=_various(shown)[:most],
        )


def _various(shown: Sequence[Shown]) -> list[Shown]:
    """The first row of each stream before all others."""
    firsts = {each.row.place.stream: each for each in reversed(shown)}
    return sorted(shown, key=lambda each: each is not firsts[each.row.place.stream])


def rank_of(layout: Layout, world: World, rank: int, worker: int, own: Ids) -> Rank:
    ids, device = own[own != NOBODY], rank * world.replication
    return Rank(device, device // world.gpus, worker, ids.tolist(), layout.places(ids))
