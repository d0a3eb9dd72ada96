"""What every kind of stream gives back: rows of tokens, and what became of the records that gave none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Totals, histogram

Detail = Mapping[str, str | int]
"What explains one rejection: the template's own message, or two texts where they part."


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that became no sample."""

    position: int
    "Index into the records that were given."
    reason: str
    "A reason code of the README beside this file."
    filtered: bool
    "True: a rule dropped a good record. False: the record is bad and is set aside."
    detail: Detail | None = None
    "Of a bad record: kept beside it in the quarantine."


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The samples of one batch of records, in the order of the records."""

    columns: Mapping[str, Ragged]
    "Column name -> one row per sample: token ids (of the tokenizer's dtype), or bytes (uint8) for a json column."
    lengths: NDArray[np.int64]
    "int64 [n]: tokens of each sample."
    positions: NDArray[np.int64]
    "int64 [n]: which record each sample is of."
    totals: Totals
    "What the samples hold."
    rejected: list[Rejected] = field(default_factory=list)
    unread: Mapping[str, int] = field(default_factory=dict)
    "What the chat template does not print of the messages -> records that hold it."
    placeholders: Mapping[str, int] = field(default_factory=dict)
    "Placeholder of a medium, such as <image> -> records whose texts hold it."
    ids: Sequence[str | int | None] = ()
    "The name of each row's record, where the recipe says which field names records."
    images: Sequence[Sequence[Any]] = ()
    "The images of each sample (`mdsmix.images.reader.Image`)."


def encoded(
    columns: Mapping[str, Ragged],
    ids: Sequence[Ragged],
    positions: Any,
    loss_tokens: int,
    lost_tokens: int = 0,
    cut: NDArray[np.int64] | None = None,
    **said: Any,
) -> Encoded:
    """Samples with their totals.

    Args:
        ids: one row per sample each; together they are the sample's tokens.
        loss_tokens: positions that give a loss in training, after the shift by one.
        lost_tokens: tokens that no sample holds, because they could not be trained on.
        cut: int64 [n], the tokens of each sample that the loader cuts off.
        said: other fields of Encoded.
    """
    lengths = np.asarray(sum(rows.lengths for rows in ids))
    beyond = np.zeros(0, np.int64) if cut is None else cut
    totals = Totals(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        loss_tokens=loss_tokens,
        lost_tokens=lost_tokens,
        largest_id=max((int(rows.values.max()) for rows in ids if len(rows.values)), default=-1),
        longest=int(lengths.max(initial=0)),
        lengths=histogram(lengths),
        cut_rows=int(np.count_nonzero(beyond)),
        cut_tokens=int(beyond.sum()),
    )
    positions = np.asarray(positions, np.int64)
    return Encoded(columns=columns, lengths=lengths, positions=positions, totals=totals, **said)
