"""What every encoder gives back: rows of tokens, and what became of the records that gave none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mdsmix.ragged import Ragged

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
    tokens: int
    "Tokens in the samples."
    loss_tokens: int
    "Positions that give a loss in training, after the shift by one."
    lengths: Any
    "int64 [n]: tokens of each sample."
    largest_id: int
    "The largest token id, -1 where there is none."
    rejected: list[Rejected] = field(default_factory=list)
    specials: int = 0
    "Records whose text holds the string of a special token."
    unread: Mapping[str, int] = field(default_factory=dict)
    "What the chat template does not print of the messages -> records that hold it."
    rows_of: Any = None
    "int64: rows of each record that is not rejected, in order; None: one each."
    ids: Sequence[str | int | None] = ()
    "The name of each row's record, where the recipe says which field names records."
    cut: Any = None
    "int64 [n]: tokens of each sample that the loader cuts off; None where it cuts none."
    lost_tokens: int = 0
    "Tokens that no sample holds, because they could not be trained on."
    placeholders: Any = None
    "int64 [n]: tokens of each sample that stand for an image; None where none can."
    images: Sequence[Sequence[Any]] = ()
    "The images of each sample (`mdsmix.images.reader.Image`), as many as it has placeholders."


class Encoder(Protocol):
    """Records in, samples out. A record is any decoded JSON value: an encoder trusts nothing it touches."""

    def encode(self, records: list[Any]) -> Encoded: ...
