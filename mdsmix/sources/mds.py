"""A published MDS stream, of mdsmix or any other tool, as a source: its columns are the fields of its records.

A stream of texts can so be cut or tokenized again for another model, without its own source. The file is the stream's
`index.json`, which names the shards. Each shard is read whole and checked against its size and hashes before a sample is used.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from mdsmix.errors import Unreachable
from mdsmix.shards.index import Index, Shard, parse_index
from mdsmix.shards.shard_samples import decoded_samples, read_whole
from mdsmix.sources.arrow import line
from mdsmix.sources.format import Block, Format, Item, Splits, cut, item_blocks
from mdsmix.sources.units import SourceFile, Span


class Mds(Format):
    """The `index.json` of a stream. Its ordinals are samples, from 0."""

    ordinals = "sample"
    size_factor = 2  # not 1: the file is an index, and the shards are read

    def weight(self, file: SourceFile) -> int:
        return sum(shard.raw_data.bytes for shard in _index(file).shards)

    def records(self, file: SourceFile) -> int | None:
        return _index(file).samples

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        shards = _index(file).shards
        return cut([(shard.samples, shard.raw_data.bytes) for shard in shards], window_bytes)

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        return item_blocks(file, span, "mds", _samples(file, span))


@lru_cache(maxsize=16)
def _index(file: SourceFile) -> Index:
    with file.open() as stored:
        return parse_index(stored.read(), file.location.url)


def _samples(file: SourceFile, span: Span) -> Iterator[Item]:
    """The samples of the shards that begin in the span."""
    start = 0
    for shard in _index(file).shards:
        if span.holds(start):
            yield from _of_shard(file, shard, start)
        start += shard.samples


def _of_shard(file: SourceFile, shard: Shard, start: int) -> Iterator[Item]:
    found = read_whole(file.location.parent, shard)
    samples = decoded_samples(shard, found)
    for number in range(len(found)):
        try:
            record = {name: _plain(value) for name, value in next(samples).items()}
        except Exception as error:  # whatever a decoder raises on damaged bytes
            raise Unreachable(
                f"sample {number} of {file.location.parent / shard.stored.basename} is damaged ({error}); publish that stream again"
            ) from None
        raw, place = line(record), {"shard": shard.stored.basename, "sample": number}
        yield Item(start + number, place, len(raw), raw, record)


def _plain(value: Any) -> Any:
    """Arrays as lists, as any other format would give them."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
