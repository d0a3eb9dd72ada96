"""The lock of a loader in its `state_dict`: a resume on other data is refused, or goes on with a warning that says what differs.

Streaming's state is a number of samples. It is right for the data that it was counted on alone, so what that data was
travels beside it, as one string: a checkpoint in shards (torch.distributed.checkpoint) is read into a state of the same
keys. Nothing is worked out before a state is asked for or given: a sample costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from streaming import StreamingDataset
from streaming.base.world import World

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.training.lock import (
    LoaderLock,
    Shard,
    differences,
    locked_stream,
    parse_lock,
)

log = logging.getLogger(__name__)
KEY = "mdsmix_lock"
"The key of a state that holds the lock, as text."
WHERE = "the lock in the checkpoint"
ACCEPT = "accept_changed: true (train_loader of name: mdsmix; build_loader(..., accept_changed=True)) goes on all the same"


def lock_of(dataset: StreamingDataset, settings: Mapping[str, Any]) -> LoaderLock:
    """The lock of a dataset: its streams, and `settings`, the further settings that a state is locked to."""
    ranks = World.detect().num_ranks // (dataset.replication or 1)
    shards = map(_shard, dataset.shards)
    streams = [
        locked_stream(stream.name, int(stream.choose), islice(shards, count))
        for stream, count in zip(dataset.streams, dataset.shards_per_stream, strict=True)
    ]
    batch = (dataset.batch_size or 0) * ranks
    return LoaderLock(streams=streams, settings={**settings, "batch": batch})


def _shard(shard: Any) -> Shard:
    raw, zipped = shard.file_pairs[0]
    hashes = raw.hashes or (zipped.hashes if zipped else {})
    return len(shard), raw.basename, raw.bytes, hashes


def judged_state(
    given: Mapping[str, Any], now: Callable[[], LoaderLock], accept_changed: bool
) -> dict[str, Any]:
    """Compares a state's lock with that of the dataset that is to go on from it. Returns the state without the lock, since Streaming has
    room for 4,096 bytes.

    Raises:
        RecipeError: it is no state, or its lock cannot be read.
        MixRefused: the data is not what the state was counted on, and `accept_changed` is not set.
    """
    state = {key: value for key, value in given.items() if key != KEY}
    for key in ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed"):
        if not isinstance(state.get(key), int):  # Streaming would fail on it later, in its workers
            raise RecipeError(
                f"What load_state_dict was given is no state of a loader: {key} is {state.get(key)!r}, and must be a whole number; "
                "give it what state_dict() of a loader returned, out of the checkpoint that holds it."
            )
    if (text := given.get(KEY)) is None:
        log.warning(
            "The checkpoint holds no lock of its data, as one of another loader: whether its samples are those of this run is not known."
        )
        return state
    try:
        was = parse_lock(LoaderLock, str(text), WHERE, "use the one that wrote it")
    except RecipeError as error:
        if not accept_changed:
            raise RecipeError(f"{str(error).rstrip('.')}; {ACCEPT}.") from None
        log.warning("%s", error)
        return state
    # Streaming found out the canonical nodes at the start: they are compared where this run names a number too.
    is_named = (lock := now()).settings.get("num_canonical_nodes") is not None
    nodes = state["num_canonical_nodes"] if is_named else None
    was = replace(was, settings=was.settings | {"num_canonical_nodes": nodes})
    told = "; ".join(sentence for sentence, _ in differences(was, lock))
    if told and not accept_changed:
        raise MixRefused(
            f"The checkpoint was written on other data: {told}. Resumed on this data, samples would come twice and "
            f"others never. Fix: go on with the data and the settings of the checkpoint (publish: versioned keeps both); {ACCEPT}."
        )
    if told and World.detect().is_local_leader:
        log.warning("accept_changed: the checkpoint was written on other data: %s.", told)
    return state
