"""Searches training streams for samples of evaluations: which samples stand there, how much of
each, and where.

A leak is a finding, and nothing is deleted. Text may leak without being found: text that was worded
anew, translated, or tokenized by another tokenizer has other grams.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from mdsmix.errors import RecipeError
from mdsmix.leaks.evaluation_grams import (
    EvalSamples,
    Int,
    hash_grams,
    load_eval_samples,
    read_stored_tokens,
)
from mdsmix.mix.streams.mix import StreamInMix, published_tokenizers
from mdsmix.shards.index import Shard
from mdsmix.shards.published import PublishedStream
from mdsmix.shards.token_ids import decode_turns
from mdsmix.shards.verification import ReadingWatcher
from mdsmix.storage import Location
from mdsmix.tokenizer.published import hash_today

MOST_PLACES = 3
"Training samples that are named for each evaluation sample, by how many of its grams they hold."
CONTEXT = 24
"Tokens that a passage shows before and behind the shared run."
MOST_HELD = 10
"Training samples that are kept for each gram where `common` is 0; more would fill the memory."


class ScannedStream(NamedTuple):
    """The grams of evaluations that were found in one training stream."""

    tokens: int
    left_out: int
    "Grams that are left out: they occur in more than `common` samples of the stream."
    grams: Int
    "int64 [finds]: the number of each found gram."
    samples: Int
    "int64 [finds]: the number of the sample that holds it, in the stream."


class LeakingSample(NamedTuple):
    """A training sample that holds grams of an evaluation's sample."""

    stream: int
    sample: int
    grams: int
    "Grams of the evaluation's sample that occur in this one."


@dataclass(frozen=True, kw_only=True)
class Leak:
    """An evaluation sample with grams that occur in a training stream."""

    item: int
    "The number of the sample among all items."
    stream: int
    "The number of its evaluation."
    sample: int
    "The number of the sample in its evaluation."
    found: int
    "Grams of the sample that occur in any of the training streams."
    of: int
    "Grams of the sample, without grams that stand in too many samples of the evaluations."
    places: Sequence[LeakingSample]

    @property
    def share(self) -> float:
        return self.found / self.of


@dataclass(frozen=True)
class Audit:
    """The result of the search."""

    evaluations: Sequence[StreamInMix]
    streams: Sequence[StreamInMix]
    items: EvalSamples
    scanned: Sequence[ScannedStream]
    leaks: Sequence[Leak]
    "The largest share first."

    @property
    def unnamed(self) -> list[str]:
        """Streams without a manifest, which would name the tokenizer of their ids."""
        every = [*self.evaluations, *self.streams]
        return list(dict.fromkeys(each.name for each in every if not each.trusted_manifest))


def find_leaks(
    streams: Sequence[StreamInMix],
    evaluations: Sequence[StreamInMix],
    common: int,
    watcher: ReadingWatcher,
) -> Audit:
    """Reads the evaluations, then all of each stream. RecipeError where ids cannot be compared,
    Unreachable where a shard cannot be read.
    """
    _refuse_others([*streams, *evaluations])
    items = load_eval_samples(evaluations, common)
    scanned = []
    for stream in streams:
        watcher.begin(stream.name, stream.index.bytes)
        scanned.append(scan_stream(stream, items, watcher))
    return Audit(evaluations, streams, items, scanned, rank_leaks(items, scanned))


def _refuse_others(streams: Sequence[StreamInMix]) -> None:
    """RecipeError where manifests name two tokenizers, whose ids mean different texts."""
    cards = [(s.name, m.tokenizer) for s in streams if (m := s.trusted_manifest)]
    published = published_tokenizers(streams)
    for (name, card), own in zip(cards, published, strict=True):
        one, first = cards[0]
        if card.hash != first.hash and hash_today(own) != hash_today(published[0]):
            raise RecipeError(
                f"{one} holds ids of the tokenizer {first.name} and {name} of {card.name}, which mean different texts, so nothing "
                f"that both share could be found: convert {name} with the tokenizer of {one}."
            )


