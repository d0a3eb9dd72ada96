"""A decoded sample -> its turns, whatever columns it lies in.

Columns are looked for in the order of LLM-Foundry's loaders. That also lets one loader read every
kind of stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.errors import MixRefused
from mdsmix.ragged import Ragged
from mdsmix.shards.codecs import find_codec
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_samples import Sample, decode_arrays, split_columns

STARTS = "starts"
PACKED_COLUMNS = ("input_ids", STARTS)
"""Columns of a row of several documents. A third column, `loss_mask`, says which tokens are
trained; else all but each document's first are.
"""
IMAGE_COLUMNS = ("images", "sizes")
"""Columns of a conversation with images, beside its turns: the images' bytes, and the height and
width of each.
"""
SIDES = ("input_ids", "labels")
IGNORED_LABEL = -100
"The label that gives no loss, in torch, in LLM-Foundry and in Hugging Face's collators."
Ids = NDArray[np.int64]


class Turn(NamedTuple):
    """int64 ids of one turn; plain tokens are one response without a prompt."""

    prompt: Ids
    response: Ids


def find_id_columns(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """The key of LAYOUTS that the columns of a sample or of a shard make; empty where they hold no
    ids.
    """
    return next((names for names in LAYOUTS if all(map(columns.__contains__, names))), ())


def has_images(columns: Mapping[str, Any]) -> bool:
    """Whether the columns (of a sample or of a shard) are those of a stream of images, whose tokens
    alone mean little.
    """
    return all(map(columns.__contains__, IMAGE_COLUMNS))


def decode_turns(sample: Sample, dtype: str = "int64") -> list[Turn]:
    """The turns of a sample; `dtype` is that of columns of plain bytes. Each document of a packed
    row counts as a response. MixRefused where it holds something else than ids.
    """
    if layout := find_id_columns(sample):
        return LAYOUTS[layout](sample, dtype)
    raise MixRefused(
        f"its columns {', '.join(sorted(sample))} hold no tokens (tokens, input_ids and labels, or turns), and the "
        "loader does not tokenize; convert the data with `mdsmix convert` first."
    )


def _stored_turns(sample: Sample, _: str) -> list[Turn]:
    try:
        return [
            Turn(*(np.asarray(turn[side], np.int64) for side in SIDES)) for turn in sample["turns"]
        ]
    except (KeyError, TypeError):
        raise MixRefused("a turn lacks input_ids or labels; convert the data again.") from None


NO_IDS: Ids = np.empty(0, np.int64)
LAYOUTS: dict[tuple[str, ...], Callable[[Sample, str], list[Turn]]] = {
    ("turns",): _stored_turns,
    SIDES: lambda sample, dtype: [Turn(*(decode_ids(sample[side], dtype) for side in SIDES))],
    ("tokens",): lambda sample, dtype: [Turn(NO_IDS, decode_ids(sample["tokens"], dtype))],
    PACKED_COLUMNS: lambda sample, _: [Turn(NO_IDS, ids) for ids, _ in split_documents(sample)],
}
"""Columns that hold a sample's ids, in the order in which a loader looks for them -> function
(sample, dtype of plain bytes) -> turns.
"""


def decode_packed_row(sample: Sample) -> tuple[Ids, NDArray[np.bool_], Ids]:
    """The ids of a packed row, which of them are trained, and where its documents begin; MixRefused
    where its columns contradict each other. The first token of a document is never trained, since
    nothing predicts it.
    """
    ids, starts = (decode_ids(sample[name], "int64") for name in PACKED_COLUMNS)
    trained = decode_ids(sample["loss_mask"], "int64") > 0 if "loss_mask" in sample else ids >= 0
    edges = np.append(starts, len(ids))
    if len(trained) != len(ids) or edges[0] or (np.diff(edges) < 1).any():
        raise MixRefused(
            "where its documents begin, or what of them is trained, contradicts its tokens; convert the data again."
        )
    trained[starts] = False
    return ids, trained, starts


def split_documents(sample: Sample) -> list[tuple[Ids, NDArray[np.bool_]]]:
    """The ids of each document of a packed row, and which of them are trained; MixRefused where its
    columns contradict each other.
    """
    ids, trained, starts = decode_packed_row(sample)
    return list(zip(np.split(ids, starts[1:]), np.split(trained, starts[1:]), strict=True))


def decode_ids(column: Any, dtype: str) -> Ids:
    """int64 ids of a column of a sample; MixRefused where it holds something else."""
    if isinstance(column, bytes):
        column = np.frombuffer(column, dtype)
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "iu":
        raise MixRefused(
            f"a token column holds {type(column).__name__}, not bytes or a row of integers; convert the data again."
        )
    return column.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of each sample, and where its prompts and responses end."""

    ids: Ragged
    prompts: NDArray[np.int64]
    "int64 [turns]: tokens of each prompt; plain rows are one turn without a prompt."
    responses: NDArray[np.int64]
    turns: NDArray[np.int64]
    """int64 [n + 1]: sample i is the turns `turns[i]` to `turns[i + 1]`; of a packed row each
    document is a turn without a prompt.
    """
    trained: NDArray[np.int64] | None = None
    "int64 [n]: the number of trained tokens of each packed row; None for other samples."

    @property
    def largest(self) -> NDArray[np.int64]:
        """int64 [n]: the largest id of each sample. No sample may be empty."""
        return np.maximum.reduceat(self.ids.values, self.ids.offsets[:-1]).astype(np.int64)


