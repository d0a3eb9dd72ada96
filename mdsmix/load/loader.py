"""`build_loader`: settings, dataset and collator put together, and the loader that a training loop
iterates.

It is streaming's StreamingDataLoader, so `state_dict` and `load_state_dict` are what Composer and a
loop of one's own know. Added are two things: the sentence of an error stays a sentence when it
comes out of a worker, and packed batches count the samples that they were made of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np
import torch
from streaming import StreamingDataLoader

from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.foundry_yaml.findings import refusal_message
from mdsmix.foundry_yaml.loader_keys import LOADER_DEFAULTS
from mdsmix.foundry_yaml.lock import locked_settings as lock_settings
from mdsmix.foundry_yaml.section_values import separator_differs
from mdsmix.foundry_yaml.training_yaml import Config
from mdsmix.kinds.kind_table import EXTRA_LOADERS
from mdsmix.load.collate import Batch, Collate, Packer, find_best_ratio, list_ratios
from mdsmix.load.dataset import CheckedStream, MixDataset, describe_error
from mdsmix.load.loader_settings import LoaderSettings, read_settings
from mdsmix.load.training_rows import RowRules, TokenIds, TrainingRow
from mdsmix.load.vision import open_vision
from mdsmix.messages import join_names, plural
from mdsmix.mix.epoch.cache_window import CachedStream, Window, compute_cache_need
from mdsmix.mix.epoch.draws import METHODS, Machines, count_delivered
from mdsmix.shards.token_ids import IMAGE_COLUMNS, PACKED_COLUMNS

log = logging.getLogger(__name__)
IN_USE = (
    "a local folder of its streams is in use, by two of its streams, by another loader that is still alive, or by a run that was killed: "
    "give each its own local, delete the other loader, or call streaming.base.util.clean_stale_shared_memory() where no other run is on "
    "this machine."
)
PROFILED = 100
"Batches that a packing ratio is tried on, as in LLM-Foundry."


class MixLoader(StreamingDataLoader):  # type: ignore[misc]
    """Iterating gives batches: a dict of int64 tensors [batch, max_seq_len]. One pass is one epoch.

    `state_dict()` between two batches says where the epoch is; after `load_state_dict(state)` the
    next pass goes on after the batches that were yielded, not those that were prefetched. If none
    are left, it is the next epoch.
    """

    _iterator: Any
    _is_accelerate_prepared = True
    """Accelerator.prepare would wrap the loader and divide its batches a second time; so it leaves
    the loader as it is.
    """
    use_stateful_dataloader = True
    "Accelerator.save_state and load_state keep the state of a prepared loader with this mark."

    def __init__(self, dataset: MixDataset, **keys: Any) -> None:
        super().__init__(dataset, **keys)
        # Lightning looks for it there.
        self.sampler.set_epoch = dataset.set_epoch
        self._reader: Any = None
        "Torch's iterator of the pass that is read."
        self._passes = 0
        self._starts = dataset.starts
        self._may_be_over = False
        "Whether the next pass goes on from a state, which may be that of the end of an epoch."

    def __iter__(self) -> Iterator[Batch]:
        self._follow()
        if self._reader is not self._iterator:
            self._stop_workers()
        self._passes += 1
        number = self._passes
        self.dataset.is_read_by_loader[0] = True
        try:
            for batch in self._this_epoch_or_next():
                yield batch
                self._follow()
                if number != self._passes:
                    raise RecipeError(
                        "This pass was begun before another one, or before load_state_dict was called, and only the last pass can "
                        "be read: take the batches of the new one."
                    )
        except MdsmixError as error:
            if number == self._passes:
                self._stop_workers()
            # The text of a worker's error is a whole traceback that ends in our sentence; that of
            # this process is the sentence alone.
            *traceback, last = str(error).strip().splitlines()
            if not traceback:
                raise
            # Torch's own frames hold the error that holds them, and with it the workers of this
            # pass. Collected as a cycle, their queues go before they are told to stop, and torch
            # waits 5 s for each.
            raise type(error)(last.partition(": ")[2]) from error.with_traceback(None)
        finally:
            if number == self._passes:
                self._reader = None
                self.dataset.is_read_by_loader[0] = False

    def _this_epoch_or_next(self) -> Iterator[Batch]:
        """Read the batches that a state left of its epoch; if it left none, those of the
        next one.
        """
        is_over, self._may_be_over = self._may_be_over, False
        for batch in self._batches():
            is_over = False
            yield batch
        if is_over:
            self.dataset.begin_next_epoch()
            self._starts = self.dataset.starts
            yield from self._batches()

    def _batches(self) -> Iterator[Batch]:
        drawn = 0
        for batch in super().__iter__():
            if self.collate_fn.packer:
                # Streaming has counted packed rows. Rows that still wait in bins are lost on
                # resuming.
                drawn = min(drawn + (self.batch_size or 0), len(self.dataset))
                self.num_samples_yielded = drawn
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Give the place in the epoch, for rank 0."""
        self._follow()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Make the next pass go on from a state, also on a loader that was iterated."""
        super().load_state_dict(obj)
        if obj["sample_in_epoch"] > self.dataset.last_place:
            self.dataset.set_epoch(obj["epoch"] + 1)
        self._follow()
        self._may_be_over = True

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, if it would be an earlier one. Trainer calls it as it
        begins an epoch.
        """
        self.dataset.set_epoch(epoch)

    def end(self) -> None:
        """Ends the workers and the threads of an epoch that nobody reads on."""
        self._stop_workers()
        self.dataset.end()

    def _follow(self) -> None:
        """End the pass that is read, if the dataset was given another place to begin at since."""
        if self._starts != self.dataset.starts:
            self._starts = self.dataset.starts
            self._passes += 1
            self.num_samples_yielded = 0
            self._stop_workers()

    def _get_iterator(self) -> Any:
        if self.num_workers:
            self.dataset.leave_to_workers()
        self._reader = super()._get_iterator()
        return self._reader

    def _stop_workers(self) -> None:
        """End the workers of a pass, and those that live from epoch to epoch; the next pass starts
        others.
        """
        for reader in (self._reader, self._iterator):
            if hasattr(reader, "_shutdown_workers"):
                reader._shutdown_workers()
        self._reader = self._iterator = None


