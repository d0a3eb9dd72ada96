"""Evaluations against training streams: which samples of the first stand in the second, how much of them, and where.

A finding, never a deletion. What is found is there, token by token; what is not found may still be: text that was worded anew, translated,
or cut into tokens by another tokenizer has other grams.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import RecipeError
from mdsmix.leaks.evaluation_grams import LENGTH, Int, Items, load, rows_of, stored_tokens
from mdsmix.mix.streams import StreamInMix
from mdsmix.shards.index import Shard
from mdsmix.shards.published import Stream
from mdsmix.shards.token_ids import PACKED, layout_of, turns_of
from mdsmix.storage import Location

COMMON = 10
"Samples of a stream, or of the evaluations, beyond which a gram that stands in them is left out."
MOST_PLACES = 3
"Training samples that are named for each evaluation sample, those first that hold most of its grams."
CONTEXT = 24
"Tokens that a passage shows before and behind what both share."

MOST_HELD = 10
"Samples in which a gram was found that are held, where none counts as common."

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """What was found in one stream."""

    samples: int
    tokens: int
    is_common: NDArray[np.bool_]
    "bool [grams]: whether it occurs in too many samples of the stream."
    grams: Int
    "int64 [finds]: the number of the gram."
    found_in: Int
    "int64 [finds]: the number of the sample in the stream."

    @property
    def common(self) -> int:
        return int(self.is_common.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakingSample:
    """A training sample that holds grams of an evaluation's sample."""

    stream: int
    sample: int
    grams: int
    "Grams of the evaluation's sample that occur in this one."


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A sample of an evaluation of which something was found."""

    item: int
    found: int
    "Grams of it that occur in any of the streams."
    of: int
    "Its grams, those excepted that stand in too many samples of the evaluations."
    places: tuple[LeakingSample, ...]

    @property
    def share(self) -> float:
        return self.found / self.of


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """All that was found."""

    evaluations: Sequence[StreamInMix]
    streams: Sequence[StreamInMix]
    items: Items
    scanned: Sequence[Scanned]
    leaks: Sequence[Leak]
    "Those with the largest share first."
    hidden: int
    "Samples of which at least half the grams were left out as common in a stream, and found in none."

    @property
    def both(self) -> list[str]:
        """Evaluations that are trained themselves."""
        trained = {str(stream.folder) for stream in self.streams}
        return [each.name for each in self.evaluations if str(each.folder) in trained]

    @property
    def unnamed(self) -> list[str]:
        """Streams of which no manifest says whose ids they hold."""
        every = [*self.evaluations, *self.streams]
        return list(dict.fromkeys(each.name for each in every if not each.trusted_manifest))

    @property
    def shorts(self) -> int:
        """Samples that are too short for a gram."""
        return self.items.too_short

    @property
    def unknown(self) -> int:
        """Samples whose grams all stand in too many samples of the evaluations."""
        return int((self.items.grams == 0).sum()) - self.shorts


def audit(
    streams: Sequence[StreamInMix],
    evaluations: Sequence[StreamInMix],
    common: int,
    begin: Callable[[str, int], None],
    on_progress: Callable[[int, int], None],
) -> Audit:
    """Reads the evaluations, then all of each stream. RecipeError where ids cannot be compared, Unreachable where a shard cannot be read."""
    _refuse_others(streams, evaluations)
    items = load(evaluations, common)
    scanned = []
    for stream in streams:
        begin(stream.name, stream.index.bytes)
        scanned.append(scan(stream, items, common, on_progress))
    return Audit(
        evaluations=evaluations,
        streams=streams,
        items=items,
        scanned=scanned,
        leaks=leaks_of(items, scanned),
        hidden=_hidden(items, scanned),
    )


def _refuse_others(streams: Sequence[StreamInMix], evaluations: Sequence[StreamInMix]) -> None:
    """Ids of two tokenizers mean different texts."""
    every = [*streams, *evaluations]
    by = {s.trusted_manifest.tokenizer.hash: s for s in every if s.trusted_manifest}
    if len(by) > 1:
        one, other = list(by.values())[:2]
        names = [s.trusted_manifest.tokenizer.name for s in (one, other) if s.trusted_manifest]
        raise RecipeError(
            f"{one.name} holds ids of the tokenizer {names[0]} and {other.name} of {names[1]}, which mean different texts, so nothing "
            f"that both share could be found: convert {other.name} with the tokenizer of {one.name}."
        )


def scan(
    stream: Stream, items: Items, common: int, on_progress: Callable[[int, int], None]
) -> Scanned:
    """Searches every shard, some at once; Unreachable where one cannot be read.

    What is held does not grow with the stream: shards in flight, a count for each gram, and of each gram the samples that it stands in,
    until it stands in too many of them and counts as common.
    """
    counts = np.zeros(len(items.hashes), np.int64)
    grams, samples = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    all_tokens = first = 0
    items.tables  # noqa: B018  made once, before threads ask for it
    with ThreadPoolExecutor(threads(stream)) as pool:
        looks = pool.map(lambda shard: _look(stream.folder, shard, items), stream.shards)
        for shard, (tokens, gram, sample) in zip(stream.shards, looks, strict=True):
            before = counts[gram]
            counts += np.bincount(gram, minlength=len(counts))
            held = counts[gram] <= common if common else before < MOST_HELD
            grams.append(gram[held])
            samples.append(sample[held] + first)
            first += shard.samples
            all_tokens += tokens
            on_progress(shard.stored.bytes, tokens)
    is_common = (counts > common) & (common > 0)
    every = np.concatenate(grams)
    held = ~is_common[every]
    return Scanned(
        samples=first,
        tokens=all_tokens,
        is_common=is_common,
        grams=every[held],
        found_in=np.concatenate(samples)[held],
    )


def threads(stream: Stream) -> int:
    """As many as processors; with a store more, of which most wait for bytes. NumPy lets the others work meanwhile."""
    wanted = 8 if stream.folder.is_store else os.cpu_count() or 1
    return max(1, min(wanted, len(stream.shards)))


def _look(folder: Location, shard: Shard, items: Items) -> tuple[int, Int, Int]:
    """Tokens of a shard; the grams found in it, and the sample of each."""
    tokens = stored_tokens(folder, shard)
    if tokens is None:
        return 0, np.empty(0, np.int64), np.empty(0, np.int64)
    grams, rows = items.find(rows_of(shard, tokens))
    if layout_of(shard.columns) == PACKED:
        rows = np.searchsorted(tokens.turns, rows, "right") - 1
        grams, rows = np.unique(np.stack([grams, rows]), axis=1)
    return len(tokens.ids.values), grams, rows


def leaks_of(items: Items, scanned: Sequence[Scanned]) -> list[Leak]:
    """What was found of each item, the largest share first."""
    found = items.count(_flags(items, scanned)[0])
    places = _places(items, scanned)
    leaks = [
        Leak(item=i, found=int(found[i]), of=int(items.grams[i]), places=tuple(places[i]))
        for i in np.flatnonzero(found).tolist()
    ]
    return sorted(leaks, key=lambda leak: (-leak.share, -leak.found, leak.item))


def _hidden(items: Items, scanned: Sequence[Scanned]) -> int:
    is_found, is_common = _flags(items, scanned)
    left_out = items.count(is_common & ~is_found)
    return int(((2 * left_out >= items.grams) & (left_out > 0)).sum())


def _flags(items: Items, scanned: Sequence[Scanned]) -> tuple[Flags, Flags]:
    """Of each gram: whether it was found in a stream, and whether it is common in one."""
    is_found, is_common = np.zeros((2, len(items.hashes)), bool)
    for each in scanned:
        is_found[each.grams] = True
        is_common |= each.is_common
    return is_found, is_common


def _places(items: Items, scanned: Sequence[Scanned]) -> dict[int, list[LeakingSample]]:
    """Of each item the samples with most of its grams."""
    every = dict[int, list[LeakingSample]]()
    starts = np.searchsorted(items.pairs[0], np.arange(len(items.hashes) + 1))
    for number, each in enumerate(scanned):
        times = np.diff(starts)[each.grams]
        begins = np.repeat(starts[each.grams] - (np.cumsum(times) - times), times)
        item = items.pairs[1][begins + np.arange(times.sum())]
        both, counts = np.unique(
            np.stack([item, np.repeat(each.found_in, times)]), axis=1, return_counts=True
        )
        for i, sample, grams in zip(*both.tolist(), counts.tolist(), strict=True):
            every.setdefault(i, []).append(LeakingSample(stream=number, sample=sample, grams=grams))
    for found in every.values():
        found.sort(key=lambda where: (-where.grams, where.stream, where.sample))
        del found[MOST_PLACES:]
    return every


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The longest run of tokens that an item and a training sample share, and what stands around it in each."""

    shared: Ids
    item: tuple[Ids, Ids]
    "Before and behind it."
    training: tuple[Ids, Ids]


