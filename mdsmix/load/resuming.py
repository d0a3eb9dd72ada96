"""What comes twice and what never, where an epoch goes on with other data than it began with.

Both epochs, the one that was begun and the one that goes on, are laid out by Streaming's own functions from their locks; a
sample is known by its shard's hash and its place in it. An epoch is laid out three times, at 1 s and 100 MB a million
samples each: that is the price of a number instead of a warning, and paid only where changed data was accepted. What moved
from a shard into another one is not recognised; its shard counts as replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.load.order import set_samples, without_asides
from mdsmix.training.lock import ORDER, LoaderLock, LockedStream
from mdsmix.words import plural

LARGEST = 20_000_000
"Samples of an epoch, or of its streams, that are laid out: a minute."
Ids = NDArray[np.int64]


class Epoch(StreamingDataset):  # type: ignore[misc]
    """What Streaming's layout asks of a dataset, from a lock and a state. It reads nothing."""

    def __init__(self, lock: LoaderLock, state: Mapping[str, Any]):
        for key, default in ORDER.items():
            setattr(self, key, lock.settings.get(key, default))
        # The state's own, whatever the settings say: so Streaming resumes.
        self.num_canonical_nodes = state["num_canonical_nodes"]
        self.shuffle_seed = state["shuffle_seed"]
        self.initial_physical_nodes = state.get("initial_physical_nodes")
        nodes = self.initial_physical_nodes or 1
        # One device a node: the order is the same for any number of them that share a global batch.
        self.world = World(nodes, 1, 1, 0)
        self.batch_size = max(1, lock.settings.get("batch", nodes) // nodes)
        self.epoch_seed_change = self.shuffle and self.sampling_method == "balanced"
        self._set_shuffle_block_size(self.world)
        self._count(lock.streams)

    def _count(self, streams: Sequence[LockedStream]) -> None:
        self.epoch_size = sum(stream.drawn for stream in streams)
        total = max(1, self.epoch_size)
        self.streams = [
            SimpleNamespace(choose=s.drawn, proportion=s.drawn / total) for s in streams
        ]
        set_samples(self, [[n for _, n in stream.contents] for stream in streams])

    def drawn(self, epoch: int, behind: int) -> Ids:
        """Sample ids in the order in which training sees them, without the first `behind`."""
        ids = generate_work(self.batching_method, self, self.world, epoch, behind)
        in_time = np.moveaxis(ids, 3, 0).ravel()
        return in_time[in_time >= 0]


class Repeats(NamedTuple):
    """What the rest of an epoch does to one stream."""

    stream: str
    twice: int
    "Samples that come more often in the epoch than they are drawn."
    never: int
    "Those that come less often."
    replaced: int
    "Samples that were seen in shards that are gone. Whether they come again is not known: a shard is known as a whole."
    replacing: int
    "Samples to come out of shards that were not there."

    def __str__(self) -> str:
        told = f"of {self.stream} {plural(self.twice, 'sample')} a second time and {self.never:,} not at all"
        if not self.replaced and not self.replacing:
            return told
        return (
            f"{told}, and beside them {self.replacing:,} out of shards that replace others, of which {self.replaced:,} had been seen: "
            "how many of these are the same is not known"
        )


def repeats(was: LoaderLock, now: LoaderLock, state: Mapping[str, Any]) -> list[Repeats] | None:
    """What comes twice and what never of each stream, where something does; None where that cannot be laid out here: too many
    samples, or a batching method that Streaming refuses for them.

    Args:
        was: what the epoch was begun with.
        now: what it goes on with.
        state: Streaming's `state_dict` of the moment between.
    """
    epoch, behind = max(0, state["epoch"]), state["sample_in_epoch"]
    if any(sum(max(s.drawn, s.samples) for s in lock.streams) > LARGEST for lock in (was, now)):
        return None
    try:
        with without_asides():
            seen = Epoch(was, state).drawn(epoch, 0)[:behind]
            new = Epoch(now, state)
            planned, rest = new.drawn(epoch, 0), new.drawn(epoch, behind)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError):
        return None
    return [r for r in _compared(was.streams, now.streams, seen, planned, rest) if any(r[1:])]


def repeats_after(was: LoaderLock, now: LoaderLock, behind: int | None) -> list[str]:
    """What a resume in the first epoch would do, as sentences; half of the epoch is `behind` unless it is said."""
    drawn = sum(stream.drawn for stream in was.streams)
    behind = drawn // 2 if behind is None else min(behind, drawn)
    many = 64 if was.settings.get("shuffle_algo") in ("py1s", "py2s") else 1
    state = {
        "epoch": 0,
        "sample_in_epoch": behind,
        "num_canonical_nodes": was.settings.get("num_canonical_nodes") or many,
        "shuffle_seed": was.settings.get("shuffle_seed", ORDER["shuffle_seed"]),
        "initial_physical_nodes": 1,
    }
    begin = f"resumed after {plural(behind, 'sample')} of an epoch of {drawn:,} (on one node)"
    found = repeats(was, now, state)
    if found is None:
        return [f"{begin}: it cannot be laid out here for a count of what comes twice"]
    return [f"{begin} come {r}" for r in found] or [
        f"{begin}, nothing comes twice and nothing is left out"
    ]


def _compared(
    was: Sequence[LockedStream], now: Sequence[LockedStream], seen: Ids, planned: Ids, rest: Ids
) -> Iterator[Repeats]:
    size, was_at, now_at = sum(s.samples for s in now), _bounds(was), _bounds(now)
    then = _ids_now(was, now)
    is_known = np.zeros(size + 1, np.bool_)
    is_known[then] = True
    for name in now_at.keys() - was_at.keys():  # of which nothing can have been seen
        is_known[slice(*now_at[name])] = True
    before = np.bincount(then[seen], minlength=size + 1)[:size]
    drawn, to_come = np.bincount(planned, minlength=size), np.bincount(rest, minlength=size)
    more = np.where(is_known[:size], before + to_come - drawn, 0)
    for stream in now:
        own = slice(*now_at[stream.name])
        begin, end = was_at.get(stream.name, (0, 0))
        replaced = seen[(seen >= begin) & (seen < end)]
        yield Repeats(
            stream=stream.name,
            twice=int(np.minimum(np.maximum(more[own], 0), to_come[own]).sum()),
            never=int(np.maximum(-more[own], 0).sum()),
            replaced=int((then[replaced] == size).sum()),
            replacing=int(to_come[own][~is_known[own]].sum()),
        )


def _bounds(streams: Sequence[LockedStream]) -> dict[str, tuple[int, int]]:
    """The first sample id of each stream, and the one behind its last."""
    ends = np.cumsum([stream.samples for stream in streams])
    return {s.name: (int(end) - s.samples, int(end)) for s, end in zip(streams, ends, strict=True)}


def _ids_now(was: Sequence[LockedStream], now: Sequence[LockedStream]) -> Ids:
    """For every sample id of what was, that of the same sample now; the one behind the last where its shard is gone."""
    begins: dict[tuple[str, str, int], list[int]] = {}
    first = 0
    for stream in now:
        for content, samples in stream.contents:
            begins.setdefault((stream.name, content, samples), []).append(first)
            first += samples
    ids = [np.zeros(0, np.int64)]
    for stream in was:
        for content, samples in stream.contents:
            found = begins.get((stream.name, content, samples))
            ids.append(found.pop(0) + np.arange(samples) if found else np.full(samples, first))
    return np.concatenate(ids)