def build_loader(
    config: Config,
    batch_size: int,
    loader: str = "train_loader",
    *,
    ids: TokenIds | None = None,
    accept_changed: bool = False,
    position_ids: bool = False,
) -> MixLoader:
    """Builds one loader of a rendered YAML, a LLM-Foundry config or a mapping of the same shape.

    Args:
        config: path of the YAML, or the mapping.
        batch_size: rows per batch and device.
        loader: `train_loader`, or `eval_loader.<label>`.
        ids: the tokenizer's ids; by default those of the config's `tokenizer`.
        accept_changed: `load_state_dict` goes on from a state of other data too, and logs what
        differs.
        position_ids: batches hold `position_ids` too, which begin anew with each document of a row.

    Raises:
        RecipeError: the config is wrong, or asks for what a stream cannot give.
        Unreachable: a stream or its index is missing. While iterating: a shard is lost or damaged,
        and is named.
        MixRefused: while iterating, a row does not fit the settings; its stream, shard and position
        are named. In
            `load_state_dict`, the state was counted on other data (docs/loading.md).

    >>> for batch in build_loader("train.yaml", batch_size=8):  # doctest: +SKIP
    ...     loss = model(batch["input_ids"], labels=batch["labels"])
    """
    settings = read_settings(config, loader)
    made = open_loader(settings, batch_size, ids or open_token_ids(settings), accept_changed)
    if position_ids and not made.collate_fn.rules.decoder_only_format:
        raise RecipeError(
            "position_ids are those of one sequence, and under decoder_only_format: false a sample has two: leave them out."
        )
    made.collate_fn.with_position_ids = position_ids
    return made


