"""The draw of samples and their shuffle, both by a random number for each sample, which is computed
and never stored.

The numbers are SplitMix64's. Its n-th number follows from n alone, so any part of the sequence can
be computed again, at 100 M numbers a second, and memory never holds a permutation of a stream. All
numbers of one seed differ, so sorting by them is a shuffle without ties. numpy's generators promise
neither, nor the same numbers in every version. Source: Steele, Lea, Flood: Fast splittable
pseudorandom number generators, OOPSLA 2014.

A stream's shards are read one after the other, verified and counted. Drawn samples are dealt into
buckets, which are files on a local disk, by ranges of their numbers. Each bucket is sorted in
memory, so all buckets in a row hold the samples in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from mdsmix.kinds import kind_of
from mdsmix.mix.offline.mix_plan import Source
from mdsmix.mix.streams.mix import StreamInMix
from mdsmix.processor.counts import count_image_tokens
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Totals, count_by_length
from mdsmix.shards.index import Shard
from mdsmix.shards.manifest import Manifest, MixedStream
from mdsmix.shards.shard_samples import open_shard, read_all_samples, split_columns
from mdsmix.shards.token_ids import Tokens, decode_tokens, has_images
from mdsmix.shards.verification import ReadingWatcher

BLOCK = 1 << 20
"Random numbers that are computed at a time: 8 MB."
CHUNK = 1 << 12
"Samples that are joined at a time: their copy takes a few MB."
TOP, HALF = np.uint64(48), np.uint64(32)
KEYS = ".keys"
Keys = NDArray[np.uint64]
Copies = NDArray[np.int64]


def derive_seed(*parts: object) -> int:
    """A seed of 64 bits from the purpose of a sequence, such as (7, "draw", "web"), so that no two
    purposes share numbers.
    """
    return xxhash.xxh64_intdigest("\0".join(map(str, parts)))


def make_random_keys(seed: int, start: int, stop: int) -> Keys:
    """uint64 [stop - start]: the numbers `start` to `stop` of the seed's sequence, which are all
    different.
    """
    z = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw_copies(sizes: Iterable[int], drawn: int, seed: int) -> Iterator[Copies]:
    """For each shard, int64 [size]: how often each sample is drawn. Of 10 samples, 23 draws take
    each twice and 3 once more.

    The 3 are the samples with the smallest random keys: a choice without replacement in which all
    samples are equally likely.
    """
    ends = np.cumsum([0, *sizes]).tolist()
    whole, more = divmod(drawn, ends[-1])
    last = _kth_smallest(seed, ends[-1], more) if more else None
    for start, stop in pairwise(ends):
        copies = np.full(stop - start, whole, np.int64)
        if last is not None:
            copies += make_random_keys(seed, start, stop) <= last
        yield copies


def _kth_smallest(seed: int, n: int, k: int) -> np.uint64:
    """The k-th smallest (from 1) of the first n keys. Memory holds only the keys with the same
    first 16 bits, a 65,536th of them.
    """

    def blocks() -> Iterator[Keys]:
        return (make_random_keys(seed, at, min(n, at + BLOCK)) for at in range(0, n, BLOCK))

    ends = np.cumsum(
        sum(np.bincount((keys >> TOP).astype(np.int64), minlength=1 << 16) for keys in blocks())
    )
    top = int(np.searchsorted(ends, k))
    near = np.concatenate([keys[keys >> TOP == np.uint64(top)] for keys in blocks()])
    return np.uint64(np.sort(near)[k - 1 - int(ends[top - 1] if top else 0)])


class Buckets:
    """`number` files of samples in `folder`, each beside a file of their keys and sizes. Samples
    are numbered in the order of deals.
    """

    def __init__(self, folder: Path, number: int, seed: int) -> None:
        self._folder, self._number, self._seed = folder, number, seed
        self._dealt, self._used = 0, set[int]()

    def deal(self, samples: Ragged, rows: NDArray[np.int64]) -> None:
        """Deals out these rows of a shard. A row that is given twice counts as two samples."""
        keys = make_random_keys(self._seed, self._dealt, self._dealt + len(rows))
        self._dealt += len(rows)
        # Bucket = (upper half of the key * number) >> 32: ranges of keys of equal width.
        buckets = ((keys >> HALF) * np.uint64(self._number)) >> HALF
        self._used |= set(buckets.tolist())
        order = np.argsort(buckets, kind="stable")
        for dealt in np.split(order, np.flatnonzero(np.diff(buckets[order])) + 1):
            for chosen in np.array_split(dealt, -(-len(dealt) // CHUNK)):
                picked, path = samples.take(rows[chosen]), self._folder / str(buckets[chosen[0]])
                heads = np.stack([keys[chosen], picked.lengths.astype(np.uint64)], axis=1)
                # Opened for each chunk, since a process may not hold ten thousand buckets open.
                with path.open("ab") as file, path.with_suffix(KEYS).open("ab") as beside:
                    file.write(picked.values.data)
                    beside.write(heads.data)

    def shuffled(self) -> Iterator[Ragged]:
        """The sorted samples of each bucket in turn, whose files are deleted. FileNotFoundError
        where another program deleted them.
        """
        for bucket in sorted(self._used):
            yield _sorted(self._folder / str(bucket))


def _sorted(path: Path) -> Ragged:
    """The samples of a bucket in the order of their keys."""
    beside = path.with_suffix(KEYS)
    heads, data = np.fromfile(beside, np.uint64), np.fromfile(path, np.uint8)
    path.unlink()
    beside.unlink()
    samples = Ragged.from_lengths(data, heads[1::2])
    chunks = np.array_split(np.argsort(heads[0::2]), -(-len(samples) // CHUNK))
    parts = [samples.take(chunk) for chunk in chunks]
    del data, samples  # makes room for the joined parts
    return Ragged.concat(parts)


def deal_stream(
    source: Source, seed: int, buckets: Buckets, watcher: ReadingWatcher
) -> tuple[MixedStream, Totals]:
    """Deals out the drawn samples of a stream, and returns their counts. Unreachable, with the
    shard's name, where a shard is damaged.
    """
    stream, totals, is_counted = source.stream, Totals(), True
    copies_a_shard = draw_copies(
        (shard.samples for shard in stream.shards),
        source.drawn,
        derive_seed(seed, "draw", stream.name),
    )
    for shard, copies, samples in _read_ahead(stream, copies_a_shard):
        buckets.deal(samples, np.repeat(np.arange(len(samples)), copies))
        found = _counted(stream, shard, samples, copies)
        is_counted &= found is not None
        totals += found or Totals(samples=int(copies.sum()))
        watcher.on_progress(int(samples.lengths @ copies), found.tokens if found else 0)
    return MixedStream(
        name=stream.name,
        index_hash=stream.index.hash,
        samples=stream.index.samples,
        drawn=source.drawn,
        tokens=totals.seen_tokens if is_counted else None,
        weight=dict(source.weight),
    ), totals


def _read_ahead(
    stream: StreamInMix, copies: Iterable[Copies]
) -> Iterator[tuple[Shard, Copies, Ragged]]:
    """The shards with drawn samples, their copies and all their samples. The next shard is read
    ahead.
    """
    with ThreadPoolExecutor(1) as reader:
        reading = (
            (shard, times, reader.submit(read_all_samples, stream.folder, shard))
            for shard, times in zip(stream.shards, copies, strict=True)
            if times.any()
        )
        for now, _ in pairwise(chain(reading, [None])):
            assert now, "None is the last"
            yield *now[:2], now[2].result()


def _counted(stream: StreamInMix, shard: Shard, samples: Ragged, copies: Copies) -> Totals | None:
    """The counts of a shard's drawn samples; None where its columns hold no token ids."""
    manifest = stream.trusted_manifest
    with open_shard(stream.folder, shard):
        if (tokens := decode_tokens(shard, samples)) is None:
            return None
        found = count_samples(tokens, copies, manifest)
        if has_images(shard.columns):
            found += _images(shard, samples, copies, manifest)
        return found


