"""Counts of one work unit, the part of a conversion that one worker does at a time: what became of
its records, and what its samples contain. A stream's counts are the sums over its work units.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, TypeVar, cast

from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import NDArray, np

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
    """Base class of counts. Each field is a number, or a mapping from a name to a number, so two
    objects can be added.
    """

    __slots__ = ()

    def __add__(self: T, added: T) -> T:
        """Add field by field. Of `longest` and `largest_id` the larger value is kept."""
        sums = {}
        for field_ in fields(cast(Any, self)):
            name = field_.name
            sums[name] = _add_counts(name, getattr(self, name), getattr(added, name))
        return self.__class__(**sums)


def _add_counts(name: str, first: Any, second: Any) -> Any:
    """Return the sum of two values of the field `name`; mappings are added key by key. If the field
    is a maximum (`longest`, `largest_id`), return the larger value.
    """
    if isinstance(first, dict):
        keys = sorted({*first, *second})
        return {key: first.get(key, 0) + second.get(key, 0) for key in keys}
    if name in ("longest", "largest_id"):
        return max(first, second)
    return first + second


@frozen(kw_only=True, slots=True)
class Records(Counts):
    """Counts of the source's records: read = written + filtered + quarantined."""

    read: int = 0
    written: int = 0
    filtered: dict[str, int] = field(default_factory=dict)
    "Reason code -> records that a rule dropped."
    quarantined: dict[str, int] = field(default_factory=dict)
    "Reason code -> bad records; each is written to the stream's quarantine folder."
    unread: dict[str, int] = field(default_factory=dict)
    """Name of a field that is not read, or of contents that the chat template does not print ->
    number of records with a value there that is not empty.
    """
    unseen: dict[str, int] = field(default_factory=dict)
    """Name of a column that the recipe does not read, in Parquet or another columnar file -> all
    records. The column was not read, so it is unknown which records have an empty value.
    """
    placeholders: dict[str, int] = field(default_factory=dict)
    """Placeholder of a medium, such as <image>, `[{"role": ...}]` for a list of messages as text,
    or a fault such as `<think> without </think>` -> records that contain it.
    """
    nulls: dict[str, int] = field(default_factory=dict)
    "Field of messages or tools -> records with null entries inside, which the template may print."
    absent: dict[str, int] = field(default_factory=dict)
    """The field of `id`, or an optional field to which the recipe gives another name than its key
    (`system: sys`) -> records without it. If no record has it, the name is probably wrong.
    """
    duplicates: int = 0
    "Written records that equal an earlier written record of the stream."

    @property
    def sampled(self) -> int:
        """Number of records that the stream is made from: all records of the source, or only the
        records in the stream's sample. The recipe's max_bad is a share of this number.
        """
        return self.read - self.filtered.get(NOT_SAMPLED, 0)

    @property
    def selected(self) -> int:
        """Number of sampled records for which the recipe's condition (`where`) is true."""
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