def open_loader(
    settings: LoaderSettings, batch_size: int, ids: TokenIds, accept_changed: bool = False
) -> MixLoader:
    """Builds a loader from settings that were read. `build_loader` and the plugin of LLM-Foundry
    both come here.
    """
    batch_size = _whole(batch_size)
    section, own, rules = settings.section, settings.loader, make_row_rules(settings, ids)
    ratio = _packing_ratio(settings, rules, batch_size)
    drawn, bins = int(batch_size * ratio), batch_size if ratio > 1 else None
    dataset = _dataset(settings, rules, drawn, int(own["num_workers"]))
    dataset.bins = bins
    dataset.accept_changed = accept_changed or own.get("accept_changed", False)
    # The parts of the tokenizer that the loader reads.
    dataset.locked = lock_settings(
        section, tokens=f"eos {ids.eos}, bos {ids.bos}, pad {ids.pad}, {ids.padding_side}"
    )
    is_stratified = settings.streaming.get("batching_method") == "stratified"
    if len(dataset) < drawn and (own["drop_last"] or is_stratified):
        raise RecipeError(
            f"{section.label}: an epoch gives each device {plural(len(dataset), 'sample')}, which fill no batch of {drawn:,}, so "
            "training would never take a step; give a smaller batch_size, or raise the weights."
        )
    _refuse_unfilled(dataset, section.label)
    if vision := open_vision(settings, dataset.has_columns(IMAGE_COLUMNS)):
        dataset.rules = rules = replace(rules, image=vision.processor.token_id)
    collate = make_collate(settings, rules, bins)
    collate.vision = vision
    if other := EXTRA_LOADERS.get(section.name):
        dataset.other_row = other.row
        collate.other_batch = other.batch
    # Attention must not cross the documents of a packed row, whatever the loader is called.
    collate.with_sequence_id |= dataset.has_columns(PACKED_COLUMNS)
    # Without workers torch refuses the two keys that speak of them; LLM-Foundry passes them on.
    keys = {key: own[key] for key in LOADER_DEFAULTS}
    keys["pin_memory"] &= torch.cuda.is_available()
    if not own["num_workers"]:
        keys |= {"prefetch_factor": None, "persistent_workers": False}
    return MixLoader(dataset, batch_size=drawn, collate_fn=collate, **keys)


def open_token_ids(settings: LoaderSettings) -> TokenIds:
    """The ids of the config's tokenizer; RecipeError where it names none."""
    from mdsmix.tokenizer.card import open_tokenizer
    from mdsmix.tokenizer.published import localize_spec

    if settings.tokenizer is None:
        raise RecipeError(
            f"The config of {settings.section.label} names no tokenizer, whose EOS and padding ids the rows need; add "
            "tokenizer: {name: ...} or pass ids."
        )
    tokenizer = open_tokenizer(localize_spec(settings.tokenizer, settings.places))
    return TokenIds(
        eos=tokenizer.eos_id,
        pad=tokenizer.pad_id,
        bos=tokenizer.bos_id,
        padding_side=tokenizer.padding_side,
    )


def make_row_rules(settings: LoaderSettings, ids: TokenIds) -> RowRules:
    """How the loader makes rows of samples; RecipeError where the tokenizer's ids do not fit it."""
    section = settings.section
    if not section.is_text and ids.fill is None:
        raise RecipeError(
            f"{section.label}: the tokenizer has neither a padding nor an EOS token, so rows cannot be padded; give "
            "it one of them."
        )
    for found in separator_differs(section, {"eos": ids.eos, "bos": ids.bos}):
        raise RecipeError(refusal_message(found, section))
    (prompts, responses), eos = section.targets, settings.row_key("eos_token_id")
    return RowRules(
        ids=ids,
        max_seq_len=section.max_seq_len or 0,
        decoder_only_format=settings.row_key("decoder_only_format", True),
        target_prompts=prompts,
        target_responses=responses,
        token_encoding_type=settings.row_key("token_encoding_type", "int64"),
        separator=settings.row_key("bos_token_id") if eos is None else eos,
        separator_starts=eos is None,
    )


def _whole(batch_size: Any) -> int:
    """A number of rows, as a loop of one's own gives it."""
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise RecipeError(
            f"batch_size is {batch_size!r}: it must be a whole number of rows, 1 or more."
        )
    return int(batch_size)


def _packing_ratio(settings: LoaderSettings, rules: RowRules, batch_size: int) -> float:
    """Samples drawn for each packed row; 1 without packing. `auto` is found as LLM-Foundry finds
    it, and logged.
    """
    given = settings.row_key("packing_ratio", 1)
    if given != "auto":
        return float(given)
    tried, rows = list_ratios(rules.max_seq_len, batch_size), list[TrainingRow]()
    if len(tried) > 1:  # read by a dataset of its own: the loader's begins its epoch untouched
        count = PROFILED * max(tried)
        # By default it would prepare 8 such batches ahead, of which it reads one.
        dataset = _dataset(settings, rules, count, 0, batch_size)
        try:
            rows = [*islice(dataset, count)]
        finally:
            dataset.end()
    found = find_best_ratio(rows, tried, batch_size, rules.max_seq_len)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        every = [found] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, found)
        found = min(every)
    log.info("Using packing ratio %s", found)
    return found


