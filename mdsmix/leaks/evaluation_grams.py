"""The samples of evaluations (called items), their 13-grams (runs of 13 tokens), and the search for
these grams in the rows of a training stream.

All items are in memory: their ids, and a 64-bit hash of each gram. A training row is hashed at each
position, and the upper bits of the hash are looked up in a table of flags. Only hashes whose flag
is set (one in 32 by chance) are looked up in the sorted hashes of grams. Two grams with the same
hash count as one: in 10^12 positions against 10^6 grams, one search in 18 finds a gram by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import RecipeError
from mdsmix.mix.streams.mix import StreamInMix
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_samples import read_all_samples
from mdsmix.shards.token_ids import Tokens, decode_tokens, find_token_columns
from mdsmix.storage import Location

LENGTH = 13
"Tokens of a gram. GPT-3 and most later audits took 13 words."
SPARE = 32
"Flags in the table for each gram: of the positions without a gram, 1 in 32 has its flag set."
MOST_BITS = 26
"The most bits of an index into the table: 2^26 flags take 64 MiB, enough for 2 million grams."
BLOCK = 1 << 15
"Positions that are hashed at once, so that their hashes stay in the processor's second cache."
MOST_TOKENS = 1 << 24
"The most tokens of all evaluations together: 17 million take 2.5 GB with their grams."
Int = NDArray[np.int64]
_FACTOR = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_JOINED = ((1, 1), (2, 1), (3, 3), (6, 6), (12, 1))
"The steps from a hash of 1 token to a hash of 13: (tokens so far, tokens that are added)."


class GramPlaces(NamedTuple):
    """Where grams (runs of 13 tokens) begin in rows of token ids, one entry for each gram."""

    positions: Int
    "int64 [grams]: the position in the joined ids of all rows."
    rows: Int
    "int64 [grams]: the number of the row."


@dataclass
class EvalSamples:
    """The samples of all evaluations (called items), and all different grams (runs of 13 tokens) in
    them. The number of a gram is its place in the sorted hashes of the grams.
    """

    rows: Ragged
    "The token ids of each item."
    firsts: Sequence[int]
    "For each evaluation, the number of its first item."
    common: int
    "Grams in more items than this are left out; 0 leaves none out."
    images: tuple[int, ...] = ()
    """Token ids in the place of an image. A run of tokens with one of these ids is not a gram: it
    would be equal whatever the image shows.
    """

    def __post_init__(self) -> None:
        """List the different grams (runs of 13 tokens) of all items (evaluation samples). Also make
        a table with a flag at the upper bits of each gram's hash, to rule out most other hashes
        fast.
        """
        # Number the different grams by their hashes.
        grams = self._list_grams()
        hashes_of_grams = hash_grams(self.rows.values)[grams.positions]
        hashes, gram = np.unique(hashes_of_grams, return_inverse=True)
        # Count a gram once in an item: join each pair (gram, item) to one number, and drop repeated
        # numbers. With 10 items, gram 3 in item 7 is 37.
        pairs = np.unique(gram * len(self.rows) + grams.rows)
        gram, item = np.divmod(pairs, len(self.rows))
        # Leave out grams in too many items.
        times = np.bincount(gram, minlength=len(hashes))
        is_usable = times <= (self.common or len(self.rows))
        self.shorts = len(self.rows) - len(np.unique(item))
        "Items without a gram."
        self.left_out = int((~is_usable).sum())
        "Grams that are in too many items."
        self.hashes = hashes[is_usable]
        "uint64 [grams], ascending: the hashes of the grams that are looked for."
        self.holders = Ragged.from_lengths(item[is_usable[gram]], times[is_usable])
        "One row for each gram: the numbers of the items that contain it."
        # Set the flag of each gram: the upper bits of its hash are its index in the table.
        bits = min((SPARE * len(hashes) + 1).bit_length(), MOST_BITS)
        self._shift = np.uint64(64 - bits)
        self._flags = np.zeros(1 << bits, bool)
        self._flags[self.hashes >> self._shift] = True

    def _list_grams(self) -> GramPlaces:
        """List all grams (runs of 13 tokens) of all items (evaluation samples). A gram is within
        one item and contains no image.
        """
        ids = self.rows.values
        positions = np.arange(max(len(ids) - LENGTH + 1, 0))
        # `images_before[i]` is the number of images before position i. A gram contains none if the
        # number is the same where the gram begins and where it ends.
        images_before = np.append(0, np.cumsum(np.isin(ids, self.images)))
        has_no_image = images_before[positions] == images_before[positions + LENGTH]
        positions = positions[has_no_image]
        item, is_within = _find_rows(self.rows, positions)
        return GramPlaces(positions[is_within], item[is_within])

    def count(self, flags: NDArray[np.bool_]) -> Int:
        """Count the chosen grams (runs of 13 tokens) of each item (evaluation sample): int64
        [items].

        Args:
            flags: bool [grams]: whether each gram is chosen, such as those that training streams
                contain.
        """
        # The item of each flagged gram; an item with two flagged grams is listed twice.
        flagged = self.holders.values[np.repeat(flags, self.holders.lengths)]
        return np.bincount(flagged, minlength=len(self.rows))

    def find(self, rows: Ragged) -> Int:
        """Find the grams (runs of 13 tokens) of evaluation samples in the rows of a training
        stream. Return int64 [2, finds]: the number of each gram found, and the number of the row
        that contains it.

        The result is [[5, 8], [0, 2]] if row 0 contains gram 5 and row 2 contains gram 8. A gram
        counts once in a row.
        """
        starts = range(0, len(rows.values), BLOCK)
        blocks = [self._find_in_block(rows.values, start) for start in starts]
        positions, gram = np.concatenate([np.empty((2, 0), np.int64), *blocks], axis=1)
        row, is_within = _find_rows(rows, positions)
        # Count a gram once in a row: join each pair (row, gram) to one number, and drop repeated
        # numbers. With 10 grams, gram 3 in row 7 is 73.
        grams = max(len(self.hashes), 1)
        pairs = np.unique(row[is_within] * grams + gram[is_within])
        row, gram = np.divmod(pairs, grams)
        return np.stack([gram, row])

    def _find_in_block(self, ids: NDArray[Any], start: int) -> Int:
        """Find the grams (runs of 13 tokens) that begin in one block of BLOCK positions. Return
        int64 [2, finds]: the position in `ids` and the number of each gram.

        Args:
            ids: the ids of all blocks.
            start: the position in `ids` where the block begins.
        """
        block = hash_grams(ids[start : start + BLOCK + LENGTH - 1])
        flagged = np.flatnonzero(self._flags[block >> self._shift])
        # Where the hash is, or would be, in the sorted hashes.
        gram = np.searchsorted(self.hashes, block[flagged])
        is_gram = self.hashes.take(gram, mode="clip") == block[flagged]
        finds: Int = np.stack([flagged + start, gram])[:, is_gram]
        return finds


def hash_grams(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash the 13 ids that begin at each position: uint64 [n - 12] from n ids of any dtype.

    The hash of a run is computed from the hashes of two shorter runs that follow each other.
    """
    single = ids.astype(np.uint64)
    joined = single
    # joined[i] is the hash of the `size` ids from i on. Add the hash of the `added` ids after them.
    for size, added in _JOINED:
        following = single if added == 1 else joined
        joined = joined[:-added] * np.uint64(pow(_FACTOR, added, 1 << 64)) + following[size:]
    # Mix the bits, so that the upper bits, which index the table of flags, depend on all ids.
    joined ^= joined >> np.uint64(32)
    joined *= _MIX
    return joined


