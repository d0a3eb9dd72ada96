"""Writes a batch from the bytes of its samples, without a row for each.

`make_training_row` and `Collate` have the rules of all rows; here are those of the usual ones:
pretraining rows, pairs that end with EOS, and packed rows, that fit into the batch. For any other
row there is no direct batch, and the rows are made one by one. The tensors are the same
(tests/with_torch/test_load_direct_batch.py).

This is a second way to the same batch because it takes less than half of the CPU time. Of rows of
2,048 tokens in batches of 8 a CPU second gives, with it and without it: 73,000 and 24,000 full
rows, 68,000 and 29,000 documents, 66,000 and 25,000 pairs, 40,000 and 13,000 packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.load.stored_rows import StoredRow
from mdsmix.load.training_rows import RowRules, Tokens, number_plain_documents
from mdsmix.shards.token_ids import IGNORED_LABEL, NO_IDS, SIDES, Ids

STARTS_DTYPE = np.dtype("<i4")
START_BYTES = STARTS_DTYPE.itemsize
FIRST_START = bytes(START_BYTES)
"The start of a row's first document: 0 as int32."
PADDING_NUMBER = np.array([-1], STARTS_DTYPE).tobytes()
"The number of the document of padding: -1 as int32."


class IdRow(NamedTuple):
    """The token ids of a sample as bytes, before they are written into a batch."""

    ids: tuple[bytes, ...]
    "The arrays of ids, which are joined end to end."
    length: int
    "Tokens of all these together."
    untrained: int = 0
    "Tokens at the beginning that are not trained: those of a prompt."
    is_plain: bool = False
    "Whether it is a pretraining row, in which padding tokens and separators have a meaning."
    starts: bytes = b""
    "int32: the positions at which the documents of a packed row begin; empty for another row."
    loss_mask: bytes = b""
    "uint8: above 0 for each trained token of a packed row; empty for another row."


class IdRows(NamedTuple):
    """The samples of a batch, and the dtype of their ids."""

    rows: Sequence[IdRow]
    dtype: np.dtype[Any]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max([row.length for row in self.rows])


class DirectBatch(NamedTuple):
    """The arrays of a batch: int64 [rows, width]."""

    input_ids: Tokens
    labels: Tokens
    attention_mask: Tokens
    documents: Tokens
    "The number of each token's document, -1 for padding; empty if it was not asked for."


class Lines(NamedTuple):
    """The rows of a batch, and their places in its lines."""

    rows: Sequence[IdRow]
    begins: Sequence[int]
    "The column of each row's first token."
    ends: Sequence[int]
    "The column after each row's last token."
    width: int

    def join(self, pieces: Sequence[Sequence[bytes]], fill: bytes, dtype: Any) -> NDArray[Any]:
        """Return [rows, width]: the pieces of each row, and padding around them.

        Args:
            pieces: for each row, the bytes of its values.
            fill: the bytes of one value of the padding.
        """
        size = len(fill)
        padding = _make_padding(fill, self.width)
        parts: list[bytes] = []
        for row_pieces, begin, end in zip(pieces, self.begins, self.ends, strict=True):
            parts += (padding[: size * begin], *row_pieces, padding[size * end :])
        return np.frombuffer(b"".join(parts), dtype).reshape(len(self.rows), self.width)


def read_id_rows(stored: Sequence[StoredRow], rules: RowRules) -> IdRows | None:
    """Return the ids of a batch's samples. Return None if one of them needs more than a direct
    batch does: columns of other encodings, a cut, an EOS.
    """
    rows: list[IdRow] = []
    first_columns = stored[0].source.columns
    if first_columns is None:
        return None
    dtype = first_columns.dtype
    width = dtype.itemsize
    end = rules.max_seq_len
    eos = None if rules.ids.eos is None else _to_bytes(rules.ids.eos, dtype)
    for data, source, _ in stored:
        columns = source.columns
        if columns is None or columns.dtype != dtype:
            return None
        arrays = columns.read(data)
        if arrays is None:
            return None
        ids = arrays[0]
        length = len(ids) // width
        if len(arrays) == 1:
            # A pretraining row is cut without a warning.
            if length > end:
                length = end
                ids = ids[: end * width]
            row = IdRow((ids,), length, is_plain=True)
        elif columns.layout == SIDES:
            # A prompt and its response, which must end with EOS.
            response = arrays[1]
            untrained = 0 if rules.trains_prompt(length) else length
            length += len(response) // width
            if eos is not None and response[-width:] != eos:
                return None
            row = IdRow((ids, response), length, untrained)
        else:
            # A packed row. Whether its documents ascend is checked for the whole batch.
            starts = arrays[1]
            loss_mask = arrays[2] if len(arrays) == 3 else b"\1" * length
            last_start = int.from_bytes(starts[-START_BYTES:], "little", signed=True)
            begins_at_zero = starts[:START_BYTES] == FIRST_START
            if not begins_at_zero or last_start >= length or len(loss_mask) != length:
                return None
            row = IdRow((ids,), length, starts=starts, loss_mask=loss_mask)
        if length > end:
            return None
        rows.append(row)
    return IdRows(rows, dtype)


def write_batch(
    id_rows: IdRows, rules: RowRules, width: int, has_documents: bool
) -> DirectBatch | None:
    """Write rows into new arrays. Return None if a row is wrong, or the padding does not fit into
    the dtype of the ids. A row is wrong if an id is negative, its documents do not ascend, or no
    token is trained.

    Args:
        width: tokens of each line of the batch, at least those of the longest row.
        has_documents: whether the documents of the tokens are needed.
    """
    rows, dtype = id_rows
    fill = _to_bytes(rules.ids.fill or 0, dtype)
    if not fill:
        return None
    is_left = rules.ids.padding_side == "left"
    lengths = [row.length for row in rows]
    begins = [width - length if is_left else 0 for length in lengths]
    ends = [width if is_left else length for length in lengths]
    lines = Lines(rows, begins, ends, width)

    stored_ids = lines.join([row.ids for row in rows], fill, dtype)
    if dtype.kind == "i" and stored_ids.min() < 0:
        return None
    ids = stored_ids.astype(np.int64)

    is_full = sum(lengths) == ids.size
    if is_full:
        mask = np.ones(ids.shape, np.int64)
    else:
        mask = np.zeros(ids.shape, np.int64)
        for line, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            mask[line, begin:end] = 1

    labels: Tokens | None
    packed = None
    if any(row.starts for row in rows):
        packed = _read_documents(lines)
        labels = _label_packed_rows(lines, ids, packed.starts) if packed else None
    else:
        labels = ids.copy()
        for line, row in enumerate(rows):
            begin = begins[line] + row.untrained
            if begin:
                labels[line, :begin] = IGNORED_LABEL
            if not is_full:
                labels[line, ends[line] :] = IGNORED_LABEL
    if labels is None:
        return None
    _ignore_padding_tokens(lines, stored_ids, labels, rules)

    documents = NO_IDS
    if has_documents:
        documents = packed.numbers if packed else mask - 1
        if rules.separator is not None:
            for line, row in enumerate(rows):
                if row.is_plain:
                    row_ids = ids[line, begins[line] : ends[line]]
                    numbers = number_plain_documents(row_ids, rules)
                    documents[line, begins[line] : ends[line]] = numbers
    return DirectBatch(ids, labels, mask, documents)


class PackedDocuments(NamedTuple):
    """The documents of a batch with packed rows."""

    starts: Ids
    "The first token of each document in the whole batch, as one line."
    numbers: Tokens
    "int64 [rows, width]: the number of each token's document in its row, -1 for padding."


def _read_documents(lines: Lines) -> PackedDocuments | None:
    """Return the documents of a batch; a row that is not packed is one document. Return None if
    those of a row do not ascend.
    """
    # The parts of each line: perhaps padding, documents, perhaps padding. Where they begin, in
    # relation to the row's first token, and their numbers, as int32.
    begins_of_parts: list[bytes] = []
    numbers_of_parts: list[bytes] = []
    parts_of_lines: list[int] = []
    ascending = _make_numbers(lines.width)
    for row, begin, end in zip(*lines[:3], strict=True):
        left = b"" if not begin else (-begin).to_bytes(START_BYTES, "little", signed=True)
        right = b"" if end == lines.width else row.length.to_bytes(START_BYTES, "little")
        starts = row.starts or FIRST_START
        begins_of_parts += (left, starts, right)
        numbers_of_parts += (
            PADDING_NUMBER if left else b"",
            ascending[: len(starts)],
            PADDING_NUMBER if right else b"",
        )
        parts_of_lines.append((len(left) + len(starts) + len(right)) // START_BYTES)

    # Where the parts begin in the whole batch, as one line. Those of each row are within the row,
    # so all ascend if those of each row do.
    rows = len(lines.rows)
    first_tokens = np.arange(0, rows * lines.width, lines.width) + lines.begins
    begins = np.frombuffer(b"".join(begins_of_parts), STARTS_DTYPE).astype(np.int64)
    begins += np.repeat(first_tokens, parts_of_lines)
    lengths = np.empty_like(begins)
    np.subtract(begins[1:], begins[:-1], out=lengths[:-1])
    lengths[-1] = rows * lines.width - begins[-1]
    if lengths.min() <= 0:
        return None
    numbers = np.frombuffer(b"".join(numbers_of_parts), STARTS_DTYPE).astype(np.int64)
    return PackedDocuments(
        starts=begins[numbers >= 0],
        numbers=np.repeat(numbers, lengths).reshape(rows, lines.width),
    )


def _label_packed_rows(lines: Lines, ids: Tokens, starts: Ids) -> Tokens | None:
    """Return the labels of a batch with packed rows. Return None if one of them has no trained
    token.

    Args:
        starts: the first token of each document in the whole batch, as one line.
    """
    trained = _make_padding(b"\1", lines.width)
    untrained = _make_padding(b"\0", lines.width)
    pieces = [
        (row.loss_mask,)
        if row.starts
        else (untrained[: row.untrained], trained[: row.length - row.untrained])
        for row in lines.rows
    ]
    is_trained = lines.join(pieces, b"\0", np.uint8) > 0
    is_trained.reshape(-1)[starts] = False  # nothing predicts the first token of a document
    for line, row in enumerate(lines.rows):
        if not row.starts:
            is_trained[line, lines.begins[line]] = not row.untrained
    if not is_trained.any(axis=1).all():
        return None
    return np.where(is_trained, ids, IGNORED_LABEL)


def _ignore_padding_tokens(
    lines: Lines, stored_ids: NDArray[Any], labels: Tokens, rules: RowRules
) -> None:
    """Change the labels of pretraining rows: the tokenizer's own padding token is not trained."""
    pad = rules.ids.pad
    if pad is None or not any(row.is_plain for row in lines.rows):
        return
    is_pad = stored_ids == pad
    # The padding of the batch is the same token, and has been ignored.
    padding = stored_ids.size - sum(row.length for row in lines.rows)
    if np.count_nonzero(is_pad) > padding:
        for line, row in enumerate(lines.rows):
            if row.is_plain:
                labels[line][is_pad[line]] = IGNORED_LABEL


@lru_cache(maxsize=16)
def _to_bytes(value: int, dtype: np.dtype[Any]) -> bytes:
    """Return the bytes of an id, or b"" if the dtype has no such number."""
    limits = np.iinfo(dtype)
    return dtype.type(value).tobytes() if limits.min <= value <= limits.max else b""


@lru_cache(maxsize=16)
def _make_padding(value: bytes, width: int) -> bytes:
    """Return `width` values one after the other."""
    return value * width


@lru_cache(maxsize=4)
def _make_numbers(width: int) -> bytes:
    """Return the numbers of `width` documents as int32."""
    return np.arange(width, dtype=STARTS_DTYPE).tobytes()