def _refuse_evicting(
    dataset: MixDataset, settings: LoaderSettings, drawn: int, workers: int
) -> None:
    """Raise RecipeError if the cache_limit makes Streaming evict shards that a worker waits for.
    `drawn`: samples of a device's batch.
    """
    if not dataset.cache_limit:
        return
    streams, start = list[CachedStream](), 0
    for stream, count in zip(dataset.streams, dataset.shards_per_stream, strict=True):
        shards = dataset.shards[start : start + count]
        start += count
        streams.append(
            CachedStream(
                samples=np.array([*map(len, shards)], np.int64),
                raw=np.array([shard.get_raw_size() for shard in shards], np.int64),
                packed=np.array([shard.get_zip_size() or 0 for shard in shards], np.int64),
                drawn=int(stream.choose),
                keeps_packed=stream.safe_keep_zip,
            )
        )
    window = Window(
        machines=replace(_machines_of(dataset, drawn), workers=workers),
        predownload=dataset.predownload,
        prefetch_factor=settings.loader["prefetch_factor"] or LOADER_DEFAULTS["prefetch_factor"],
        method=dataset.batching_method,
        partition=dataset.partition_algo,
        block_size=dataset.shuffle_block_size,
        granularity=dataset.sampling_granularity,
    )
    index = sum(stream.get_index_size() for stream in dataset.streams)
    need, limit = compute_cache_need(streams, index, window), int(dataset.cache_limit)
    if limit < need.bytes:
        label, given = settings.section.label, settings.streaming["cache_limit"]
        raise RecipeError(
            f"{label}: {need.describe_lack(given, limit)}; set cache_limit to {need.bytes} or more, or take it out, or set a smaller predownload or "
            "fewer num_workers."
        )


def _machines_of(dataset: MixDataset, drawn: int) -> Machines:
    """The devices that a dataset was opened for. `drawn`: samples that each of them draws for a
    batch.
    """
    devices = dataset._parallel_rank_world
    return Machines(
        batch=drawn * devices.num_ranks,
        nodes=devices.num_nodes,
        gpus=devices.ranks_per_node,
        num_canonical_nodes=dataset.num_canonical_nodes or 0,
        algo=dataset.shuffle_algo if dataset.shuffle else "none",
    )


def _refuse_unfilled(dataset: MixDataset, label: str) -> None:
    """Raise RecipeError if the batching method cannot put a batch together, which Streaming finds
    out in its first worker.
    """
    method = dataset.batching_method
    if method not in METHODS:
        return
    world = _machines_of(dataset, dataset.batch_size)
    streams = dataset.streams
    drawn, parts = [int(s.choose) for s in streams], [float(s.proportion) for s in streams]
    counts = zip(streams, count_delivered(method, drawn, parts, world), strict=True)
    if empty := [stream.name for stream, count in counts if not count]:
        size = "larger" if method == "stratified" else "smaller"
        raise RecipeError(
            f"{label}: batching_method: {method} puts no batch of {plural(world.batch, 'sample')} of all devices together, since an epoch "
            f"draws too little of {join_names(empty)}; take a {size} batch, raise the weight, or use batching_method: random."
        )


def _dataset(
    settings: LoaderSettings, rules: RowRules, drawn: int, workers: int, ahead: int | None = None
) -> MixDataset:
    """Open the streams. `ahead`: the most samples that a worker prepares ahead; None: as
    `predownload` says.
    """
    try:
        dataset = MixDataset(
            rules,
            streams=[CheckedStream(name=name, **keys) for name, keys in settings.streams.items()],
            batch_size=drawn,
            **settings.streaming,
        )
    except (ValueError, TypeError) as error:  # TypeError: a weight or a size that is text
        why = f"Streaming refuses it: {describe_error(error)}."
        if "Reused local directory" in why:
            why = IN_USE
        raise RecipeError(f"{settings.section.label}: {why}") from error
    if ahead is not None:
        dataset.predownload = min(dataset.predownload, ahead)
    _refuse_evicting(dataset, settings, ahead or drawn, workers)
    return dataset


def make_collate(settings: LoaderSettings, rules: RowRules, bins: int | None) -> Collate:
    """The collator of a loader. `bins`: packed rows of a batch, None without packing."""
    own = settings.row_key
    keep = own("max_leftover_bins_to_keep")
    return Collate(
        rules=rules,
        with_sequence_id=not settings.section.is_text or rules.separator is not None,
        packer=Packer(bins=bins, max_seq_len=rules.max_seq_len, keep=keep) if bins else None,
        pad_to_longest=own("pad_to_longest", False),
        allow_pad_trimming=own("allow_pad_trimming", False),
    )
