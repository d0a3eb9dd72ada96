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
    first_columns = stored[0].source.columns
    if first_columns is None:
        return None
    dtype = first_columns.dtype
    eos = None if rules.ids.eos is None else _to_bytes(rules.ids.eos, dtype)
    rows: list[IdRow] = []
    for data, source, _ in stored:
        columns = source.columns
        if columns is None or (columns is not first_columns and columns.dtype != dtype):
            return None
        arrays = columns.read(data)
        if arrays is None:
            return None
        row: IdRow | None
        if len(arrays) == 1:
            row = _read_plain_row(arrays[0], dtype.itemsize, rules.max_seq_len)
        elif columns.layout == SIDES:
            row = _read_pair(arrays, dtype.itemsize, rules, eos)
        else:
            row = _read_packed_row(arrays, dtype.itemsize)
        if row is None or row.length > rules.max_seq_len:
            return None
        rows.append(row)
    return IdRows(rows, dtype)


def _read_plain_row(ids: bytes, itemsize: int, max_seq_len: int) -> IdRow:
    """Return a pretraining row. It is cut to max_seq_len tokens, without a warning."""
    length = len(ids) // itemsize
    if length > max_seq_len:
        length = max_seq_len
        ids = ids[: max_seq_len * itemsize]
    return IdRow((ids,), length, is_plain=True)


def _read_pair(
    arrays: Sequence[bytes], itemsize: int, rules: RowRules, eos: bytes | None
) -> IdRow | None:
    """Return a prompt and its response as a row. Return None if the response does not end with
    EOS.

    Args:
        eos: the bytes of EOS, b"" if the dtype of the ids has no such number; None if the tokenizer
            has no EOS.
    """
    prompt, response = arrays
    if eos is not None and response[-itemsize:] != eos:
        return None
    prompt_length = len(prompt) // itemsize
    length = prompt_length + len(response) // itemsize
    untrained = 0 if rules.trains_prompt(prompt_length) else prompt_length
    return IdRow((prompt, response), length, untrained)


def _read_packed_row(arrays: Sequence[bytes], itemsize: int) -> IdRow | None:
    """Return a packed row. Return None if its first document does not begin with the row, it has
    more documents than tokens, or its loss_mask has another length. `_find_documents` checks that
    documents ascend, in the whole batch at once.
    """
    ids = arrays[0]
    starts = arrays[1]
    length = len(ids) // itemsize
    if not starts.startswith(FIRST_START) or len(starts) > length * START_BYTES:
        return None
    if len(arrays) == 2:
        return IdRow((ids,), length, starts=starts)
    loss_mask = arrays[2]
    if len(loss_mask) != length:
        return None
    return IdRow((ids,), length, starts=starts, loss_mask=loss_mask)


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
    lines = _place_rows(rows, width, is_left=rules.ids.padding_side == "left")

    stored_ids = lines.join([row.ids for row in rows], fill, dtype)
    if dtype.kind == "i" and stored_ids.min() < 0:
        return None
    mask = _mask_padding(lines)

    # The labels are the ids, with IGNORED_LABEL for each token that is not trained.
    labels = stored_ids.astype(np.int64)
    packed = None
    if any(row.starts for row in rows):
        packed = _find_documents(lines)
        if packed is None:
            return None
        is_untrained = _find_untrained(lines, packed.starts)
        if is_untrained.all(axis=1).any():
            return None
        labels[is_untrained] = IGNORED_LABEL
    else:
        for line, row in enumerate(rows):
            first_trained = lines.begins[line] + row.untrained
            if first_trained:
                labels[line, :first_trained] = IGNORED_LABEL
            if lines.ends[line] < width:
                labels[line, lines.ends[line] :] = IGNORED_LABEL
    _ignore_padding_tokens(lines, stored_ids, labels, rules)

    ids = stored_ids.astype(np.int64)
    documents = NO_IDS
    if has_documents:
        documents = packed.number_tokens(lines) if packed else mask - 1
        if rules.separator is not None:
            _number_plain_rows(lines, ids, documents, rules)
    return DirectBatch(ids, labels, mask, documents)


def _place_rows(rows: Sequence[IdRow], width: int, is_left: bool) -> Lines:
    """Return the places of rows in lines of `width` tokens.

    Args:
        is_left: whether the padding is on the left.
    """
    lengths = [row.length for row in rows]
    if is_left:
        return Lines(rows, [width - length for length in lengths], [width] * len(rows), width)
    return Lines(rows, [0] * len(rows), lengths, width)


