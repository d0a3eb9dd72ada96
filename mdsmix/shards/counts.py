"""Counts of a work unit: of its records, by what became of them, and of its samples. The counts of
the units add up to those of their stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
BAD_SHARE = 0.01
"A warning is given if a larger share of the records is bad."
DUPLICATE_SHARE = 0.01
"A warning is given if a larger share of the written records are duplicates."
NO_MATCH = "where"
"Reason code of a record for which the recipe's condition is false."
NOT_SAMPLED = "not_sampled"
"""Reason code of a record that is not in the sample of its stream. It counts as if the source did
not contain it.
"""


class Counts:
    """Fields that are numbers, or mappings of numbers."""

    __slots__ = ()

    def __add__(self: T, other: T) -> T:
        """Add all counts; keep the larger `longest` and `largest_id`."""
        sums = {}
        for field_ in fields(cast(Any, self)):
            name = field_.name
            sums[name] = _add_counts(name, getattr(self, name), getattr(other, name))
        return self.__class__(**sums)


def _add_counts(name: str, first: Any, second: Any) -> Any:
    """Return the sum of two values of the field `name`: of numbers, or key by key of mappings. Of a
    field that is a maximum, return the larger value.
    """
    if isinstance(first, dict):
        keys = sorted({*first, *second})
        return {key: first.get(key, 0) + second.get(key, 0) for key in keys}
    if name in ("longest", "largest_id"):
        return max(first, second)
    return first + second


@dataclass(frozen=True, slots=True, kw_only=True)
class Records(Counts):
    """Counts of the source's records: read = written + filtered + quarantined."""

    read: int = 0
    written: int = 0
    filtered: dict[str, int] = field(default_factory=dict)
    "Reason code -> records that a rule dropped."
    quarantined: dict[str, int] = field(default_factory=dict)
    "Reason code -> bad records; each is written to the stream's quarantine folder."
    unread: dict[str, int] = field(default_factory=dict)
    "Field that the recipe does not read -> records in which it is not empty."
    unseen: dict[str, int] = field(default_factory=dict)
    """Column of a columnar file that the recipe does not read -> all records. The column was not
    read, so it is unknown in which records it is empty.
    """
    placeholders: dict[str, int] = field(default_factory=dict)
    "Placeholder of a medium, such as <image> -> finetuning records that contain it as text."
    nulls: dict[str, int] = field(default_factory=dict)
    "Field of messages or tools -> records with null entries inside, which the template may print."
    duplicates: int = 0
    "Written records that equal an earlier written record of the stream."

    @property
    def sampled(self) -> int:
        """Records that the stream is made from: all of the source, or those in its sample. Shares
        such as max_bad are shares of these.
        """
        return self.read - self.filtered.get(NOT_SAMPLED, 0)

    @property
    def selected(self) -> int:
        """Records in the sample, without those for which the recipe's condition is false."""
        return self.sampled - self.filtered.get(NO_MATCH, 0)

    @property
    def dropped(self) -> int:
        return sum(self.filtered.values())

    @property
    def bad(self) -> int:
        return sum(self.quarantined.values())

    @property
    def has_many_duplicates(self) -> bool:
        """Whether more than 1 % of the written records are duplicates."""
        return self.duplicates > DUPLICATE_SHARE * self.written

    @property
    def adds_up(self) -> bool:
        return self.read == self.written + self.dropped + self.bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals(Counts):
    """Counts of the samples."""

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    "Positions that give a loss, after the shift by one."
    lost_tokens: int = 0
    """Tokens of written records that are in no sample: `truncated_tokens`, and the last tokens,
    which do not fill a row.
    """
    truncated_rows: int = 0
    """Samples that were truncated when converting, so that the loader does not truncate them
    again.
    """
    truncated_tokens: int = 0
    "Tokens that were truncated when converting, from all samples."
    largest_id: int = -1
    longest: int = 0
    "Tokens of the longest sample."
    lengths: dict[str, int] = field(default_factory=dict)
    "Samples by length: key `2^k` counts those of 2^k to 2^(k+1) - 1 tokens."
    specials: int = 0
    "Records whose text contained the string of a special token."
    cut_rows: int = 0
    "Samples longer than max_seq_len, which the loader will truncate."
    cut_tokens: int = 0
    "Tokens that the loader truncates from these samples; no model is trained on them."
    images: int = 0
    image_bytes: int = 0
    "Stored bytes of these images."
    image_tokens: int = 0
    """Tokens that the recipe's processor makes of the images; 0 without a processor. In `tokens`
    each image counts as one.
    """
    documents: int = 0
    "Documents, pairs or conversations in packed rows; 0 for other rows."
    given_eos: int = 0
    """Finetuning samples to which the loader appends EOS: they end without it and are short enough
    for it. Packed rows already contain theirs.
    """
    not_given_eos: int = 0
    "Finetuning samples to which the loader appends no EOS. Earlier commits counted neither."

    @property
    def is_eos_counted(self) -> bool:
        """Whether `given_eos` was counted, which earlier commits did not do."""
        return self.given_eos + self.not_given_eos == self.samples

    @property
    def seen_tokens(self) -> int:
        """Tokens that the model sees in one pass over all samples: truncated to max_seq_len, and
        with the EOS that the loader appends. An image counts as the tokens that the recipe's
        processor makes of it, or as one token without a processor.
        """
        more_image_tokens = 0
        if self.image_tokens:
            more_image_tokens = self.image_tokens - self.images
        return self.tokens - self.cut_tokens + self.given_eos + more_image_tokens


def count_by_length(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Return a histogram by powers of two: {"2^k": samples of 2^k to 2^(k+1) - 1 tokens}.

    Args:
        lengths: int64 [samples], in tokens.
    """
    counts = np.bincount(np.frexp(np.maximum(lengths, 1).astype(np.float64))[1] - 1)
    return {f"2^{power}": int(count) for power, count in enumerate(counts) if count}