@frozen(kw_only=True, slots=True)
class Totals(Counts):
    """Counts of the samples."""

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    "Positions that give a loss, after the shift by one."
    lost_tokens: int = 0
    """Tokens that are in no sample although their records were written: `truncated_tokens`, and
    remaining tokens that do not fill a last row.
    """
    truncated_rows: int = 0
    """Samples that were truncated when converting, so that the loader does not truncate them
    again.
    """
    truncated_tokens: int = 0
    "Tokens that were truncated when converting, from all samples."
    left_out_turns: int = 0
    "User messages, each with its answers, that `too_long: last_turns` left out of samples."
    answer_parts: dict[str, int] = field(default_factory=dict)
    """Part of an answer (reasoning, calls, answer) -> its tokens, trained or not, before the loader
    truncates samples. Empty if the recipe does not set train_parts.
    """
    untrained_ends: int = 0
    """Tokens after the last trained token of samples. They give no loss, and are not stored. Only
    with train_parts.
    """
    untrained_calls: int = 0
    "Records that call tools in an answer which is not trained, since only their last answer is."
    equal_answers: int = 0
    """Preferences whose two answers have the same token ids. Losses that compare two answers, such
    as that of DPO, learn nothing from them.
    """
    reversed_rewards: int = 0
    "Preferences whose chosen answer has a lower reward than the rejected answer."
    span_records: int = 0
    "Records that mark characters of an answer (`train_detail`)."
    span_untrained: int = 0
    "Tokens of answers that are not trained, in rows of such records, before truncation."
    loss_weights: dict[str, int] = field(default_factory=dict)
    """Loss weight, such as `0.5` -> trained tokens that have it. If a batch has more than
    MAX_WEIGHTS different weights, they are rounded to one digit. Empty if the recipe does not set
    loss_weights.
    """
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
    "Tokens that the loader truncates from the `cut_rows` samples; no model is trained on them."
    images: int = 0
    "The images of the samples. An image of a preference counts twice, once for each answer."
    image_bytes: int = 0
    "Bytes of all images, as stored."
    image_tokens: int = 0
    """Tokens that the recipe's processor makes of the images; 0 without a processor. In `tokens`
    each image counts as one.
    """
    documents: int = 0
    "Documents, pairs or conversations in packed rows; 0 for other rows."
    labels: dict[str, int] = field(default_factory=dict)
    "Unpaired preferences by their label: `true` are desirable, `false` are not."
    given_eos: int = 0
    """Finetuning samples to which the loader appends EOS: samples that end without EOS and have
    room for it. Packed rows are not counted, since their EOS tokens are stored.
    """
    not_given_eos: int = 0
    """Finetuning samples to which the loader appends no EOS. Earlier commits of mdsmix counted
    neither this nor `given_eos`.
    """

    @property
    def is_eos_counted(self) -> bool:
        """Whether `given_eos` (samples to which the loader appends EOS) was counted. Manifests of
        earlier commits of mdsmix lack this count.
        """
        return self.given_eos + self.not_given_eos == self.samples

    @property
    def seen_tokens(self) -> int:
        """Tokens that the model sees in one pass over all samples: after truncation to max_seq_len,
        and with the EOS that the loader appends. An image counts as the tokens that the recipe's
        processor makes of the image, or as one token if the recipe has no processor.
        """
        more_image_tokens = 0
        if self.image_tokens:
            more_image_tokens = self.image_tokens - self.images
        return self.tokens - self.cut_tokens + self.given_eos + more_image_tokens


def count_labels(labels: NDArray[np.int8]) -> dict[str, int]:
    """Return how many labels are 1 and how many are 0: {"true": 3, "false": 2}. Return {} if there
    are no labels.
    """
    if not len(labels):
        return {}
    desirable = int(np.count_nonzero(labels))
    return {"true": desirable, "false": len(labels) - desirable}


MAX_WEIGHTS = 16
"With more different weights in a batch, weights are rounded to one digit before they are counted."


def count_by_weight(weights: NDArray[np.float32]) -> dict[str, int]:
    """Return weight -> number of tokens, such as `{"0.5": 120, "1": 3000}`. Tokens of the weight 0,
    which are not trained, are not counted.

    Args:
        weights: float32 [tokens].
    """
    values, counts = np.unique(weights[weights > 0], return_counts=True)
    digits = 6 if len(values) <= MAX_WEIGHTS else 1
    tokens_by_weight = dict[str, int]()
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        name = f"{value:.{digits}g}"
        tokens_by_weight[name] = tokens_by_weight.get(name, 0) + count
    return tokens_by_weight


def count_by_length(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Return a histogram by powers of two: {"2^k": samples of 2^k to 2^(k+1) - 1 tokens}. For the
    lengths 1, 5, 6 and 7 it is {"2^0": 1, "2^2": 3}.

    Args:
        lengths: int64 [samples], in tokens.
    """
    # frexp gives an exponent that is the number of binary digits: 3 for 5, which is 0b101.
    _, binary_digits = np.frexp(np.maximum(lengths, 1).astype(np.float64))
    counts = np.bincount(binary_digits - 1)
    return {f"2^{power}": int(count) for power, count in enumerate(counts) if count}
