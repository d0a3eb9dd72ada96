"""Refuses settings with which a loader cannot give all devices their batches.

Streaming would notice them later, in a worker, or not at all.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import LOADER_DEFAULTS
from mdsmix.load.dataset import MixDataset
from mdsmix.load.loader_settings import LoaderSettings
from mdsmix.messages import join_names, plural
from mdsmix.mix.epoch.cache_window import CachedStream, Window, compute_cache_need
from mdsmix.mix.epoch.draws import (
    METHODS,
    Machines,
    choose_block_size,
    count_delivered,
    describe_idle_devices,
    find_tiny_blocks,
)

log = logging.getLogger(__name__)


def refuse_empty_epoch(dataset: MixDataset, settings: LoaderSettings, drawn: int) -> None:
    """Raise RecipeError if an epoch has no batch.

    Args:
        drawn: samples that a device draws for a batch.
    """
    # An incomplete batch is dropped by drop_last, and under `stratified` always.
    is_stratified = settings.streaming.get("batching_method") == "stratified"
    drops_incomplete = settings.loader["drop_last"] or is_stratified
    if len(dataset) < drawn and drops_incomplete:
        other_way = "" if is_stratified else ", or set drop_last: false"
        raise RecipeError(
            f"{settings.section.label}: an epoch gives each device "
            f"{plural(len(dataset), 'sample')}, but a batch needs {drawn:,}, so training would "
            "never take a step; set a smaller batch size, or raise the weights of the "
            f"streams{other_way}."
        )


def refuse_unfilled(dataset: MixDataset, label: str) -> None:
    """Raise RecipeError if the batching method cannot fill a batch. Streaming would notice this
    only later, in its first worker. Warn if it gives some devices fewer batches than others.

    Args:
        label: the loader's name in the message, such as `train_loader`.
    """
    method = dataset.batching_method
    machines = _describe_machines(dataset, dataset.batch_size)
    streams = dataset.streams
    proportions = [float(stream.proportion) for stream in streams]
    block_size = choose_block_size(dataset.shuffle_block_size, machines.canonical)
    tiny = find_tiny_blocks(method, machines.shuffle, block_size, proportions)
    if tiny:
        parts = f"the parts of {join_names([streams[number].name for number in tiny])} in "
        raise RecipeError(
            f"{label}: {parts if method in METHODS else ''}shuffle_block_size: {block_size:,} are "
            f"too small for shuffle_algo: {machines.algo} (batching_method: {method}), so "
            "Streaming could not shuffle; set a larger shuffle_block_size, or raise the weight of "
            "these streams."
        )
    drawn = [int(stream.choose) for stream in streams]
    if method not in METHODS:
        if machines.shuffle == "py1e" and sum(drawn) < machines.canonical:
            raise RecipeError(
                f"{label}: an epoch draws {plural(sum(drawn), 'sample')}, fewer than the "
                f"{machines.canonical:,} canonical nodes, so Streaming could not shuffle "
                f"(shuffle_algo: py1e); set num_canonical_nodes to at most {sum(drawn)}, or raise "
                "the weights of the streams."
            )
        return
    delivered = count_delivered(method, drawn, proportions, machines)
    empty = [stream.name for stream, count in zip(streams, delivered, strict=True) if not count]
    if empty:
        size = "larger" if method == "stratified" else "smaller"
        raise RecipeError(
            f"{label}: batching_method: {method} cannot fill a batch of "
            f"{plural(machines.batch, 'sample')} on all devices, since an epoch draws too few "
            f"samples of {join_names(empty)}; set a {size} batch, raise the weight of these "
            "streams, or use batching_method: random."
        )
    idle = describe_idle_devices(method, delivered, machines)
    if idle and dataset._parallel_rank_world.is_local_leader:
        log.warning("%s: %s.", label, idle)


def refuse_evicting(
    dataset: MixDataset, settings: LoaderSettings, drawn: int, workers: int
) -> None:
    """Raise RecipeError if the cache_limit makes Streaming evict shards that a worker waits for.

    Args:
        drawn: samples that a device draws for a batch.
        workers: workers of a device.
    """
    if not dataset.cache_limit:
        return
    streams = list[CachedStream]()
    first_shard = 0
    for stream, count in zip(dataset.streams, dataset.shards_per_stream, strict=True):
        shards = dataset.shards[first_shard : first_shard + count]
        first_shard += count
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
        machines=replace(_describe_machines(dataset, drawn), workers=workers),
        predownload=dataset.predownload,
        prefetch_factor=settings.loader["prefetch_factor"] or LOADER_DEFAULTS["prefetch_factor"],
        method=dataset.batching_method,
        partition=dataset.partition_algo,
        block_size=dataset.shuffle_block_size,
        granularity=dataset.sampling_granularity,
    )
    index_bytes = sum(stream.get_index_size() for stream in dataset.streams)
    need = compute_cache_need(streams, index_bytes, window)
    limit = int(dataset.cache_limit)
    if limit < need.bytes:
        lack = need.describe_lack(settings.streaming["cache_limit"], limit)
        raise RecipeError(
            f"{settings.section.label}: {lack}; set cache_limit to {need.bytes} or more, remove "
            "cache_limit, or set a smaller predownload or a smaller num_workers."
        )


def _describe_machines(dataset: MixDataset, drawn: int) -> Machines:
    """Return the devices for which a dataset was opened.

    Args:
        drawn: samples that a device draws for a batch.
    """
    world = dataset._parallel_rank_world
    return Machines(
        batch=drawn * world.num_ranks,
        nodes=world.num_nodes,
        gpus=world.ranks_per_node,
        num_canonical_nodes=dataset.num_canonical_nodes or 0,
        algo=dataset.shuffle_algo,
        is_shuffled=bool(dataset.shuffle),
    )