def find_token_columns(shard: Shard) -> tuple[str, ...]:
    """The columns whose ids are counted; empty where their encoding states no integer dtype."""
    names = find_id_columns(shard.columns)
    if names == ("turns",):
        return names if shard.columns["turns"] == "json" else ()
    if names == PACKED_COLUMNS and "loss_mask" in shard.columns:
        names = (*PACKED_COLUMNS, "loss_mask")
    codecs = [find_codec(shard.columns[name]) for name in names]
    are_ids = all(c.is_array and np.dtype(c.dtype).kind in "iu" for c in codecs)
    is_one = len({codec.dtype for codec in codecs}) == 1 or STARTS in names
    return names if are_ids and is_one else ()


def decode_tokens(shard: Shard, samples: Ragged) -> Tokens | None:
    """The ids of these samples; None where there are no samples, or the columns hold no ids of a
    stated dtype. ValueError, LookupError or TypeError where the bytes contradict the columns.
    """
    names = find_token_columns(shard)
    if not names or not len(samples):
        return None
    found = {name: cells for name, cells in split_columns(shard, samples) if name in names}
    if names == ("turns",):
        return _of_turns(found["turns"])
    parts = [decode_arrays(found[name], find_codec(shard.columns[name])) for name in names]
    if STARTS in names:
        return _of_packed(*parts)
    prompts = parts[0].lengths if len(parts) == 2 else np.zeros(len(samples), np.int64)
    return Tokens(Ragged.zip(parts), prompts, parts[-1].lengths, np.arange(len(samples) + 1))


def decode_sample_tokens(sample: Sample) -> Tokens:
    """Return the ids of one decoded sample. MixRefused if its columns hold no ids."""
    turns = decode_turns(sample)
    sides = Ragged.from_rows([side for turn in turns for side in turn], np.int64)
    ids = Ragged.from_lengths(sides.values, np.array([len(sides.values)]))
    return Tokens(ids, sides.lengths[0::2], sides.lengths[1::2], np.array([0, len(turns)]))


def _of_packed(rows: Ragged, begins: Ragged, trained: Ragged | None = None) -> Tokens:
    """The ids of packed rows; ValueError where the starts of a row's documents do not ascend from 0
    inside the row, or its mask has another length.
    """
    if trained and (trained.lengths != rows.lengths).any():
        raise ValueError("the loss_mask of a row is not as long as its tokens")
    first = rows.offsets[:-1]
    starts = begins.values.astype(np.int64) + np.repeat(first, begins.lengths)
    ends = np.append(starts[1:], len(rows.values))
    is_first = np.array_equal(starts[begins.offsets[:-1]], first)
    if not begins.lengths.all() or not is_first or (starts >= ends).any():
        raise ValueError("the documents of a row do not begin where it says")
    mask = trained.values > 0 if trained else np.ones(len(rows.values), bool)
    mask[starts] = False  # the first token of a document is never trained, whatever its mask says
    counts = np.add.reduceat(mask, first, dtype=np.int64)
    lengths = ends - starts
    return Tokens(rows, np.zeros_like(lengths), lengths, begins.offsets, counts)


def _of_turns(cells: Ragged) -> Tokens:
    samples = [*map(orjson.loads, cells.slices())]
    sides = (turn[side] for turns in samples for turn in turns for side in SIDES)
    found, turns = Ragged.from_rows(sides, np.int64), np.cumsum([0, *map(len, samples)])
    ids = Ragged(found.values, found.offsets[2 * turns])
    return Tokens(ids, found.lengths[0::2], found.lengths[1::2], turns)