def passage(found: Audit, leak: Leak, where: LeakingSample) -> Passage:
    """Both passages of one finding; the training sample is read again."""
    items = found.items
    mine, its = items.rows[leak.item], _ids(found.streams[where.stream], where.sample)
    begin, there, length = longest_shared(mine, its)
    return Passage(
        shared=mine[begin : begin + length],
        item=_around(mine, begin, length),
        training=_around(its, there, length),
    )


def longest_shared(mine: Ids, its: Ids) -> tuple[int, int, int]:
    """Where a long run begins that both hold, in each, and its length; 0 where they share no gram. Of a gram that stands in `mine` more
    than once the first place counts, and its runs do not overlap: a row of a million tokens takes a second."""
    places = {_gram(mine, at): at for at in reversed(range(len(mine) - LENGTH + 1))}
    best, at = (0, 0, 0), 0
    while at <= len(its) - LENGTH:
        begin = places.get(_gram(its, at))
        if begin is None:
            at += 1
            continue
        both = min(len(mine) - begin, len(its) - at)
        differs = np.flatnonzero(mine[begin : begin + both] != its[at : at + both])
        length = int(differs[0]) if len(differs) else both
        best = max(best, (begin, at, length), key=itemgetter(2))
        at += length - LENGTH + 1
    return best


def _gram(ids: Ids, at: int) -> bytes:
    return ids[at : at + LENGTH].tobytes()


def _around(ids: Ids, begin: int, length: int) -> tuple[Ids, Ids]:
    end = begin + length
    return ids[max(0, begin - CONTEXT) : begin], ids[end : end + CONTEXT]


def _ids(stream: StreamInMix, sample: int) -> Ids:
    """All tokens of a stored sample, prompts and responses in their order."""
    return np.concatenate([side for turn in turns_of(stream.read(sample)) for side in turn])
