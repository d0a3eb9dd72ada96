"""The drawn samples of one stream: its shards one after the other, verified, dealt into the buckets and counted.

A shard of which nothing is drawn is not downloaded. While one is dealt out the next is read, so that a store's answer
and the disk's work overlap; that makes two shards in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.mix.offline.buckets import Buckets
from mdsmix.mix.offline.count import count, count_images
from mdsmix.mix.offline.draw import Draw, seed_of
from mdsmix.mix.offline.mix_plan import Source
from mdsmix.mix.streams import StreamInMix
from mdsmix.shards.counts import Totals
from mdsmix.shards.index import Shard
from mdsmix.shards.manifest import Mixed
from mdsmix.shards.shard_samples import Samples, read_whole
from mdsmix.shards.token_ids import has_images, tokens_of

Told = Callable[[int, int], None]
"Is told how many more bytes and tokens were dealt with."
Copies = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Taken:
    """What was drawn of a stream."""

    source: Source
    totals: Totals
    is_counted: bool
    "False where its columns hold no ids."

    @property
    def mixed(self) -> Mixed:
        stream = self.source.stream
        return Mixed(
            name=stream.name,
            index_hash=stream.index.hash,
            samples=stream.index.samples,
            drawn=self.source.drawn,
            tokens=self.totals.seen_tokens if self.is_counted else None,
            weight=dict(self.source.weight),
        )


def take(source: Source, seed: int, buckets: Buckets, on_progress: Told) -> Taken:
    """Deals out what is drawn of the stream; Unreachable names a shard that is damaged."""
    stream, totals, is_counted = source.stream, Totals(), True
    draw = Draw(stream.index.samples, source.drawn, seed_of(seed, "draw", stream.name))
    for shard, copies, samples in _read_ahead(stream, draw):
        rows = np.repeat(np.arange(len(samples)), copies)
        buckets.deal(samples, rows)
        found = _counted(stream, shard, samples, copies)
        is_counted &= found is not None
        totals += found or Totals(samples=len(rows))
        on_progress(int(samples.sizes @ copies), found.tokens if found else 0)
    return Taken(source, totals, is_counted)


def _counted(stream: StreamInMix, shard: Shard, samples: Samples, copies: Copies) -> Totals | None:
    try:
        tokens = tokens_of(shard, samples)
        if tokens is None:
            return None
        found = count(tokens, copies, stream.trusted_manifest)
        if has_images(shard.columns):
            found += count_images(shard, samples, copies, stream.trusted_manifest)
        return found
    except (ValueError, LookupError, TypeError) as error:
        raise Unreachable(
            f"the shard {stream.folder / shard.stored.basename} is damaged: {str(error).rstrip('.')}; publish that "
            "stream again."
        ) from None


def _read_ahead(stream: StreamInMix, draw: Draw) -> Iterator[tuple[Shard, Copies, Samples]]:
    waiting: tuple[Shard, Copies, Future[Samples]] | None = None
    with ThreadPoolExecutor(1) as reader:
        for shard, copies in _drawn_from(stream, draw):
            coming = shard, copies, reader.submit(read_whole, stream.folder, shard)
            if waiting:
                yield *waiting[:2], waiting[2].result()
            waiting = coming
        if waiting:
            yield *waiting[:2], waiting[2].result()


def _drawn_from(stream: StreamInMix, draw: Draw) -> Iterator[tuple[Shard, Copies]]:
    """The shards that something is drawn of, and how often each of their samples is."""
    start = 0
    for shard in stream.shards:
        copies = draw.copies(start, start + shard.samples)
        start += shard.samples
        if copies.any():
            yield shard, copies