def count_samples(tokens: Tokens, copies: Copies, manifest: Manifest | None) -> Totals:
    """The counts of the samples, each taken `copies` times; without a manifest only their number
    and tokens.
    """
    lengths, drawn = tokens.ids.lengths, copies > 0
    plain = Totals(samples=int(copies.sum()), tokens=int(lengths @ copies))
    if manifest is None or not drawn.any():
        return plain
    kind = kind_of(manifest.encoding)
    appended = None
    if tokens.trained is None:
        losses, cut = kind.losses(tokens, manifest.tokenizer.eos_id), kind.cut(tokens)
        appended = kind.appended(tokens, manifest.tokenizer.eos_id)
    else:  # a packed row names its trained tokens, and none of it is cut
        losses, cut = tokens.trained, np.zeros_like(tokens.trained)
    given_eos = 0 if appended is None else int(appended @ copies)
    return replace(
        plain,
        given_eos=given_eos,
        not_given_eos=0 if appended is None else plain.samples - given_eos,
        loss_tokens=int(losses @ copies),
        largest_id=int(tokens.largest[drawn].max()),
        longest=int(lengths[drawn].max()),
        cut_rows=int((cut > 0) @ copies),
        cut_tokens=int(cut @ copies),
        lengths=count_by_length(np.repeat(lengths, copies)),
        documents=0 if tokens.trained is None else int(np.diff(tokens.turns) @ copies),
    )


def _images(shard: Shard, samples: Ragged, copies: Copies, manifest: Manifest | None) -> Totals:
    """The images of the samples, their bytes, and their tokens by the processor of the conversion
    (0 without one).
    """
    found = dict(split_columns(shard, samples))
    sizes = [[*map(tuple, orjson.loads(cell))] for cell in found["sizes"].slices()]
    counts, tokens = np.array([*map(len, sizes)], np.int64), np.zeros(len(sizes), np.int64)
    if digest := manifest and manifest.encoding.images.get("processor"):
        each = count_image_tokens(digest, chain.from_iterable(sizes))
        tokens = np.array([sum(int(each[size]) for size in of) for of in sizes], np.int64)
    return Totals(
        images=int(counts @ copies),
        image_bytes=int((found["images"].lengths - 8 - 4 * counts) @ copies),
        image_tokens=int(tokens @ copies),
    )
