"""`preview`: the first steps of a run, and its epoch in windows, from a mix, its YAML and the devices that are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.load.collate import Collate
from mdsmix.load.config import LoaderSettings, read_settings
from mdsmix.load.loader import PROFILED, collate_of, rules_of
from mdsmix.load.pack import best_ratio, ratios
from mdsmix.load.processor import refuse_packing
from mdsmix.load.training_rows import RowRules, TokenIds
from mdsmix.mix.streams import Mix
from mdsmix.preview.asked import Asked, State
from mdsmix.preview.batches import Made, Worker, first_of_each, joined, rows_of
from mdsmix.preview.figures import Epoch, Preview, Rank, Shown, Step
from mdsmix.preview.images import Images, images_of
from mdsmix.preview.layout import NOBODY, Ids, Layout, Place
from mdsmix.preview.lengths import lengths_of
from mdsmix.preview.reading import Reader, require_shards
from mdsmix.preview.shares import count, windows_of
from mdsmix.shards.turns import layout_of


def preview(mix: Mix, asked: Asked) -> Preview:
    """RecipeError where Streaming refuses the epoch, Unreachable where a stream cannot be read, MixRefused where a row does not
    fit the loader."""
    require_shards(mix.train.streams)
    settings, images = _settings(mix, asked), images_of(mix)
    rules = rules_of(settings, _ids_of(mix))
    if images:
        refuse_packing(settings)
        rules = replace(rules, image=images.token)
    reader = Reader(mix.train.streams, asked.read)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that are cut are counted
        return _preview(mix, asked, settings, rules, reader, images)


def _preview(
    mix: Mix,
    asked: Asked,
    settings: LoaderSettings,
    rules: RowRules,
    reader: Reader,
    images: Images | None,
) -> Preview:
    ratio = _ratio(settings, rules, mix, asked, reader)
    layout = _layout(settings, mix, asked, int(asked.cluster.rows * ratio))
    state = _state(asked, layout)
    layout.enter(state)
    epochs = _epochs(layout, state, asked.steps)
    steps = list(
        _steps(epochs, layout, _Workers(settings, rules, asked, ratio, images), reader, asked)
    )
    lengths = [lengths_of(n, s, mix.train, reader) for n, s in enumerate(mix.train.streams)]
    counts = count(layout, epochs[0].ids, lengths)
    return Preview(
        asked=asked,
        layout=layout,
        streams=layout.names,
        shards=[[shard.stored.basename for shard in s.shards] for s in mix.train.streams],
        state=state,
        ratio=ratio,
        positions=asked.cluster.ranks * asked.cluster.rows * rules.max_seq_len,
        epochs=epochs,
        steps=steps,
        lengths=lengths,
        windows=windows_of(counts, asked.windows, _unit(layout)),
        tokens=None if counts.tokens is None else counts.tokens.sum(axis=0),
        planned=[float(n) for n in layout.planned / layout.planned.sum()],
        read=reader.read,
    )


def _settings(mix: Mix, asked: Asked) -> LoaderSettings:
    settings = read_settings(mix.yaml.config)
    if asked.seed is None:
        return settings
    return replace(settings, streaming={**settings.streaming, "shuffle_seed": asked.seed})


def _ids_of(mix: Mix) -> TokenIds:
    card = mix.tokenizer
    if card is None:
        why = mix.tokenizer_problem or "it names none"
        raise RecipeError(
            f"The tokenizer of {mix.yaml.origin} is needed for the rows' EOS and padding, and cannot be opened: {why.rstrip('.')}."
        )
    return TokenIds(eos=card.eos_id, pad=card.pad_id, bos=card.bos_id)


def _layout(settings: LoaderSettings, mix: Mix, asked: Asked, drawn: int) -> Layout:
    last = settings.loader.drop_last
    return Layout(mix.train.streams, settings.streaming, asked.cluster, drawn, last)


def _ratio(
    settings: LoaderSettings, rules: RowRules, mix: Mix, asked: Asked, reader: Reader
) -> float:
    """The packing ratio; `auto` is found as the loader finds it, from the first rows of every device."""
    given = settings.row_key("packing_ratio", 1)
    if given != "auto":
        return float(given)
    bins = asked.cluster.rows
    tried = ratios(rules.max_seq_len, bins)
    if len(tried) == 1:
        return 1.0
    alone = replace(asked, cluster=replace(asked.cluster, workers=0))
    layout = _layout(settings, mix, alone, PROFILED * max(tried))
    layout.drop_last = False
    layout.enter(State())
    collate = collate_of(settings, rules, None)
    found = []
    for ids in layout.steps(0)[0]:
        places = layout.places(ids[ids != NOBODY])
        samples = reader.samples(places)
        if len(samples) < len(set(places)):
            raise RecipeError(
                f"packing_ratio: auto is found from the first {PROFILED * max(tried):,} samples of every device, more than "
                f"{reader.read:,} bytes: raise --read, or write the number that the run logs (Using packing ratio) into the YAML."
            )
        rows = list(rows_of(places, samples, collate, _teller(reader, "The first rows")))
        found.append(best_ratio(rows, tried, bins, rules.max_seq_len))
    return min(found)


def _teller(reader: Reader, when: str) -> Callable[[Place], str]:
    """Names a sample in a sentence on a step."""

    def told(place: Place) -> str:
        stream = reader.streams[place.stream]
        shard = stream.shards[place.shard].raw_data.basename
        return f"{when}: stream {stream.name}, shard {shard}, row {place.position}"

    return told


def _state(asked: Asked, layout: Layout) -> State:
    if asked.state:
        return asked.state
    if not asked.from_step:
        return State(epoch=asked.epoch)
    per_step, epoch, step = asked.cluster.ranks * layout.batch_size, asked.epoch, asked.from_step
    if step * per_step >= layout.epoch_size:
        layout.enter(State())
        while step >= (steps := len(layout.steps(epoch))) > 0:
            epoch, step = epoch + 1, step - steps
    return State(epoch=epoch, sample_in_epoch=step * per_step)


def _epochs(layout: Layout, state: State, steps: int) -> list[Epoch]:
    """The epoch that is entered, and the ones after it as far as the steps go."""
    found, left, per_step = list[Epoch](), max(1, steps), layout.world.num_ranks * layout.batch_size
    at, sample = state.epoch, state.sample_in_epoch
    while left > 0:
        ids = layout.steps(at, sample)
        if not len(ids) and not sample:
            raise RecipeError(
                f"train_loader: an epoch of {layout.epoch_size:,} samples fills no batch of {per_step:,} with drop_last: true, so "
                "training would never take a step; set drop_last: false, or a smaller batch."
            )
        if len(ids):
            found.append(Epoch(epoch=at, first=sample // per_step, ids=ids))
        left, at, sample = left - len(ids), at + 1, 0
    return found


def _unit(layout: Layout) -> int:
    """Samples that are of one stream together."""
    device = layout.batch_size
    units = {"per_stream": device * int(layout.world.num_ranks), "device_per_stream": device}
    return units.get(layout.batching_method, 1)


class _Workers:
    """The collators of all workers of all devices, made when their first batch comes."""

    def __init__(
        self,
        settings: LoaderSettings,
        rules: RowRules,
        asked: Asked,
        ratio: float,
        images: Images | None = None,
    ):
        self.images = images
        loader, self.many = settings.loader, max(1, asked.cluster.workers)
        self.rules, self.settings = rules, settings
        self.bins = asked.cluster.rows if ratio > 1 else None
        self.lives = loader.persistent_workers or not asked.cluster.workers
        self.open = dict[tuple[int, int], Worker]()

    def collate(self) -> Collate:
        return collate_of(self.settings, self.rules, self.bins)

    def at(self, rank: int, worker: int) -> Worker:
        if (rank, worker) not in self.open:
            collate, text = self.collate(), self.settings.section.is_text
            self.open[rank, worker] = Worker(collate=collate, packer=collate.packer, is_text=text)
        return self.open[rank, worker]

    def end_epoch(self) -> None:
        """Workers that do not live on lose what waits in their bins."""
        if not self.lives:
            self.open.clear()

    @property
    def waiting(self) -> int:
        return sum(worker.waiting for worker in self.open.values())


def _steps(
    epochs: Sequence[Epoch], layout: Layout, workers: _Workers, reader: Reader, asked: Asked
) -> Iterator[Step]:
    left = asked.steps
    for epoch in epochs:
        for at, ids in enumerate(epoch.ids[:left]):
            ranks = [
                _rank(layout, asked, rank, at % workers.many, own) for rank, own in enumerate(ids)
            ]
            yield _step(epoch, at, ranks, workers, reader, asked)
        left -= len(epoch.ids)
        workers.end_epoch()


def _rank(layout: Layout, asked: Asked, rank: int, worker: int, own: Ids) -> Rank:
    ids, device = own[own != NOBODY], rank * asked.cluster.replication
    return Rank(
        rank=device,
        node=device // asked.cluster.gpus,
        worker=worker,
        ids=[int(n) for n in ids],
        places=layout.places(ids),
    )


def _step(
    epoch: Epoch,
    at: int,
    ranks: Sequence[Rank],
    workers: _Workers,
    reader: Reader,
    asked: Asked,
) -> Step:
    wanted = [p for rank in ranks for p in rank.places if _has_ids(reader, p)]
    samples = reader.samples(wanted)
    mades, shown, where = list[Made | None](), list[Shown](), f"Step {epoch.first + at}"
    for rank in ranks:
        worker = workers.at(rank.rank, rank.worker)
        told = _teller(reader, f"{where} of epoch {epoch.epoch}, rank {rank.rank}")
        rows = list(rows_of(rank.places, samples, worker.collate, told, workers.images))
        is_whole = len(rows) == len(rank.places)
        bins = worker.bins(rows) if is_whole or not worker.packer else None
        mades.append(None if bins is None else worker.made(bins))
        if rank.places and len(shown) < asked.samples:
            drawn = [row for rows in bins or [] for row in rows]
            shown += [Shown(rank=rank.rank, row=row) for row in drawn]
    kept = first_of_each([each.row for each in shown], asked.samples)
    return Step(
        epoch=epoch.epoch,
        step=epoch.first + at,
        ranks=ranks,
        drawn=sum(len(rank.places) for rank in ranks),
        looked=sum(p in samples for rank in ranks for p in rank.places),
        made=None if None in mades else joined([made for made in mades if made]),
        waiting=workers.waiting,
        shown=[each for row in kept for each in shown if each.row is row],
    )


def _has_ids(reader: Reader, place: Place) -> bool:
    """Whether its stream holds token ids; of others the loader tokenizes the text."""
    columns: Any = reader.streams[place.stream].columns
    return bool(layout_of(columns)) and "text" not in columns
