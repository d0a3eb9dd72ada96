"""The search for evaluation samples in training streams: which samples are there, how much of each,
and where. Samples are compared by their grams: runs of 13 tokens.

A leak is reported and nothing is deleted. Text may leak without being found: a paraphrase, a
translation, or the same text in another tokenizer's ids has other grams.
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
from mdsmix.tokenizer.published import find_current_hash

MOST_PLACES = 3
"Training samples to name for each evaluation sample: those with most of its grams."
CONTEXT = 24
"Tokens to show of a passage before and after the shared run."
MOST_SAMPLES = 10
"Training samples to keep for each gram if `common` is 0; more would fill the memory."


class ScannedStream(NamedTuple):
    """The evaluations' grams in one training stream."""

    tokens: int
    left_out: int
    "Grams that are ignored because more than `common` samples of the stream contain them."
    grams: Int
    "int64 [finds]: the number of each gram."
    samples: Int
    "int64 [finds]: the number of the sample in the stream that contains it."


class LeakingSample(NamedTuple):
    """A training sample that contains grams of an evaluation sample."""

    stream: int
    "The number of the training stream."
    sample: int
    "The number of the sample in its stream."
    grams: int
    "Grams of the evaluation sample that this sample contains."


@dataclass(frozen=True, kw_only=True)
class Leak:
    """An evaluation sample with grams in a training stream."""

    item: int
    "The number of the sample among the samples of all evaluations."
    stream: int
    "The number of its evaluation."
    sample: int
    "The number of the sample in its evaluation."
    leaked_grams: int
    "Grams of the sample that any training stream contains."
    grams: int
    "Grams of the sample that were searched: not those in too many evaluation samples."
    sources: Sequence[LeakingSample]
    "The training samples with most of its grams, the largest number first."

    @property
    def share(self) -> float:
        return self.leaked_grams / self.grams


@dataclass(frozen=True)
class Audit:
    """The result of searching training streams for evaluation samples."""

    evaluations: Sequence[StreamInMix]
    streams: Sequence[StreamInMix]
    "The training streams that were searched."
    items: EvalSamples
    "The samples of all evaluations, and their grams."
    scanned: Sequence[ScannedStream]
    "For each training stream, the grams that it contains."
    leaks: Sequence[Leak]
    "The largest share first."

    @property
    def unnamed(self) -> list[str]:
        """Names of the streams without a manifest, so the tokenizer of their ids is unknown."""
        streams = [*self.evaluations, *self.streams]
        names = [stream.name for stream in streams if not stream.trusted_manifest]
        return list(dict.fromkeys(names))


def find_leaks(
    streams: Sequence[StreamInMix],
    evaluations: Sequence[StreamInMix],
    common: int,
    watcher: ReadingWatcher,
) -> Audit:
    """Read the evaluations, then search all of each stream.

    Raises RecipeError if the streams' ids cannot be compared, and Unreachable if a shard cannot be
    read.

    Args:
        common: grams in more samples than this are ignored; 0 ignores none.
    """
    _refuse_other_tokenizers([*streams, *evaluations])
    items = load_eval_samples(evaluations, common)
    scanned = []
    for stream in streams:
        watcher.begin(stream.name, stream.index.bytes)
        scanned.append(scan_stream(stream, items, watcher))
    return Audit(evaluations, streams, items, scanned, rank_leaks(items, scanned))


def _refuse_other_tokenizers(streams: Sequence[StreamInMix]) -> None:
    """Raise RecipeError if the streams were converted with different tokenizers: then the same ids
    mean different text.
    """
    cards = []
    for stream in streams:
        manifest = stream.trusted_manifest
        if manifest:
            cards.append((stream.name, manifest.tokenizer))
    published = published_tokenizers(streams)
    for (name, card), tokenizer in zip(cards, published, strict=True):
        first_name, first_card = cards[0]
        if card.hash != first_card.hash and find_current_hash(tokenizer) != find_current_hash(
            published[0]
        ):
            raise RecipeError(
                f"{first_name} has ids of the tokenizer {first_card.name} and {name} of "
                f"{card.name}. The same text has other ids there, so no leak could be found: "
                f"convert {name} with the tokenizer of {first_name}."
            )


def scan_stream(
    stream: PublishedStream, items: EvalSamples, watcher: ReadingWatcher
) -> ScannedStream:
    """Search every shard of a stream, several at once. Raises Unreachable if one cannot be read.

    Memory does not grow with the stream. It contains the shards in flight, a count for each gram,
    and the first samples with each gram: `common` or MOST_SAMPLES (the last shard may add more).
    """
    counts = np.zeros(len(items.hashes), np.int64)
    finds = [np.empty((2, 0), np.int64)]
    tokens = 0
    first_sample = 0
    with ThreadPoolExecutor(8 if stream.folder.is_store else None) as pool:
        searches = pool.map(lambda shard: _search_shard(stream.folder, shard, items), stream.shards)
        for shard, (shard_tokens, shard_finds) in zip(stream.shards, searches, strict=True):
            gram_numbers = shard_finds[0]
            has_room = counts[gram_numbers] < (items.common or MOST_SAMPLES)
            counts += np.bincount(gram_numbers, minlength=len(counts))
            # A shard numbers its samples from 0: add the number of samples before the shard.
            finds.append(shard_finds[:, has_room] + [[0], [first_sample]])
            first_sample += shard.samples
            tokens += shard_tokens
            watcher.on_progress(shard.stored.bytes, shard_tokens)
    is_common = (counts > items.common) & (items.common > 0)  # `common` = 0: no gram is ignored
    grams, samples = np.concatenate(finds, axis=1)
    is_kept = ~is_common[grams]
    return ScannedStream(tokens, int(is_common.sum()), grams[is_kept], samples[is_kept])