def _mask_padding(lines: Lines) -> Tokens:
    """Return the attention mask of a batch: 1 for each token of a row, 0 for padding."""
    mask = np.ones((len(lines.rows), lines.width), np.int64)
    for line, (begin, end) in enumerate(zip(lines.begins, lines.ends, strict=True)):
        if begin:
            mask[line, :begin] = 0
        if end < lines.width:
            mask[line, end:] = 0
    return mask


class Documents(NamedTuple):
    """The documents of a batch with packed rows. A row that is not packed is one document.

    The padding of each line is a part too, perhaps of 0 tokens: before its documents if it is on
    the left, otherwise after them.
    """

    lengths: Ids
    "The tokens of each part."
    numbers: Ids
    "The number of each document in its row, from 0; -1 for padding."
    starts: Ids
    "The first token of each document in the whole batch, as one line."

    def number_tokens(self, lines: Lines) -> Tokens:
        """Return int64 [rows, width]: the number of each token's document, -1 for padding."""
        # 4 us for 8 rows of 2,048; a cumulative sum over the first tokens takes 11.
        return self.numbers.repeat(self.lengths).reshape(-1, lines.width)


def _find_documents(lines: Lines) -> Documents | None:
    """Return the documents of a batch. Return None if those of a row do not ascend."""
    # The first token of each part, counted from the first token of its row, and the number of the
    # part. Both as bytes of int32.
    begins_of_parts: list[bytes] = []
    numbers_of_parts: list[bytes] = []
    parts_of_rows: list[int] = []
    ascending = _make_numbers(lines.width)
    for row, begin in zip(lines.rows, lines.begins, strict=True):
        starts = row.starts or FIRST_START
        numbers = ascending[: len(starts)]
        if begin:
            left = (-begin).to_bytes(START_BYTES, "little", signed=True)
            begins_of_parts += (left, starts)
            numbers_of_parts += (PADDING_NUMBER, numbers)
        else:
            right = row.length.to_bytes(START_BYTES, "little")
            begins_of_parts += (starts, right)
            numbers_of_parts += (numbers, PADDING_NUMBER)
        parts_of_rows.append(len(starts) // START_BYTES + 1)

    # The same for the whole batch as one line.
    size = len(lines.rows) * lines.width
    first_tokens = np.arange(0, size, lines.width)
    if any(lines.begins):
        first_tokens += lines.begins
    begins = first_tokens.repeat(parts_of_rows)
    begins += np.frombuffer(b"".join(begins_of_parts), STARTS_DTYPE)
    numbers_of_batch = np.frombuffer(b"".join(numbers_of_parts), STARTS_DTYPE).astype(np.int64)

    # Each part ends where the next one begins. Padding may be empty, a document may not.
    lengths = np.empty_like(begins)
    np.subtract(begins[1:], begins[:-1], out=lengths[:-1])
    lengths[-1] = size - begins[-1]
    is_document = numbers_of_batch >= 0
    if lengths[is_document].min() <= 0:
        return None
    return Documents(lengths, numbers_of_batch, begins[is_document])


def _find_untrained(lines: Lines, starts: Ids) -> NDArray[np.bool_]:
    """Return bool [rows, width]: whether each token of a batch with packed rows, or padding, is not
    trained.

    Args:
        starts: the first token of each document in the whole batch, as one line.
    """
    trained = _make_padding(b"\1", lines.width)
    masks = [(row.loss_mask or trained[: row.length],) for row in lines.rows]
    is_untrained: NDArray[np.bool_] = lines.join(masks, b"\0", np.uint8) == 0
    # Nothing predicts the first token of a document in a packed row.
    is_untrained.reshape(-1)[starts] = True
    for line, row in enumerate(lines.rows):
        if not row.starts:
            begin = lines.begins[line]
            is_untrained[line, begin] = False
            is_untrained[line, begin : begin + row.untrained] = True
    return is_untrained


def _number_plain_rows(lines: Lines, ids: Tokens, documents: Tokens, rules: RowRules) -> None:
    """Change the documents of pretraining rows: separators divide them."""
    for line, row in enumerate(lines.rows):
        if row.is_plain:
            tokens = slice(lines.begins[line], lines.ends[line])
            documents[line, tokens] = number_plain_documents(ids[line, tokens], rules)


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
