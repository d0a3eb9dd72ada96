"""Counts of a work unit: what became of its records, and what its samples hold. The counts of units
add up to those of their stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
BAD_SHARE = 0.01
"More bad records than this are warned of."
DUPLICATE_SHARE = 0.01
NO_MATCH = "where"
"Reason code of a record for which the recipe's condition is false."
NOT_SAMPLED = "not_sampled"
"""Reason code of a record that is not in the sample of its stream. It counts as though the source
did not hold it.
"""


class Counts:
    """Fields that are numbers, or mappings of numbers."""

    __slots__ = ()

    def __add__(self: T, other: T) -> T:
        """Adds all counts; keeps the larger `longest` and `largest_id`."""
        names = [each.name for each in fields(cast(Any, self))]
        return self.__class__(
            **{name: _added(name, getattr(self, name), getattr(other, name)) for name in names}
        )


def _added(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in sorted({*one, *other})}
    return max(one, other) if name in ("longest", "largest_id") else one + other


@dataclass(frozen=True, slots=True, kw_only=True)
class Records(Counts):
    """What became of the source's records: read = written + filtered + quarantined."""

    read: int = 0
    written: int = 0
    filtered: dict[str, int] = field(default_factory=dict)
    "Reason code -> records that a rule dropped."
    quarantined: dict[str, int] = field(default_factory=dict)
    "Reason code -> bad records, each kept in the stream's quarantine folder."
    unread: dict[str, int] = field(default_factory=dict)
    "Field that the recipe does not read -> records in which it is not empty."
    unseen: dict[str, int] = field(default_factory=dict)
    """Column of a columnar file that the recipe does not read -> all records: nobody looked into
    it, so nothing tells which are empty.
    """
    placeholders: dict[str, int] = field(default_factory=dict)
    "Placeholder of a medium, such as <image> -> finetuning records that hold it as text."
    nulls: dict[str, int] = field(default_factory=dict)
    "Field of messages or tools -> records with null entries inside, which the template may print."
    duplicates: int = 0
    "Written records that equal an earlier written record of the stream."

    @property
    def sampled(self) -> int:
        """Records that the stream asks for: all of the source, or those in its sample. Shares such
        as max_bad are shares of these.
        """
        return self.read - self.filtered.get(NOT_SAMPLED, 0)

    @property
    def asked(self) -> int:
        """Records in the sample for which the recipe's condition holds, and records that could not
        be asked.
        """
        return self.sampled - self.filtered.get(NO_MATCH, 0)

    @property
    def dropped(self) -> int:
        return sum(self.filtered.values())

    @property
    def bad(self) -> int:
        return sum(self.quarantined.values())

    @property
    def has_many_duplicates(self) -> bool:
        """Whether more than 1 % of the written records are duplicates, so that a warning
        is given.
        """
        return self.duplicates > DUPLICATE_SHARE * self.written

    @property
    def adds_up(self) -> bool:
        return self.read == self.written + self.dropped + self.bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals(Counts):
    """Counts of what the samples hold."""

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    "Positions that give a loss, after the shift by one."
    lost_tokens: int = 0
    """Tokens of written records that no sample holds: those in `truncated_tokens`, and the rest
    that fills no row.
    """
    truncated_rows: int = 0
    """Samples of which tokens were cut off when converting, and of which the loader cuts off no
    more.
    """
    truncated_tokens: int = 0
    "Tokens that were cut off when converting, of all samples."
    largest_id: int = -1
    longest: int = 0
    "Tokens of the longest sample."
    lengths: dict[str, int] = field(default_factory=dict)
    "Samples by length: key `2^k` counts those of 2^k to 2^(k+1) - 1 tokens."
    specials: int = 0
    "Records whose text held the string of a special token."
    cut_rows: int = 0
    "Samples longer than max_seq_len, which the loader cuts."
    cut_tokens: int = 0
    "Tokens that the loader cuts off these samples, so that they are never trained on."
    images: int = 0
    image_bytes: int = 0
    "Stored bytes of these images."
    image_tokens: int = 0
    """Tokens that the recipe's processor makes of the images; 0 without one. `tokens` counts one
    for each image.
    """
    documents: int = 0
    "Documents, pairs or conversations in packed rows; 0 for other rows."
    given_eos: int = 0
    """Finetuning samples to which the loader appends EOS: they end without it, and have room for
    it. Packed rows hold theirs.
    """
    not_given_eos: int = 0
    "Finetuning samples to which it appends none. Earlier commits counted neither."

    @property
    def is_eos_counted(self) -> bool:
        """Whether it is known to how many of the finetuning samples the loader appends EOS."""
        return self.given_eos + self.not_given_eos == self.samples

    @property
    def seen_tokens(self) -> int:
        """Tokens that the model sees in one pass over all samples, as they are trained: cut to
        max_seq_len, and with the EOS that the loader appends. An image counts as the tokens that
        the recipe's processor makes of it, or as one token without a processor.
        """
        in_place_of_images = self.image_tokens - self.images if self.image_tokens else 0
        return self.tokens - self.cut_tokens + self.given_eos + in_place_of_images


def count_by_length(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Samples by powers of two of their length: {"2^k": samples of 2^k to 2^(k+1) - 1 tokens}."""
    counts = np.bincount(np.frexp(np.maximum(lengths, 1).astype(np.float64))[1] - 1)
    return {f"2^{power}": int(count) for power, count in enumerate(counts) if count}
