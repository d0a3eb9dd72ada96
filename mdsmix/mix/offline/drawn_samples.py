"""The drawn samples of one stream: its shards one after the other, verified, dealt into the buckets and counted.

A shard of which nothing is drawn is not downloaded. While one is dealt out the next is read, so that a store's answer
and the disk's work overlap; that makes two shards in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.encode.processor_server import SizeCounts
from mdsmix.errors import Unreachable
from mdsmix.kinds import kind_of
from mdsmix.mix.offline.mix_plan import Source
from mdsmix.mix.offline.shuffle import Buckets, Draw, seed_of
from mdsmix.mix.streams import StreamInMix
from mdsmix.shards.counts import Totals, histogram
from mdsmix.shards.index import Shard
from mdsmix.shards.manifest import Manifest, Mixed
from mdsmix.shards.shard_samples import Cells, Samples, bytes_at, cells, read_whole
from mdsmix.shards.token_ids import Tokens, has_images, tokens_of

Told = Callable[[int, int], None]
"Is told how many more bytes and tokens were dealt with."
Copies = NDArray[np.int64]


def deal(source: Source, seed: int, buckets: Buckets, on_progress: Told) -> tuple[Mixed, Totals]:
    """Deals out what is drawn of the stream, and says what it comes to; Unreachable names a shard that is damaged."""
    stream, totals, is_counted = source.stream, Totals(), True
    draw = Draw(stream.index.samples, source.drawn, seed_of(seed, "draw", stream.name))
    for shard, copies, samples in _read_ahead(stream, draw):
        buckets.deal(samples, np.repeat(np.arange(len(samples)), copies))
        found = _counted(stream, shard, samples, copies)
        is_counted &= found is not None
        totals += found or Totals(samples=int(copies.sum()))
        on_progress(int(samples.sizes @ copies), found.tokens if found else 0)
    mixed = Mixed(
        name=stream.name,
        index_hash=stream.index.hash,
        samples=stream.index.samples,
        drawn=source.drawn,
        tokens=totals.seen_tokens if is_counted else None,
        weight=dict(source.weight),
    )
    return mixed, totals


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


def _counted(stream: StreamInMix, shard: Shard, samples: Samples, copies: Copies) -> Totals | None:
    """None where the columns hold no ids."""
    manifest = stream.trusted_manifest
    try:
        tokens = tokens_of(shard, samples)
        if tokens is None:
            return None
        found = count(tokens, copies, manifest)
        if has_images(shard.columns):
            found += _images(shard, samples, copies, manifest)
        return found
    except (ValueError, LookupError, TypeError) as error:
        raise Unreachable(
            f"the shard {stream.folder / shard.stored.basename} is damaged: {str(error).rstrip('.')}; publish that "
            "stream again."
        ) from None


def count(tokens: Tokens, copies: Copies, manifest: Manifest | None) -> Totals:
    """What the samples come to, each taken `copies` times; without a manifest no more than their number and tokens."""
    lengths, drawn = tokens.ids.lengths, copies > 0
    plain = Totals(samples=int(copies.sum()), tokens=int(lengths @ copies))
    if manifest is None or not drawn.any():
        return plain
    kind = kind_of(manifest.encoding)
    if tokens.trained is None:
        losses, cut = kind.losses(tokens, manifest.tokenizer.eos_id), kind.cut(tokens)
    else:  # a packed row says what it trains, and nothing of it is cut
        losses, cut = tokens.trained, np.zeros_like(tokens.trained)
    return replace(
        plain,
        loss_tokens=int(losses @ copies),
        largest_id=int(tokens.largest[drawn].max()),
        longest=int(lengths[drawn].max()),
        cut_rows=int((cut > 0) @ copies),
        cut_tokens=int(cut @ copies),
        lengths=histogram(np.repeat(lengths, copies)),
        documents=0 if tokens.trained is None else int(np.diff(tokens.turns) @ copies),
    )


def _images(shard: Shard, samples: Samples, copies: Copies, manifest: Manifest | None) -> Totals:
    """The images of the samples, and what the processor of the conversion, if there was one, makes of them."""
    found = {part.name: part for part in cells(shard, samples)}
    counts = bytes_at(samples, found["images"].starts + 4, 4).view("<u4")[:, 0].astype(np.int64)
    digest = manifest.encoding.images.get("processor") if manifest else None
    return Totals(
        images=int(counts @ copies),
        image_bytes=int((found["images"].sizes - 8 - 4 * counts) @ copies),
        image_tokens=_image_tokens(samples, found["sizes"], copies, digest) if digest else 0,
    )


def _image_tokens(samples: Samples, sizes: Cells, copies: Copies, digest: str) -> int:
    spans = zip(sizes.starts.tolist(), sizes.stops.tolist(), copies.tolist(), strict=True)
    drawn = [(orjson.loads(samples.data[start:stop]), n) for start, stop, n in spans if n]
    tokens = SizeCounts(digest).of((h, w) for of, _ in drawn for h, w in of)
    return sum(n * int(tokens[h, w]) for of, n in drawn for h, w in of)
