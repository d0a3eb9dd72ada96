"""The samples of evaluations (items), their 13-grams, and how a training stream's positions are held against them.

All items are held: their ids, and 16 bytes for each of their grams. A position of a training stream is looked up three times, each time
only where the time before said yes: in a table of flags by 32 bits that are worked out for a block at once, in another by the gram's
64-bit hash, and in the sorted hashes. What is left is compared token by token, so nothing is found that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import RecipeError
from mdsmix.mix.streams import StreamInMix
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_samples import read_whole
from mdsmix.shards.token_ids import PACKED, Tokens, layout_of, token_columns, tokens_of
from mdsmix.storage import Location

LENGTH = 13
"Tokens of a gram: the length that GPT-3 and most audits after it took, in words."
SPARE = 32
"Flags of a table for each gram: a position that is none of them passes one in 32 times."
LEAST_BITS, MOST_BITS = 16, 26
"Bits of a table's numbers: 64 KiB stay in the first cache, two million grams want 64 MiB."
BLOCK = 1 << 15
MOST_TOKENS = 1 << 24
"Tokens of an evaluation: 17 million take 2.5 GB with all their grams."
Int = NDArray[np.int64]
Hashes = NDArray[np.uint64]
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HASH_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
"As SplitMix64 ends: each bit of the sum shapes each bit of the hash."
_FACTOR = 0x9E3779B1
_POWERS = tuple(np.uint32(pow(_FACTOR, n, 1 << 32)) for n in range(LENGTH))
_MIX = np.uint32(0x85EBCA6B)


@dataclass(frozen=True, slots=True)
class EvaluationSample:
    """Where an item stands."""

    stream: int
    "Which of the evaluations."
    sample: int
    document: int | None = None
    "Number of the document in a packed row; None of other rows."


@dataclass
class Items:
    """All items, one row each, and their different grams, sorted by their hashes."""

    rows: Ragged
    places: Sequence[EvaluationSample]
    common: int
    "A gram that stands in more items than this is left out; 0: none is."
    images: tuple[int, ...] = ()
    "Ids that stand for an image. A gram with one is none: it would be equal whatever is to be seen."

    def __post_init__(self) -> None:
        found, at, item = self._every_gram()
        starts = np.flatnonzero(np.append(True, found[1:] != found[:-1])[: len(found)])
        times = np.diff(np.append(starts, len(found)))
        is_usable = times <= (self.common or len(self.rows))
        self.left_out = int((~is_usable).sum())
        "Grams that stand in too many items."
        self.too_short = len(self.rows) - len(np.unique(item))
        "Items of fewer tokens than a gram between their images."
        self.hashes, self.at = found[starts[is_usable]], at[starts[is_usable]]
        "Of each gram that is looked for: its hash, ascending, and a place in the rows' values where it stands."
        self.pairs = np.repeat(np.arange(len(self.hashes)), times[is_usable]), item[np.repeat(is_usable, times)]  # fmt: skip
        "(gram, item): every gram that is looked for, by its number, with every item that it stands in."
        self.grams = self.count(np.ones(len(self.hashes), bool))
        "int64 [items]: the different grams of each that are looked for."
        wanted = (max(len(self.hashes), 1) * SPARE - 1).bit_length()
        self._bits = min(max(wanted, LEAST_BITS), MOST_BITS)

    def _every_gram(self) -> tuple[Hashes, Int, Int]:
        """Hash, place in the rows' values, and item of every gram, by hash and item; each gram of an item once."""
        ids, offsets = self.rows.values, self.rows.offsets
        at = np.arange(max(len(ids) - LENGTH + 1, 0))
        item = np.searchsorted(offsets, at, "right") - 1
        images = np.append(0, np.cumsum(np.isin(ids, self.images)))
        whole = (at + LENGTH <= offsets[item + 1]) & (images[at] == images[at + LENGTH])
        at, item = at[whole], item[whole]
        found = hashes(ids, at)
        order = np.lexsort((item, found))
        found, at, item = found[order], at[order], item[order]
        is_new = np.append(True, (found[1:] != found[:-1]) | (item[1:] != item[:-1]))[: len(found)]
        return found[is_new], at[is_new], item[is_new]

    def count(self, flags: NDArray[np.bool_]) -> Int:
        """int64 [items]: how many grams of each are flagged."""
        gram, item = self.pairs
        return np.bincount(item[flags[gram]], minlength=len(self.rows))

    @cached_property
    def tables(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Flags by the 32 bits of a gram, and by its 64-bit hash."""
        first, second = np.zeros((2, 1 << self._bits), bool)
        for start in range(0, len(self.at), BLOCK):
            at = self.at[start : start + BLOCK]
            ids = self.rows.values[at[:, None] + np.arange(LENGTH)]
            first[_rolled(np.ascontiguousarray(ids).reshape(-1))[::LENGTH] >> self._shift] = True
        second[self.hashes >> np.uint64(64 - self._bits)] = True
        return first, second

    @property
    def _shift(self) -> np.uint32:
        return np.uint32(32 - self._bits)

    def find(self, rows: Ragged) -> tuple[Int, Int]:
        """(gram, row): the grams of items that stand in the rows, by their numbers, each once a row."""
        at = self._candidates(rows.values)
        row = np.searchsorted(rows.offsets, at, "right") - 1
        inside = at + LENGTH <= rows.offsets[row + 1]
        at, row = at[inside], row[inside]
        found = hashes(rows.values, at)
        near = self.tables[1][found >> np.uint64(64 - self._bits)]
        at, row, found = at[near], row[near], found[near]
        gram = np.minimum(np.searchsorted(self.hashes, found), len(self.hashes) - 1)
        same = self.hashes[gram] == found
        at, row, gram = at[same], row[same], gram[same]
        offsets = np.arange(LENGTH)
        mine, its = rows.values[at[:, None] + offsets], self.rows.values[self.at[gram][:, None] + offsets]  # fmt: skip
        same = (mine == its).all(axis=1)
        each = np.unique(row[same] * len(self.hashes) + gram[same])
        return each % max(len(self.hashes), 1), each // max(len(self.hashes), 1)

    def _candidates(self, ids: NDArray[Any]) -> Int:
        """Where a gram may begin that the first table knows."""
        flags, found = self.tables[0], [np.empty(0, np.int64)]
        for start in range(0, len(ids) - LENGTH + 1, BLOCK):
            rolled = _rolled(ids[start : start + BLOCK + LENGTH - 1])
            np.right_shift(rolled, self._shift, out=rolled)
            found.append(np.flatnonzero(flags[rolled]) + start)
        return np.concatenate(found)


def _rolled(ids: NDArray[Any]) -> NDArray[np.uint32]:
    """uint32 [n - 12]: a hash of the gram at each position, from those of halves: 1, 2, 4, 8, then 12 and 13 tokens."""
    one = ids.astype(np.uint32)
    two = one[:-1] * _POWERS[1] + one[1:]
    four = two[:-2] * _POWERS[2] + two[2:]
    eight = four[:-4] * _POWERS[4] + four[4:]
    twelve = eight[:-4] * _POWERS[4] + four[8:]
    whole = twelve[:-1] * _POWERS[1] + one[12:]
    whole ^= whole >> np.uint32(15)
    whole *= _MIX
    return np.asarray(whole)


def rows_of(shard: Shard, tokens: Tokens) -> Ragged:
    """The tokens of each sample of a shard; of packed rows, of each of their documents."""
    if layout_of(shard.columns) != PACKED:
        return tokens.ids
    return Ragged.from_lengths(tokens.ids.values, tokens.responses)


def hashes(ids: NDArray[Any], at: Int) -> Hashes:
    """uint64: a hash of the gram from each place on, whatever integers they are stored as."""
    value = np.ones(len(at), np.uint64)
    for offset in range(LENGTH):
        value *= _HASH_FACTOR
        value += ids[at + offset].astype(np.uint64)
    for shift, factor in _HASH_MIX:
        value ^= value >> shift
        value *= factor
    return value ^ (value >> np.uint64(32))


def load(evaluations: Sequence[StreamInMix], common: int) -> Items:
    """All samples of the evaluations; of packed rows each document."""
    parts, places, images = [Ragged(np.empty(0, np.int64), np.zeros(1, np.int64))], list[EvaluationSample](), set[int]()  # fmt: skip
    for number, stream in enumerate(evaluations):
        if manifest := stream.trusted_manifest:
            _refuse_large(stream.name, manifest.totals.tokens)
            images.update(manifest.encoding.image_ids)
        first = 0
        for shard in stream.shards:
            if tokens := stored_tokens(stream.folder, shard):
                rows = rows_of(shard, tokens)
                parts.append(Ragged(rows.values.astype(np.int64), rows.offsets))
                counts = np.diff(tokens.turns).tolist()
                is_packed = layout_of(shard.columns) == PACKED
                places += [
                    EvaluationSample(number, first + sample, document if is_packed else None)
                    for sample, count in enumerate(counts)
                    for document in range(count if is_packed else 1)
                ]
            first += shard.samples
    return Items(Ragged.concat(parts), places, common, tuple(images))


def _refuse_large(name: str, tokens: int) -> None:
    if tokens > MOST_TOKENS:
        raise RecipeError(
            f"the evaluation {name} has {tokens:,} tokens, and its grams must fit in memory: name at most {MOST_TOKENS:,}, or a sample of it "
            "(`sample:` in its recipe)."
        )


def stored_tokens(folder: Location, shard: Shard) -> Tokens | None:
    """The token ids of a shard, None where it has none; RecipeError where nothing says which of its columns are ids."""
    if not token_columns(shard):
        raise RecipeError(
            f"{folder / shard.stored.basename} holds no token ids of a stated dtype (columns {', '.join(sorted(shard.columns))}), so "
            "nothing can be looked for in it; leave that stream out, or convert it with `mdsmix convert`."
        )
    return tokens_of(shard, read_whole(folder, shard))
