"""The samples of evaluations (items), their 13-grams, and the search of a training stream's rows
for them.

Memory holds all items: their ids, and a 64-bit hash of each gram. The upper bits of a training
position's hash are looked up in a table of flags, and the positions that pass (one in 32 by chance)
in the sorted hashes. Two grams with one hash count as one: in 10^12 positions against 10^6 grams,
one search in 18 finds a gram by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import RecipeError
from mdsmix.mix.streams.mix import StreamInMix
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_samples import read_whole
from mdsmix.shards.token_ids import Tokens, token_columns, tokens_of
from mdsmix.storage import Location

LENGTH = 13
"Tokens of a gram. GPT-3 and most later audits took 13 words."
SPARE = 32
"Flags in the table for each gram, so that 1 of 32 positions that are no gram passes."
MOST_BITS = 26
"The most bits of a number in the table: 2^26 flags take 64 MiB, enough for two million grams."
BLOCK = 1 << 15
"Positions that are hashed at once, so that their hashes stay in the processor's second cache."
MOST_TOKENS = 1 << 24
"The most tokens of all evaluations together: 17 million take 2.5 GB with their grams."
Int = NDArray[np.int64]
_FACTOR, _MIX = 0x9E3779B97F4A7C15, np.uint64(0xBF58476D1CE4E5B9)
_JOINED = ((1, 1), (2, 1), (3, 3), (6, 6), (12, 1))
"The steps from a hash of 1 token to a hash of 13: (tokens so far, tokens that are added)."


@dataclass
class EvalSamples:
    """All items, one row each, and their distinct grams, sorted by hash."""

    rows: Ragged
    firsts: Sequence[int]
    "For each evaluation, the number of its first item."
    common: int
    "Grams in more items than this are left out; 0 leaves none out."
    images: tuple[int, ...] = ()
    """Token ids that stand for an image. Runs with such an id are not grams: they would be equal
    whatever the image shows.
    """

    def __post_init__(self) -> None:
        at, item = self._whole()
        found, gram = np.unique(hash_grams(self.rows.values)[at], return_inverse=True)
        gram, item = np.divmod(np.unique(gram * len(self.rows) + item), len(self.rows))
        times = np.bincount(gram, minlength=len(found))
        is_usable = times <= (self.common or len(self.rows))
        self.shorts = len(self.rows) - len(np.unique(item))
        "Items without a gram."
        self.left_out = int((~is_usable).sum())
        "Grams that stand in too many items."
        self.hashes = found[is_usable]
        "uint64 [grams], ascending: the hashes of the grams that are looked for."
        self.holders = Ragged.from_lengths(item[is_usable[gram]], times[is_usable])
        "The items that each gram stands in."
        bits = min((SPARE * len(found) + 1).bit_length(), MOST_BITS)
        self._shift, self._flags = np.uint64(64 - bits), np.zeros(1 << bits, bool)
        self._flags[self.hashes >> self._shift] = True

    def _whole(self) -> tuple[Int, Int]:
        """The place of every gram in the rows' values, and its item. A gram lies within one item
        and holds no image.
        """
        ids = self.rows.values
        at = np.arange(max(len(ids) - LENGTH + 1, 0))
        item, is_whole = _rows_of(self.rows, at)
        images = np.append(0, np.cumsum(np.isin(ids, self.images)))
        is_whole &= images[at] == images[at + LENGTH]
        return at[is_whole], item[is_whole]

    def count(self, flags: NDArray[np.bool_]) -> Int:
        """int64 [items]: the number of each item's grams that are flagged. `flags`: bool
        [grams].
        """
        flagged = self.holders.values[np.repeat(flags, self.holders.lengths)]
        return np.bincount(flagged, minlength=len(self.rows))

    def find(self, rows: Ragged) -> Int:
        """int64 [2, finds]: the numbers of grams that stand in the rows, and of their rows. A gram
        counts once in a row.
        """
        parts = (self._candidates(rows.values, at) for at in range(0, len(rows.values), BLOCK))
        at, gram = np.concatenate([np.empty((2, 0), np.int64), *parts], axis=1)
        row, is_whole = _rows_of(rows, at)
        grams = max(len(self.hashes), 1)
        row, gram = np.divmod(np.unique(row[is_whole] * grams + gram[is_whole]), grams)
        return np.stack([gram, row])

    def _candidates(self, ids: NDArray[Any], start: int) -> Int:
        """int64 [2, finds]: positions in the block from `start` on whose hash is a gram's, and the
        number of that gram.
        """
        block = hash_grams(ids[start : start + BLOCK + LENGTH - 1])
        at = np.flatnonzero(self._flags[block >> self._shift])
        gram = np.searchsorted(self.hashes, block[at])
        known = self.hashes.take(gram, mode="clip") == block[at]
        found: Int = np.stack([at + start, gram])[:, known]
        return found


def hash_grams(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """uint64 [n - 12]: a hash of the 13 ids at each position, built from hashes of its parts. The
    dtype of the ids does not change it.
    """
    one = whole = ids.astype(np.uint64)
    for size, more in _JOINED:
        behind = one if more == 1 else whole
        whole = whole[:-more] * np.uint64(pow(_FACTOR, more, 1 << 64)) + behind[size:]
    whole ^= whole >> np.uint64(32)
    whole *= _MIX
    return whole


def _rows_of(rows: Ragged, at: Int) -> tuple[Int, NDArray[np.bool_]]:
    """The row of each place in the rows' values, and whether a gram that begins there ends in the
    same row.
    """
    row = np.searchsorted(rows.offsets, at, "right") - 1
    return row, at + LENGTH <= rows.offsets[row + 1]


def load_eval_samples(evaluations: Sequence[StreamInMix], common: int) -> EvalSamples:
    """All samples of the evaluations; RecipeError where they have more than MOST_TOKENS tokens."""
    parts, firsts, images = [Ragged.of([], np.int64)], list[int](), set[int]()
    for stream in evaluations:
        firsts.append(sum(map(len, parts)))
        if manifest := stream.trusted_manifest:
            images.update(manifest.encoding.image_ids)
        for shard in stream.shards:
            if tokens := read_stored_tokens(stream.folder, shard):
                parts.append(Ragged(tokens.ids.values.astype(np.int64), tokens.ids.offsets))
            if sum(len(part.values) for part in parts) > MOST_TOKENS:
                raise RecipeError(
                    f"the evaluations down to {stream.name} have more than {MOST_TOKENS:,} tokens, and their grams must fit in memory: name "
                    "fewer, or a sample of them (`sample:` in the recipe)."
                )
    return EvalSamples(Ragged.concat(parts), firsts, common, tuple(images))


def read_stored_tokens(folder: Location, shard: Shard) -> Tokens | None:
    """The token ids of a shard, None where it has none; RecipeError where nothing says which of its
    columns are ids.
    """
    if not token_columns(shard):
        raise RecipeError(
            f"{folder / shard.stored.basename} holds no token ids of a stated dtype (columns {', '.join(sorted(shard.columns))}), so "
            "nothing can be looked for in it; leave that stream out, or convert it with `mdsmix convert`."
        )
    return tokens_of(shard, read_whole(folder, shard))
