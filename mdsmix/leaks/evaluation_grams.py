"""The samples of evaluations (items), their 13-grams, and how a training stream's positions are held against them.

All items are held: their ids, and a 64-bit hash of each of their grams. A position of a training stream is looked up three times, each
time only where the time before said yes: in a table of flags by the upper bits of its hash, there by the lower ones, and in the sorted
hashes. What is left is compared token by token, so
nothing is found that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
"Flags of the table for each gram: a position that is none of them passes one in 32 times."
MOST_BITS = 26
"Of the table's numbers: two million grams want 64 MiB."
BLOCK = 1 << 15
"Positions that are hashed at once: their hashes stay in the second cache."
MOST_TOKENS = 1 << 24
"Tokens of an evaluation: 17 million take 2.5 GB with all their grams."
Int = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Flags = NDArray[np.bool_]
_FACTOR, _MIX = 0x9E3779B97F4A7C15, np.uint64(0xBF58476D1CE4E5B9)
_JOINED = ((1, 1), (2, 1), (3, 3), (6, 6), (12, 1))
"How 13 tokens are reached from one: (tokens before, tokens that are added)."


class EvaluationSample(NamedTuple):
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
        at, item = self._whole()
        found, first, gram = np.unique(
            hashes(self.rows.values)[at], return_index=True, return_inverse=True
        )
        gram, item = np.divmod(np.unique(gram * len(self.rows) + item), len(self.rows))
        self.grams = np.bincount(item, minlength=len(self.rows))
        "int64 [items]: the different grams of each."
        times = np.bincount(gram, minlength=len(found))
        is_usable = times <= (self.common or len(self.rows))
        self.left_out = int((~is_usable).sum())
        "Grams that stand in too many items."
        self.hashes, self.at = found[is_usable], at[first[is_usable]]
        "Of each gram that is looked for: its hash, ascending, and a place in the rows' values where it stands."
        items = item[is_usable[gram]]
        self.holders = Ragged.from_lengths(items, times[is_usable])
        "The items that each gram stands in."
        self._bits = min((SPARE * len(found) + 1).bit_length(), MOST_BITS)
        self._flags = np.zeros(1 << self._bits, bool)
        for spots in self._spots(self.hashes):
            self._flags[spots] = True

    def _spots(self, hashes: Hashes) -> tuple[Int, Int]:
        """Two places in the table, by the upper and by the lower bits."""
        upper, lower = hashes >> np.uint64(64 - self._bits), hashes & np.uint64(len(self._flags) - 1)  # fmt: skip
        return upper.view(np.int64), lower.view(np.int64)

    def _whole(self) -> tuple[Int, Int]:
        """Place in the rows' values, and item, of every gram that ends in its item and holds no image."""
        ids, offsets = self.rows.values, self.rows.offsets
        at = np.arange(max(len(ids) - LENGTH + 1, 0))
        item = np.searchsorted(offsets, at, "right") - 1
        images = np.append(0, np.cumsum(np.isin(ids, self.images)))
        whole = (at + LENGTH <= offsets[item + 1]) & (images[at] == images[at + LENGTH])
        return at[whole], item[whole]

    def count(self, flags: Flags) -> Int:
        """int64 [items]: how many grams of each are flagged."""
        flagged = self.holders.values[np.repeat(flags, self.holders.lengths)]
        return np.bincount(flagged, minlength=len(self.rows))

    def find(self, rows: Ragged) -> tuple[Int, Int]:
        """(gram, row): the grams of items that stand in the rows, by their numbers, each once a row."""
        at, gram = self._candidates(rows.values)
        row = np.searchsorted(rows.offsets, at, "right") - 1
        inside = at + LENGTH <= rows.offsets[row + 1]
        at, row, gram = at[inside], row[inside], gram[inside]
        offsets = np.arange(LENGTH)
        mine, its = rows.values[at[:, None] + offsets], self.rows.values[self.at[gram][:, None] + offsets]  # fmt: skip
        same = (mine == its).all(axis=1)
        row, gram = np.divmod(np.unique(row[same] * len(self.at) + gram[same]), max(len(self.at), 1))  # fmt: skip
        return gram, row

    def _candidates(self, ids: NDArray[Any]) -> tuple[Int, Int]:
        """Where a gram may begin, and the number of the one that has this hash."""
        found = [np.empty((2, 0), np.int64)]
        for start in range(0, len(ids) - LENGTH + 1, BLOCK):
            block = hashes(ids[start : start + BLOCK + LENGTH - 1])
            upper, lower = self._spots(block)
            at = np.flatnonzero(self._flags[upper])
            at = at[self._flags[lower[at]]]
            gram = np.searchsorted(self.hashes, block[at])
            known = self.hashes.take(gram, mode="clip") == block[at]
            found.append(np.stack([at + start, gram])[:, known])
        at, gram = np.concatenate(found, axis=1)
        return at, gram


def hashes(ids: NDArray[Any]) -> Hashes:
    """uint64 [n - 12]: a hash of the gram at each position, from those of its halves, whatever integers they are stored as."""
    one = whole = ids.astype(np.uint64)
    for size, more in _JOINED:
        behind = one if more == 1 else whole
        whole = whole[:-more] * np.uint64(pow(_FACTOR, more, 1 << 64)) + behind[size:]
    whole ^= whole >> np.uint64(32)
    whole *= _MIX
    return whole


def rows_of(shard: Shard, tokens: Tokens) -> Ragged:
    """The tokens of each sample of a shard; of packed rows, of each of their documents."""
    if not is_packed(shard):
        return tokens.ids
    return Ragged.from_lengths(tokens.ids.values, tokens.responses)


def is_packed(shard: Shard) -> bool:
    return layout_of(shard.columns) == PACKED


def load(evaluations: Sequence[StreamInMix], common: int) -> Items:
    """All samples of the evaluations; of packed rows each document."""
    parts, places, images = [Ragged.of([], np.int64)], list[EvaluationSample](), set[int]()
    for number, stream in enumerate(evaluations):
        if manifest := stream.trusted_manifest:
            if (tokens := manifest.totals.tokens) > MOST_TOKENS:
                raise RecipeError(
                    f"the evaluation {stream.name} has {tokens:,} tokens, and its grams must fit in memory: name at most {MOST_TOKENS:,}, or a "
                    "sample of it (`sample:` in its recipe)."
                )
            images.update(manifest.encoding.image_ids)
        first = 0
        for shard in stream.shards:
            if held := stored_tokens(stream.folder, shard):
                rows = rows_of(shard, held)
                parts.append(Ragged(rows.values.astype(np.int64), rows.offsets))
                places += _places(number, first, shard, held)
            first += shard.samples
    return Items(Ragged.concat(parts), places, common, tuple(images))


def _places(stream: int, first: int, shard: Shard, tokens: Tokens) -> Iterator[EvaluationSample]:
    for sample, count in enumerate(np.diff(tokens.turns).tolist(), first):
        for document in range(count) if is_packed(shard) else [None]:
            yield EvaluationSample(stream, sample, document)


def stored_tokens(folder: Location, shard: Shard) -> Tokens | None:
    """The token ids of a shard, None where it has none; RecipeError where nothing says which of its columns are ids."""
    if not token_columns(shard):
        raise RecipeError(
            f"{folder / shard.stored.basename} holds no token ids of a stated dtype (columns {', '.join(sorted(shard.columns))}), so "
            "nothing can be looked for in it; leave that stream out, or convert it with `mdsmix convert`."
        )
    return tokens_of(shard, read_whole(folder, shard))