def scan_stream(
    stream: PublishedStream, items: EvalSamples, watcher: ReadingWatcher
) -> ScannedStream:
    """Searches every shard, several at once; Unreachable where a shard cannot be read.

    Memory does not grow with the stream. It holds the shards in flight, a count for each gram, and
    for each gram the first samples with it, `common` or MOST_HELD at most (a shard may add more).
    """
    counts, tokens, first = np.zeros(len(items.hashes), np.int64), 0, 0
    parts = [np.empty((2, 0), np.int64)]
    with ThreadPoolExecutor(8 if stream.folder.is_store else None) as pool:
        looks = pool.map(lambda shard: _look(stream.folder, shard, items), stream.shards)
        for shard, (size, found) in zip(stream.shards, looks, strict=True):
            held = counts[found[0]] < (items.common or MOST_HELD)
            counts += np.bincount(found[0], minlength=len(counts))
            parts.append(found[:, held] + [[0], [first]])
            first += shard.samples
            tokens += size
            watcher.on_progress(shard.stored.bytes, size)
    is_common = (counts > items.common) & (items.common > 0)
    every = np.concatenate(parts, axis=1)
    return ScannedStream(tokens, int(is_common.sum()), *every[:, ~is_common[every[0]]])


def _look(folder: Location, shard: Shard, items: EvalSamples) -> tuple[int, Int]:
    """The number of tokens in a shard, and int64 [2, finds]: the grams found, and the sample of
    each in the shard.
    """
    tokens = read_stored_tokens(folder, shard)
    if tokens is None:
        return 0, np.empty((2, 0), np.int64)
    return len(tokens.ids.values), items.find(tokens.ids)


def rank_leaks(items: EvalSamples, scanned: Sequence[ScannedStream]) -> list[Leak]:
    """The leak of each item with a gram in a stream, the largest share first."""
    is_found = np.zeros(len(items.hashes), bool)
    for each in scanned:
        is_found[each.grams] = True
    found, of = items.count(is_found), items.count(is_found | True)
    leaks = []
    for item, places in sorted(_places(items, scanned).items()):
        stream = bisect_right(items.firsts, item) - 1
        leaks.append(
            Leak(
                item=item,
                stream=stream,
                sample=item - items.firsts[stream],
                found=int(found[item]),
                of=int(of[item]),
                places=places,
            )
        )
    return sorted(leaks, key=lambda leak: (-leak.share, -leak.found))


def _places(items: EvalSamples, scanned: Sequence[ScannedStream]) -> dict[int, list[LeakingSample]]:
    """For each item, the MOST_PLACES training samples that hold most of its grams."""
    every = defaultdict[int, list[LeakingSample]](list)
    for number, each in enumerate(scanned):
        held = items.holders.take(each.grams)
        pairs = np.stack([held.values, np.repeat(each.samples, held.lengths)])
        both, counts = np.unique(pairs, axis=1, return_counts=True)
        for item, sample, grams in zip(*both.tolist(), counts.tolist(), strict=True):
            every[item].append(LeakingSample(number, sample, grams))
    for found in every.values():
        found.sort(key=lambda where: -where.grams)
        del found[MOST_PLACES:]
    return every


class Passage(NamedTuple):
    """The longest run of tokens that an item and a training sample share. `item`, `training`: the
    tokens before and behind it in each.
    """

    shared: Int
    item: tuple[Int, Int]
    training: tuple[Int, Int]


def read_passage(found: Audit, leak: Leak) -> Passage:
    """The passage that a leak shares with the training sample that holds most of its grams; that
    sample is read again.
    """
    first = leak.places[0]
    turns = decode_turns(found.streams[first.stream].read(first.sample))
    mine, its = found.items.rows[leak.item], np.concatenate([*chain(*turns)])
    begin, there, length = find_longest_shared(mine, its)
    return Passage(
        mine[begin : begin + length], _around(mine, begin, length), _around(its, there, length)
    )


def find_longest_shared(mine: Int, its: Int) -> tuple[int, int, int]:
    """Where a long shared run of tokens begins in `mine` and in `its`, and its length; (0, 0, 0)
    where they share no gram. Where a gram stands in `mine` more than once, its first place counts.
    """
    own, other = hash_grams(mine), hash_grams(its)
    edges = np.flatnonzero(np.diff(np.isin(other, own), prepend=False, append=False))
    if not len(edges):
        return 0, 0, 0
    at = int(edges[2 * np.diff(edges)[::2].argmax()])
    begin = int((own == other[at]).argmax())
    both = min(len(mine) - begin, len(its) - at)
    differs = mine[begin : begin + both] != its[at : at + both]
    return begin, at, int(np.append(differs, True).argmax())


def _around(ids: Int, begin: int, length: int) -> tuple[Int, Int]:
    end = begin + length
    return ids[max(0, begin - CONTEXT) : begin], ids[end : end + CONTEXT]
