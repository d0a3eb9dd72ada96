"""`preview`: the first steps of a run, and its epoch in windows, from a mix, its YAML and the devices that are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.load.collate import Collate, best_ratio, ratios
from mdsmix.load.layout import NOBODY, Ids, Layout, SampleAt, world_of
from mdsmix.load.loader import PROFILED, collate_of, rules_of
from mdsmix.load.loader_settings import LoaderSettings, read_settings
from mdsmix.load.training_rows import RowRules, TokenIds
from mdsmix.load.vision import refuse_packing
from mdsmix.mix.draws import World
from mdsmix.mix.streams import Mix
from mdsmix.preview.asked import Asked, EpochState
from mdsmix.preview.shard_reader import Images, ShardReader, images_of, require_shards
from mdsmix.preview.step_rows import (
    bins_of,
    content_of,
    first_of_each,
    rows_of,
    slots_of,
)
from mdsmix.preview.verdict import Epoch, Preview, Rank, Shown, Step
from mdsmix.preview.windows import sample_tokens, samples_by_step, windows_of
from mdsmix.shards.token_ids import layout_of
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
    settings, images = _settings(mix, asked), images_of(mix)
    rules = rules_of(settings, _ids_of(mix))
    if images:
        refuse_packing(settings)
        rules = replace(rules, image=images.token)
    reader = ShardReader(mix.train.streams, asked.read)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that are cut are counted
        ratio = _ratio(settings, rules, asked.world, reader)
        workers = _Workers(settings, rules, asked.world, ratio, images)
        return _preview(mix, asked, workers, reader)


def _preview(mix: Mix, asked: Asked, workers: _Workers, reader: ShardReader) -> Preview:
    world, streams = asked.world, mix.train.streams
    layout = _layout(workers.settings, reader, world, int(world.rows * workers.ratio))
    epochs = _epochs(layout, _enter(asked, layout), asked.steps)
    steps = list(_steps(epochs, layout, workers, reader, asked))
    lengths = [sample_tokens(stream, mix.train) for stream in streams]
    return Preview(
        asked=asked,
        layout=layout,
        streams=layout.names,
        shards=[[shard.stored.basename for shard in stream.shards] for stream in streams],
        ratio=workers.ratio,
        positions=world.ranks * world.rows * workers.rules.max_seq_len,
        epochs=epochs,
        steps=steps,
        lengths=lengths,
        windows=windows_of(samples_by_step(layout, epochs[0].ids), lengths, asked.windows),
        planned=[float(n) for n in layout.planned / layout.planned.sum()],
        read=reader.read,
    )


def _settings(mix: Mix, asked: Asked) -> LoaderSettings:
    settings = read_settings(mix.yaml.config)
    seed = {} if asked.seed is None else {"shuffle_seed": asked.seed}
    return replace(settings, streaming={**settings.streaming, **seed})


def _ids_of(mix: Mix) -> TokenIds:
    card = mix.tokenizer
    if card is None:
        why = mix.tokenizer_problem or "it names none"
        raise RecipeError(
            f"The tokenizer of {mix.yaml.origin} is needed for the rows' EOS and padding, and cannot be opened: {why.rstrip('.')}."
        )
    return TokenIds(eos=card.eos_id, pad=card.pad_id, bos=card.bos_id)


def _layout(settings: LoaderSettings, reader: ShardReader, world: World, drawn: int) -> Layout:
    return Layout(
        {stream.name: stream.weight for stream in reader.streams},
        [[shard.samples for shard in stream.shards] for stream in reader.streams],
        settings.streaming,
        world_of(world.nodes, world.gpus, world.workers, world.replication),
        drawn,
        settings.loader.drop_last,
    )


def _ratio(settings: LoaderSettings, rules: RowRules, world: World, reader: ShardReader) -> float:
    """The packing ratio; `auto` is worked out as the loader does it, from the first rows of every device."""
    given = settings.row_key("packing_ratio", 1)
    if given != "auto":
        return float(given)
    bins = world.rows
    tried = ratios(rules.max_seq_len, bins)
    if len(tried) == 1:
        return 1.0
    layout = _layout(settings, reader, replace(world, workers=0), PROFILED * max(tried))
    layout.drop_last = False
    layout.enter()
    collate, best = collate_of(settings, rules, None), list[float]()
    for ids in layout.steps(0)[0]:
        places = layout.places(ids[ids != NOBODY])
        samples = reader.samples(places)
        if len(samples) < len(set(places)):
            raise RecipeError(
                f"packing_ratio: auto is found from the first {PROFILED * max(tried):,} samples of every device, more than "
                f"{reader.read:,} bytes: raise --read, or write the number that the run logs (Using packing ratio) into the YAML."
            )
        rows = list(rows_of(places, samples, collate, _teller(reader, "The first rows")))
        best.append(best_ratio(rows, tried, bins, rules.max_seq_len))
    return min(best)


def _teller(reader: ShardReader, when: str) -> Callable[[SampleAt], str]:
    """Names a sample in a sentence on a step."""

    def told(place: SampleAt) -> str:
        stream = reader.streams[place.stream]
        shard = stream.shards[place.shard].raw_data.basename
        return f"{when}: stream {stream.name}, shard {shard}, row {place.position}"

    return told


def _enter(asked: Asked, layout: Layout) -> EpochState:
    """Where the epoch is entered, by a state or by the steps behind; the layout takes it over."""
    if state := asked.state:
        layout.enter(state.num_canonical_nodes, state.shuffle_seed, state.initial_physical_nodes)
        return state
    layout.enter()
    per_step, epoch, step = layout.world.num_ranks * layout.batch_size, asked.epoch, asked.from_step
    if step * per_step >= layout.epoch_size:
        while step >= (steps := len(layout.steps(epoch))) > 0:
            epoch, step = epoch + 1, step - steps
    return EpochState(epoch=epoch, sample_in_epoch=step * per_step)


def _epochs(layout: Layout, state: EpochState, steps: int) -> list[Epoch]:
    """The epoch that is entered, and the ones after it as far as the steps go."""
    epochs, left = list[Epoch](), max(1, steps)
    per_step = layout.world.num_ranks * layout.batch_size
    at, sample = state.epoch, state.sample_in_epoch
    while left > 0:
        ids = layout.steps(at, sample)
        if not len(ids) and not sample:
            raise RecipeError(
                f"train_loader: an epoch of {layout.epoch_size:,} samples fills no batch of {per_step:,} with drop_last: true, so "
                "training would never take a step; set drop_last: false, or a smaller batch."
            )
        if len(ids):
            epochs.append(Epoch(epoch=at, first=sample // per_step, ids=ids))
        left, at, sample = left - len(ids), at + 1, 0
    return epochs


@dataclass(frozen=True)
class _Workers:
    """The collators of all workers of all devices, made when their first batch comes: each packs for itself."""

    settings: LoaderSettings
    rules: RowRules
    world: World
    ratio: float
    images: Images | None
    collators: dict[tuple[int, int], Collate] = field(default_factory=dict)

    def at(self, rank: int, worker: int) -> Collate:
        bins = self.world.rows if self.ratio > 1 else None
        if (rank, worker) not in self.collators:
            self.collators[rank, worker] = collate_of(self.settings, self.rules, bins)
        return self.collators[rank, worker]

    def end_epoch(self) -> None:
        """Workers that do not live on lose what waits in their bins."""
        if self.world.workers and not self.settings.loader.persistent_workers:
            self.collators.clear()

    @property
    def waiting(self) -> int:
        packers = [collate.packer for collate in self.collators.values() if collate.packer]
        return sum(len(rows) for packer in packers for rows in packer.waiting)


def _steps(
    epochs: Sequence[Epoch], layout: Layout, workers: _Workers, reader: ShardReader, asked: Asked
) -> Iterator[Step]:
    left, many = asked.steps, max(1, asked.world.workers)
    for epoch in epochs:
        for at, ids in enumerate(epoch.ids[:left]):
            ranks = [
                rank_of(layout, asked.world, rank, at % many, own) for rank, own in enumerate(ids)
            ]
            yield _step(epoch, epoch.first + at, ranks, workers, reader, asked.samples)
        left -= len(epoch.ids)
        workers.end_epoch()


def rank_of(layout: Layout, world: World, rank: int, worker: int, own: Ids) -> Rank:
    ids, device = own[own != NOBODY], rank * world.replication
    return Rank(
        rank=device,
        node=device // world.gpus,
        worker=worker,
        ids=[int(n) for n in ids],
        places=layout.places(ids),
    )


def _step(
    epoch: Epoch, at: int, ranks: Sequence[Rank], workers: _Workers, reader: ShardReader, most: int
) -> Step:
    """`most`: rows to show."""
    samples = reader.samples(p for rank in ranks for p in rank.places if _has_ids(reader, p))
    bins, slots, is_whole, shown = list[Any](), 0, True, list[Shown]()
    for rank in ranks:
        collate = workers.at(rank.rank, rank.worker)
        told = _teller(reader, f"Step {at} of epoch {epoch.epoch}, rank {rank.rank}")
        rows = list(rows_of(rank.places, samples, collate, told, workers.images))
        if collate.packer and len(rows) < len(rank.places):
            is_whole = False
            continue
        own = bins_of(rows, collate)
        slots += slots_of(own, collate, workers.settings.section.is_text)
        bins += own
        if len(shown) < most:
            shown += [Shown(rank=rank.rank, row=row) for packed in own for row in packed]
    first = first_of_each([each.row for each in shown], most)
    return Step(
        epoch=epoch.epoch,
        step=at,
        ranks=ranks,
        drawn=sum(len(rank.places) for rank in ranks),
        looked=sum(p in samples for rank in ranks for p in rank.places),
        content=content_of(bins, slots, workers.rules) if is_whole else None,
        waiting=workers.waiting,
        shown=[each for row in first for each in shown if each.row is row],
    )


def _has_ids(reader: ShardReader, place: SampleAt) -> bool:
    """Whether its stream holds token ids; of others the loader tokenizes the text."""
    columns: Any = reader.streams[place.stream].columns
    return bool(layout_of(columns)) and "text" not in columns