def _search_shard(folder: Location, shard: Shard, items: EvalSamples) -> tuple[int, Int]:
    """Return the number of tokens in a shard, and its finds: int64 [2, finds], the numbers of the
    grams and of the samples in the shard that contain them.
    """
    tokens = read_stored_tokens(folder, shard)
    if tokens is None:
        return 0, np.empty((2, 0), np.int64)
    return len(tokens.ids.values), items.find(tokens.ids)


def rank_leaks(items: EvalSamples, scanned: Sequence[ScannedStream]) -> list[Leak]:
    """Return a leak for each evaluation sample with a gram in a stream, the largest share first."""
    has_leaked = np.zeros(len(items.hashes), bool)
    for stream_finds in scanned:
        has_leaked[stream_finds.grams] = True
    leaked_grams = items.count(has_leaked)
    all_grams = items.count(np.ones(len(items.hashes), bool))
    leaks = []
    for item, sources in sorted(_leak_sources(items, scanned).items()):
        stream = bisect_right(items.firsts, item) - 1
        leaks.append(
            Leak(
                item=item,
                stream=stream,
                sample=item - items.firsts[stream],
                leaked_grams=int(leaked_grams[item]),
                grams=int(all_grams[item]),
                sources=sources,
            )
        )
    return sorted(leaks, key=lambda leak: (-leak.share, -leak.leaked_grams))


def _leak_sources(
    items: EvalSamples, scanned: Sequence[ScannedStream]
) -> dict[int, list[LeakingSample]]:
    """Map each item to the MOST_PLACES training samples that contain most of its grams."""
    sources_by_item = defaultdict[int, list[LeakingSample]](list)
    for stream, finds in enumerate(scanned):
        # List the pair (item, training sample) once for each gram that both contain, and count.
        items_of_grams = items.holders.take(finds.grams)
        samples = np.repeat(finds.samples, items_of_grams.lengths)
        pairs = np.stack([items_of_grams.values, samples])
        distinct_pairs, counts = np.unique(pairs, axis=1, return_counts=True)
        for item, sample, grams in zip(*distinct_pairs.tolist(), counts.tolist(), strict=True):
            sources_by_item[item].append(LeakingSample(stream, sample, grams))
    for sources in sources_by_item.values():
        sources.sort(key=lambda source: -source.grams)
        del sources[MOST_PLACES:]
    return sources_by_item


class Passage(NamedTuple):
    """The longest run of tokens that an evaluation sample and a training sample share."""

    shared: Int
    item: tuple[Int, Int]
    "Tokens of the evaluation sample before the run and after it."
    training: tuple[Int, Int]
    "Tokens of the training sample before the run and after it."


def read_passage(audit: Audit, leak: Leak) -> Passage:
    """Read the training sample with most of a leak's grams again, and return what both share."""
    source = leak.sources[0]
    turns = decode_turns(audit.streams[source.stream].read_sample(source.sample))
    item = audit.items.rows[leak.item]
    training = np.concatenate([*chain(*turns)])
    run = find_longest_shared(item, training)
    return Passage(
        item[run.start : run.start + run.length],
        _context(item, run.start, run.length),
        _context(training, run.training_start, run.length),
    )


class SharedRun(NamedTuple):
    """A run of tokens in an evaluation sample and in a training sample."""

    start: int
    "Its position in the evaluation sample."
    training_start: int
    "Its position in the training sample."
    length: int


def find_longest_shared(item: Int, training: Int) -> SharedRun:
    """Find a long run of tokens in both samples. All fields are 0 if they share no gram.

    If `item` contains a gram more than once, its first position counts.
    """
    item_hashes = hash_grams(item)
    training_hashes = hash_grams(training)
    is_shared = np.isin(training_hashes, item_hashes)
    # The positions where runs of shared grams begin and end: begin, end, begin, end, ...
    edges = np.flatnonzero(np.diff(is_shared, prepend=False, append=False))
    if not len(edges):
        return SharedRun(0, 0, 0)
    longest = np.diff(edges)[::2].argmax()  # every other difference is the length of a run
    training_start = int(edges[2 * longest])
    start = int((item_hashes == training_hashes[training_start]).argmax())
    rest = min(len(item) - start, len(training) - training_start)
    # The run ends before the first token that differs, or where one of the samples ends.
    differs = item[start : start + rest] != training[training_start : training_start + rest]
    return SharedRun(start, training_start, int(np.append(differs, True).argmax()))


def _context(ids: Int, start: int, length: int) -> tuple[Int, Int]:
    """Return the CONTEXT ids before a run, and those after it."""
    end = start + length
    return ids[max(0, start - CONTEXT) : start], ids[end : end + CONTEXT]
