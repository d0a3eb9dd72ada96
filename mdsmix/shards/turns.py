"""A decoded sample -> its turns, whatever columns it lies in.

The order in which columns are looked for is that of LLM-Foundry's loaders, which is also what lets one loader read every kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import MixRefused

STARTS = "starts"
PACKED = ("input_ids", STARTS)
"A row of several documents; `loss_mask` beside them says what is trained, else all but the first token of each document is."
LAYOUTS = (("turns",), ("input_ids", "labels"), ("tokens",), PACKED)
"The columns that hold a sample's ids, in the order in which a loader looks for them."
IMAGES = ("images", "sizes")
"Columns beside the turns of a conversation with images: their bytes, and the height and width of each."
Ids = NDArray[np.int64]


class Turn(NamedTuple):
    """int64 ids of one turn; plain tokens are one response without a prompt."""

    prompt: Ids
    response: Ids


def layout_of(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of LAYOUTS the columns (of a sample or of a shard) make; empty where they hold no ids."""
    return next((names for names in LAYOUTS if columns.keys() >= set(names)), ())


def has_images(columns: Mapping[str, Any]) -> bool:
    """Whether the columns (of a sample or of a shard) are those of a stream of images, whose tokens alone mean little."""
    return columns.keys() >= set(IMAGES)


def turns_of(sample: Mapping[str, Any], dtype: str = "int64") -> list[Turn]:
    """The turns of a sample; `dtype` is that of columns of plain bytes. Each document of a packed row counts as a response.
    MixRefused where it holds something else than ids."""
    layout = layout_of(sample)
    if layout == PACKED:
        none = np.empty(0, np.int64)
        return [Turn(none, document.ids) for document in documents_of(sample)]
    if layout == ("turns",):
        return [_turn(turn) for turn in sample["turns"]]
    if layout == ("tokens",):
        return [Turn(np.empty(0, np.int64), _ids(sample["tokens"], dtype))]
    if layout:
        return [Turn(*(_ids(sample[name], dtype) for name in layout))]
    raise MixRefused(
        f"its columns {', '.join(sorted(sample))} hold no tokens (tokens, input_ids and labels, or turns), and the "
        "loader does not tokenize; convert the data with `mdsmix convert` first."
    )


class Document(NamedTuple):
    """One of the samples that a packed row holds."""

    ids: Ids
    trained: NDArray[np.bool_]
    "bool [tokens]: whether each token is trained; the first never is, since nothing predicts it."


def documents_of(sample: Mapping[str, Any]) -> list[Document]:
    """The documents of a packed row; MixRefused where its columns contradict each other."""
    ids, starts = (_ids(sample[name], "int64") for name in PACKED)
    trained = _ids(sample["loss_mask"], "int64") > 0 if "loss_mask" in sample else ids >= 0
    edges = np.append(starts, len(ids))
    if len(trained) != len(ids) or edges[0] or (np.diff(edges) < 1).any():
        raise MixRefused(
            "where its documents begin, or what of them is trained, contradicts its tokens; convert the data again."
        )
    trained[starts] = False
    cut = (np.split(each, starts[1:]) for each in (ids, trained))
    return [Document(*parts) for parts in zip(*cut, strict=True)]


def _ids(column: Any, dtype: str) -> Ids:
    if isinstance(column, bytes):
        column = np.frombuffer(column, dtype)
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "iu":
        raise MixRefused(
            f"a token column holds {type(column).__name__}, not bytes or a row of integers; convert the data again."
        )
    return column.astype(np.int64)


def _turn(turn: Any) -> Turn:
    if not isinstance(turn, Mapping) or not {"input_ids", "labels"} <= set(turn):
        raise MixRefused("a turn lacks input_ids or labels; convert the data again.")
    return Turn(np.asarray(turn["input_ids"], np.int64), np.asarray(turn["labels"], np.int64))