class RowsOfPositions(NamedTuple):
    """The rows that contain some positions in the joined ids of all rows."""

    rows: Int
    "int64 [positions]: the number of the row."
    is_within: NDArray[np.bool_]
    "bool [positions]: whether a gram (run of 13 tokens) that begins there ends in the same row."


def _find_rows(rows: Ragged, positions: Int) -> RowsOfPositions:
    """Find the row of each position, and whether a gram (run of 13 tokens) that begins there ends
    in the same row.

    Args:
        rows: token ids.
        positions: indexes into the ids of all rows joined.
    """
    row = np.searchsorted(rows.offsets, positions, "right") - 1
    return RowsOfPositions(row, positions + LENGTH <= rows.offsets[row + 1])


def load_eval_samples(evaluations: Sequence[StreamInMix], common: int) -> EvalSamples:
    """Load all samples of the evaluations, and list their grams (runs of 13 tokens).

    Raises RecipeError if the evaluations have more than MOST_TOKENS tokens.

    Args:
        common: grams in more evaluation samples than this are left out; 0 leaves none out.
    """
    rows_of_shards = [Ragged.from_rows([], np.int64)]
    firsts = list[int]()
    images = set[int]()
    items = 0
    tokens = 0
    for stream in evaluations:
        firsts.append(items)
        manifest = stream.trusted_manifest
        if manifest:
            images.update(manifest.encoding.image_ids)
        for shard in stream.shards:
            stored = read_stored_tokens(stream.folder, shard)
            if stored:
                rows = Ragged(stored.ids.values.astype(np.int64), stored.ids.offsets)
                rows_of_shards.append(rows)
                items += len(rows)
                tokens += len(rows.values)
            if tokens > MOST_TOKENS:
                raise RecipeError(
                    f"the evaluations up to {stream.name} have more than {MOST_TOKENS:,} tokens, "
                    "and their grams (runs of 13 tokens) must fit in memory: name fewer "
                    "evaluations, or convert only a sample of their records (`sample:` in the "
                    "recipe)."
                )
    return EvalSamples(Ragged.concat(rows_of_shards), firsts, common, tuple(images))


def read_stored_tokens(folder: Location, shard: Shard) -> Tokens | None:
    """Read the token ids of all rows of a shard. Return None if the stored columns give no ids.

    Raises RecipeError if the shard has no column that could contain ids.
    """
    if not find_token_columns(shard):
        raise RecipeError(
            f"the shard {folder / shard.stored.basename} has no token ids of a known dtype (its "
            f"columns are {', '.join(sorted(shard.columns))}), so its stream cannot be searched: "
            "leave the stream out, or convert it with `mdsmix convert`."
        )
    return decode_tokens(shard, read_all_samples(folder, shard))
