"""The mark of a published stream: read, or worked out of its shards where it has none, and kept in the cache of this machine.

Streams that were published before there were marks keep their bytes: what is worked out of them is written to no target. A mark that
is worked out is the one that a conversion writes, hash by hash.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, pairwise

import numpy as np

from mdsmix.encode.tokenizer import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.overlap.marks import KIND, Mark, Marking, UnitMark, halvings_for, parse
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Index, Shard
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.tokens import Tokens, token_columns, tokens_of
from mdsmix.shards.turns import PACKED, layout_of
from mdsmix.shards.whole import read_whole
from mdsmix.storage import Location

PAIR = ("input_ids", "labels")


def read_mark(folder: Location, index: Index, manifest: Manifest | None) -> Mark | None:
    """What was published, or was worked out here before; None where there is neither, where it is damaged, or where it is not of all
    of the stream. One request, and none where this machine has it."""
    if mark := _cached(index.hash):
        return mark
    sides = manifest.side_files if manifest and manifest.index_hash == index.hash else []
    side = next((side for side in sides if side.kind == KIND), None)
    if manifest is None or side is None:
        return None
    mark = _cached(side.hash)
    if mark is None and (found := (folder / side.name).fetch()):
        mark = parse(found[1])
        _keep(side.hash, found[1] if mark else b"")
    is_whole = mark and [u.key for u in mark.units] == [p.key for p in manifest.parts]
    return mark if is_whole else None


def work_out(folder: Location, index: Index, manifest: Manifest | None) -> Mark | None:
    """The mark by reading every shard, which is kept here; None where columns hold no ids. Unreachable where a shard cannot be read."""
    units, images = list[UnitMark](), manifest.encoding.image_ids if manifest else ()
    for key, shards in _units(index, manifest):
        marking = Marking(images)
        for shard in shards:
            if not token_columns(shard):
                return None
            if tokens := tokens_of(shard, read_whole(folder, shard)):
                marking.add(*_columns_of(shard, tokens))
        mark = marking.finish(key)
        assert mark, "all columns hold ids"
        units.append(mark)
    halvings = halvings_for(sum(unit.count for unit in units))
    found = Mark(tuple(unit.below(halvings) for unit in units), halvings)
    _keep(index.hash, found.to_bytes())
    return found


def _columns_of(shard: Shard, tokens: Tokens) -> tuple[Ragged, ...]:
    """The rows of samples as a mark takes them: of two columns each for itself."""
    if layout_of(shard.columns) != PAIR:
        return (rows_of(shard, tokens),)
    sides = np.stack([tokens.prompts, tokens.responses], axis=1).reshape(-1)
    both, number = Ragged.from_lengths(tokens.ids.values, sides), np.arange(0, len(sides), 2)
    return both.take(number), both.take(number + 1)


def rows_of(shard: Shard, tokens: Tokens) -> Ragged:
    """The tokens of each sample of a shard; of packed rows, of each of their documents."""
    if layout_of(shard.columns) != PACKED:
        return tokens.ids
    return Ragged.from_lengths(tokens.ids.values, tokens.responses)


def _units(index: Index, manifest: Manifest | None) -> Iterator[tuple[str, tuple[Shard, ...]]]:
    """The shards of each work unit; of a stream that says of none, all together."""
    parts = manifest.parts if manifest and manifest.index_hash == index.hash else []
    if sum(part.shards for part in parts) != len(index.shards):
        yield "", index.shards
        return
    ends = accumulate((part.shards for part in parts), initial=0)
    for part, (start, stop) in zip(parts, pairwise(ends), strict=True):
        yield part.key, index.shards[start:stop]


def _cached(name: str) -> Mark | None:
    with suppress(OSError):
        return parse((cache_folder() / "marks" / name).read_bytes())
    return None


def _keep(name: str, content: bytes) -> None:
    with suppress(Unreachable):  # all that is lost is a reading
        keep_in_cache(cache_folder() / "marks" / name, content)
