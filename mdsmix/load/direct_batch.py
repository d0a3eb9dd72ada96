"""Writes a batch from the bytes of its samples, without a row for each.

`make_training_row` and `Collate` have the rules of all rows. Here are those of the usual rows,
which id_rows.py reads. If a row of a batch needs more, its rows are made one by one. The tensors
are the same (tests/with_torch/test_load_direct_batch.py).

This is a second way to the same batch because it takes 29 to 42 % of the CPU time. Of rows of 2,048
tokens in batches of 8 a CPU second gives, with it and without it: 88,000 and 28,000 full rows,
83,000 and 32,000 documents, 71,000 and 26,000 pairs, 45,000 and 13,000 packed rows, 31,000 and
13,000 conversations.

In this file a batch is one line: row after row, each `width` tokens wide with its padding. A begin
or an end of tokens is counted from the first token of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.load.id_rows import STARTS_DTYPE, IdRows, encode_id
from mdsmix.load.training_rows import RowRules, Tokens, Weights
from mdsmix.shards.token_ids import IGNORED_LABEL, LOSS_WEIGHTS, NO_IDS, Ids

POSITION_IDS = "position_ids"
"The key of a batch with the position of each token in its document; 0 for padding."
SEQUENCE_ID = "sequence_id"
"The key of a batch with the number of each token's document in its row, from 0; -1 for padding."
ONE = np.float32(1).tobytes()
"The loss weight of a token of a sample without weights."
NO_WEIGHT = np.float32(0).tobytes()


class Lines(NamedTuple):
    """The places of rows in a batch."""

    begins: Sequence[int]
    "The first token of each row."
    ends: Sequence[int]
    "The end of each row's tokens."
    gaps: Sequence[tuple[int, int]]
    "Begin and end of the padding of each row that is shorter than `width`."
    width: int
    "Tokens of a row with its padding."
    size: int
    "Tokens of the batch with all padding."

    def join(self, pieces: Sequence[Sequence[bytes]], fill: bytes, dtype: Any) -> NDArray[Any]:
        """Return the values of all tokens of the batch, [size]: those of rows and of padding.

        Args:
            pieces: for each row, the bytes of its values.
            fill: the bytes of one value of the padding.
        """
        itemsize = len(fill)
        padding = _repeat_bytes(fill, self.width)
        parts = list[bytes]()
        position = 0
        for row_pieces, begin, end in zip(pieces, self.begins, self.ends, strict=True):
            if position < begin:
                parts.append(padding[: itemsize * (begin - position)])
            parts += row_pieces
            position = end
        if position < self.size:
            parts.append(padding[: itemsize * (self.size - position)])
        return np.frombuffer(b"".join(parts), dtype)

    def fill(self, token: int, padding: int) -> Tokens:
        """Return int64 [size]: one value for all tokens of rows, and one for padding."""
        # np.full takes twice as long.
        values = np.empty(self.size, np.int64)
        values.fill(token)
        self.fill_gaps(values, padding)
        return values

    def fill_gaps(self, values: Tokens, padding: int) -> None:
        """Set the values of padding.

        Args:
            values: int64 [size].
        """
        for begin, end in self.gaps:
            values[begin:end] = padding


def write_batch(
    rows: IdRows, rules: RowRules, width: int, extra_keys: Collection[str] = ()
) -> dict[str, NDArray[Any]] | None:
    """Write rows into new arrays. Return None if a row is wrong, or the padding does not fit into
    the dtype of the ids. A row is wrong if an id is negative, its documents do not ascend, or no
    token of a packed row is trained.

    Args:
        width: tokens of each row of the batch, at least those of the longest row.
        extra_keys: those of POSITION_IDS, SEQUENCE_ID and LOSS_WEIGHTS that the batch has too.

    Returns:
        The arrays of the batch by their keys: loss weights float32, all others int64, each
        [rows, width].
    """
    fill = encode_id(rules.ids.fill or 0, rows.dtype)
    if not fill:
        return None
    lines = _place_rows(rows.lengths, width, is_left=rules.ids.padding_side == "left")

    # Join the ids in their own dtype, which is up to eight times as narrow as int64.
    stored_ids = lines.join(rows.ids, fill, rows.dtype)
    if rows.dtype.kind == "i" and stored_ids.min() < 0:
        return None
    ids = stored_ids.astype(np.int64)
    mask = lines.fill(token=1, padding=0)

    # The labels are the ids, with IGNORED_LABEL for each token that is not trained.
    starts = NO_IDS
    if rows.starts:
        packed_starts = _read_starts(rows, lines)
        if packed_starts is None:
            return None
        starts = packed_starts
        is_trained = _find_trained(rows, lines, starts)
        if not is_trained.reshape(-1, width).any(axis=1).all():
            return None
        labels = stored_ids.astype(np.int64)
        np.copyto(labels, IGNORED_LABEL, where=~is_trained)
    else:
        labels = _label_ranges(rows, lines, stored_ids)
    if rows.plain and rules.ids.pad is not None:
        _ignore_padding_tokens(rows, lines, stored_ids, labels, rules.ids.pad)

    arrays: dict[str, NDArray[Any]] = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": mask,
    }
    if POSITION_IDS in extra_keys or SEQUENCE_ID in extra_keys:
        if rows.plain and rules.separator is not None:
            starts = np.concatenate([starts, _find_separated(rows, lines, stored_ids, rules)])
        documents = _find_documents(lines, starts) if len(starts) else None
        if POSITION_IDS in extra_keys:
            arrays[POSITION_IDS] = _number_positions(lines, documents)
        if SEQUENCE_ID in extra_keys:
            arrays[SEQUENCE_ID] = _number_documents(lines, documents)
    if LOSS_WEIGHTS in extra_keys:
        arrays[LOSS_WEIGHTS] = _weigh_labels(rows, lines, labels)
    return {key: values.reshape(-1, width) for key, values in arrays.items()}


def _place_rows(lengths: Sequence[int], width: int, is_left: bool) -> Lines:
    """Return the places of rows in a batch.

    Args:
        lengths: tokens of each row.
        is_left: whether the padding is on the left.
    """
    begins = list[int]()
    ends = list[int]()
    gaps = list[tuple[int, int]]()
    first = 0
    for length in lengths:
        next_first = first + width
        begin = next_first - length if is_left else first
        end = begin + length
        begins.append(begin)
        ends.append(end)
        if length < width:
            gaps.append((first, begin) if is_left else (end, next_first))
        first = next_first
    return Lines(begins, ends, gaps, width, first)


def _label_ranges(rows: IdRows, lines: Lines, stored_ids: NDArray[Any]) -> Tokens:
    """Return int64 [size]: the ids of the trained ranges, and IGNORED_LABEL everywhere else."""
    labels = stored_ids.astype(np.int64)
    position = 0
    for ranges, row_begin in zip(rows.trained, lines.begins, strict=True):
        for begin, end in ranges:
            if position < row_begin + begin:
                labels[position : row_begin + begin] = IGNORED_LABEL
            position = row_begin + end
    if position < lines.size:
        labels[position:] = IGNORED_LABEL
    return labels


def _read_starts(rows: IdRows, lines: Lines) -> Ids | None:
    """Return the first token of each document of packed rows. Return None if those of a row do not
    ascend.
    """
    counts = [len(starts) // STARTS_DTYPE.itemsize for starts in rows.starts.values()]
    begins = np.array([lines.begins[number] for number in rows.starts])
    positions: Ids = begins.repeat(counts)
    positions += np.frombuffer(b"".join(rows.starts.values()), STARTS_DTYPE)
    # The documents of a row begin inside it, so those of the next row come after them.
    return positions if (positions[1:] > positions[:-1]).all() else None


def _find_trained(rows: IdRows, lines: Lines, starts: Ids) -> NDArray[np.bool_]:
    """Return bool [size]: whether each token of a batch with packed rows is trained.

    Args:
        starts: the first token of each document of packed rows.
    """
    ones = _repeat_bytes(b"\1", lines.width)
    masks = list[tuple[bytes]]()
    for number, length in enumerate(rows.lengths):
        masks.append((rows.loss_masks.get(number) or ones[:length],))
    is_trained: NDArray[np.bool_] = lines.join(masks, b"\0", np.uint8) > 0
    # Nothing predicts the first token of a document in a packed row.
    is_trained[starts] = False
    if len(rows.starts) < len(rows.lengths):
        for number, row_begin in enumerate(lines.begins):
            if number not in rows.starts:
                is_trained[row_begin : lines.ends[number]] = False
                for begin, end in rows.trained[number]:
                    is_trained[row_begin + begin : row_begin + end] = True
    return is_trained


def _find_separated(rows: IdRows, lines: Lines, stored_ids: NDArray[Any], rules: RowRules) -> Ids:
    """Return the first token of each document of pretraining rows: a document begins with a BOS, or
    after an EOS. That of a row's first document may be missing, or be in the padding before it.
    """
    starts = np.flatnonzero(stored_ids == rules.separator)
    if not rules.separator_starts:
        starts += 1
    # Leave out those after the tokens of a row, which may end with EOS, and in other rows.
    row_numbers = np.minimum(starts // lines.width, len(lines.begins) - 1)
    is_plain = np.zeros(len(lines.begins), bool)
    is_plain[rows.plain] = True
    is_inside = is_plain[row_numbers] & (starts < np.array(lines.ends)[row_numbers])
    separated: Ids = starts[is_inside]
    return separated


class Documents(NamedTuple):
    """The documents of a batch, in order. The padding on the left of a row counts as tokens of its
    first document, and padding on the right as tokens of its last one.
    """

    firsts: Ids
    "The first token of each document."
    lengths: Ids
    numbers: Ids
    "The number of each document in its row, from 0."


def _find_documents(lines: Lines, starts: Ids) -> Documents:
    """Return the documents of a batch.

    Args:
        starts: the first token of each document. That of a row's first document may be missing, or
            be a token of the padding before it.
    """
    # Cut the batch at the beginning of each row, padding included, and of each later document.
    row_begins = np.array(lines.begins)
    row_edges = np.arange(0, lines.size, lines.width)
    is_later = starts > row_begins[starts // lines.width]
    edges = np.concatenate([row_edges, starts[is_later], [lines.size]])
    edges.sort()
    lengths = edges[1:] - edges[:-1]
    firsts = edges[:-1]
    first_documents = firsts.searchsorted(row_edges)
    numbers = np.arange(len(firsts)) - first_documents[firsts // lines.width]
    firsts[first_documents] = row_begins
    return Documents(firsts, lengths, numbers)


def _number_documents(lines: Lines, documents: Documents | None) -> Tokens:
    """Return int64 [size]: the number of each token's document in its row, -1 for padding.

    Args:
        documents: None if each row is one document.
    """
    if documents is None:
        return lines.fill(token=0, padding=-1)
    # 4 us for 8 rows of 2,048; a cumulative sum over the first tokens takes 11.
    numbers: Tokens = documents.numbers.repeat(documents.lengths)
    lines.fill_gaps(numbers, -1)
    return numbers


def _number_positions(lines: Lines, documents: Documents | None) -> Tokens:
    """Return int64 [size]: the position of each token in its document, 0 for padding.

    Args:
        documents: None if each row is one document.
    """
    positions = np.arange(lines.size)
    if documents is None:
        positions -= np.repeat(lines.begins, lines.width)
    else:
        positions -= documents.firsts.repeat(documents.lengths)
    lines.fill_gaps(positions, 0)
    return positions


def _ignore_padding_tokens(
    rows: IdRows, lines: Lines, stored_ids: NDArray[Any], labels: Tokens, pad: int
) -> None:
    """Change the labels of pretraining rows: the tokenizer's own padding token is not trained.

    Args:
        pad: the padding token.
    """
    is_pad = stored_ids == pad
    # The padding of the batch is the same token, and has been ignored.
    padding = lines.size - sum(rows.lengths)
    if np.count_nonzero(is_pad) > padding:
        for number in rows.plain:
            tokens = slice(lines.begins[number], lines.ends[number])
            labels[tokens][is_pad[tokens]] = IGNORED_LABEL


def _weigh_labels(rows: IdRows, lines: Lines, labels: Tokens) -> Weights:
    """Return float32 [size]: the loss weight of each label, 0 if it is not trained."""
    ones = _repeat_bytes(ONE, lines.width)
    weights_of_rows = list[Sequence[bytes]]()
    for number, length in enumerate(rows.lengths):
        weights_of_rows.append(rows.weights.get(number) or (ones[: len(ONE) * length],))
    weights = lines.join(weights_of_rows, NO_WEIGHT, np.float32)
    return np.where(labels == IGNORED_LABEL, np.float32(0), weights)


@lru_cache(maxsize=16)
def _repeat_bytes(value: bytes, count: int) -> bytes:
    """Return `count` values one after the other."""
    return value * count
