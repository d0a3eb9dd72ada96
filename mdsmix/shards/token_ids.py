"""The token ids of samples as turns, which are pairs of prompt and response, whatever columns a
stream has.

A sample's columns are recognised by their names, which are tried in the same order as by
LLM-Foundry's loaders. So one loader can read every kind of stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import orjson

from mdsmix.errors import MixRefused
from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.ragged import Ragged
from mdsmix.shards.codecs import find_codec
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_samples import Sample, decode_arrays, split_columns

PLAIN = ("tokens",)
"The columns of a pretraining row."
TURNS = ("turns",)
"The columns of a conversation."
STARTS = "starts"
LOSS_MASK = "loss_mask"
PACKED_COLUMNS = ("input_ids", STARTS)
"""Columns of a packed row, which contains several documents. A third column, LOSS_MASK, marks the
tokens that are trained. Without this column all tokens are trained, except the first token of each
document.
"""
IMAGE_COLUMNS = ("images", "sizes")
"""Columns of a conversation with images, in addition to its turns: the images' bytes, and the
height and width of each.
"""
SIDES = ("input_ids", "labels")
"""Columns of a finetuning sample, and keys of a stored turn: the prompt's ids and the response's
ids.
"""
PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected")
"""Columns of a preference: int64 ids (little endian) as plain bytes. The columns of the two answers
do not contain the prompt.
"""
UNPAIRED_COLUMNS = ("prompt_ids", "completion_ids")
"""Columns of an unpaired preference, in addition to its label. The completion does not contain the
prompt.
"""
PROMPT_COLUMNS = ("prompt",)
"Column of a prompt that a model answers: int64 ids (little endian) as plain bytes."
_BESIDES_PROMPT = frozenset({"verified_answer", "vstar"})
"""Columns that a stream of prompts may have besides PROMPT_COLUMNS. A stream with others has texts,
such as `prompt` and `response`.
"""
LOSS_WEIGHTS = "loss_weights"
"""A further column of a conversation or of a packed row: float32, the loss weight of each of its
tokens; 0 for a token that is not trained.
"""
IGNORED_LABEL = -100
"The label that gives no loss, in torch, in LLM-Foundry and in Hugging Face's collators."
Ids = NDArray["np.int64"]


class Turn(NamedTuple):
    """The token ids of a prompt and of the response to it. A row of plain text is a response with
    an empty prompt.
    """

    prompt: Ids
    response: Ids


class Document(NamedTuple):
    """One document of a packed row (a row of several documents)."""

    ids: Ids
    is_trained: NDArray[np.bool_]


class PackedRow(NamedTuple):
    """The tokens of a packed row."""

    ids: Ids
    is_trained: NDArray[np.bool_]
    "False for the first token of each document, since nothing predicts it."
    starts: Ids
    "The position of each document's first token, ascending from 0."


def find_id_columns(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the columns that contain token ids: the first of the keys of LAYOUTS,
    such as ("tokens",), whose columns all exist. Return () if no key fits.

    Args:
        columns: the columns of a sample or a shard, by name.
    """
    for names in LAYOUTS:
        if all(map(columns.__contains__, names)):
            further_columns = columns.keys() - {*names}
            is_text = names == PROMPT_COLUMNS and not further_columns <= _BESIDES_PROMPT
            return () if is_text else names
    return ()


def has_images(columns: Mapping[str, Any]) -> bool:
    """Return whether the columns of a sample or a shard contain images. The model is then trained
    on more than the token ids.
    """
    return all(map(columns.__contains__, IMAGE_COLUMNS))


def decode_turns(sample: Sample, dtype: str = "int64") -> list[Turn]:
    """Return the turns of a sample. Each document of a packed row is a turn with an empty prompt.

    Raises MixRefused if the sample contains no token ids.

    Args:
        sample: the decoded sample.
        dtype: the dtype of the ids in columns of plain bytes.
    """
    names = find_id_columns(sample)
    if not names:
        raise MixRefused(
            f"the columns of this sample are {', '.join(sorted(sample))}, but the loader does not "
            "tokenize and needs token ids in the columns `tokens`, `turns`, or `input_ids` and "
            "`labels`; first convert the data with `mdsmix convert`."
        )
    return LAYOUTS[names](sample, dtype)


def _decode_stored_turns(sample: Sample, _: str) -> list[Turn]:
    """Return the turns in the column `turns`, a list of {"input_ids": [...], "labels": [...]}.

    Raises MixRefused if a turn lacks one of these keys.
    """
    try:
        turns = list[Turn]()
        for turn in sample["turns"]:
            prompt, response = (np.asarray(turn[side], np.int64) for side in SIDES)
            turns.append(Turn(prompt, response))
        return turns
    except (KeyError, TypeError):
        raise MixRefused(
            "a turn of this sample lacks input_ids or labels; convert the data again."
        ) from None


def decode_preference(sample: Sample) -> list[Ids]:
    """Return three arrays of ids: the prompt, the chosen answer and the rejected answer of a sample
    of a preference stream (`PREFERENCE_COLUMNS`).
    """
    return [decode_ids(sample[name], "<i8") for name in PREFERENCE_COLUMNS]


def _make_preference_turns(sample: Sample, _: str) -> list[Turn]:
    """Return a preference as two turns, so that its prompt occurs once: the prompt with the chosen
    answer, and an empty prompt with the rejected answer.
    """
    prompt, chosen, rejected = decode_preference(sample)
    return [Turn(prompt, chosen), Turn(_make_no_ids(), rejected)]


def decode_prompt(sample: Sample) -> Ids:
    """Return the ids of a sample of a stream of prompts (`PROMPT_COLUMNS`)."""
    return decode_ids(sample["prompt"], "<i8")


def _make_prompt_turns(sample: Sample, _: str) -> list[Turn]:
    """Return a prompt as one turn with an empty response."""
    return [Turn(decode_prompt(sample), _make_no_ids())]


def _make_pair_turns(sample: Sample, dtype: str) -> list[Turn]:
    """Return the turn of a finetuning sample with the columns `input_ids` (prompt) and `labels`
    (response), as a list of one.
    """
    prompt, response = (decode_ids(sample[side], dtype) for side in SIDES)
    return [Turn(prompt, response)]


def _make_unpaired_turns(sample: Sample, dtype: str) -> list[Turn]:
    """Return an unpaired preference as one turn: the prompt and its completion."""
    prompt, completion = (decode_ids(sample[name], dtype) for name in UNPAIRED_COLUMNS)
    return [Turn(prompt, completion)]


def _make_plain_turns(sample: Sample, dtype: str) -> list[Turn]:
    """Return a row of plain text as a list of one turn with an empty prompt."""
    return [Turn(_make_no_ids(), decode_ids(sample["tokens"], dtype))]


def _make_packed_turns(sample: Sample, _: str) -> list[Turn]:
    """Return a turn with an empty prompt for each document of a packed row (a row of several
    documents).
    """
    return [Turn(_make_no_ids(), document.ids) for document in split_documents(sample)]


def _make_no_ids() -> Ids:
    """Return int64 [0]: the ids of an empty prompt or response."""
    return np.empty(0, np.int64)


LAYOUTS: dict[tuple[str, ...], Callable[[Sample, str], list[Turn]]] = {
    TURNS: _decode_stored_turns,
    SIDES: _make_pair_turns,
    PLAIN: _make_plain_turns,
    PACKED_COLUMNS: _make_packed_turns,
    PREFERENCE_COLUMNS: _make_preference_turns,
    UNPAIRED_COLUMNS: _make_unpaired_turns,
    PROMPT_COLUMNS: _make_prompt_turns,
}
"""Names of columns with token ids -> function that returns the turns of a sample. A loader looks
for the columns in this order. Arguments of the function are the sample, and the dtype of columns
of plain bytes.
"""


def decode_packed_row(sample: Sample) -> PackedRow:
    """Return the tokens of a packed row. Raises MixRefused if its columns contradict each other."""
    ids, starts = (decode_ids(sample[name], "int64") for name in PACKED_COLUMNS)
    # Without the column loss_mask all tokens are trained; no id is negative.
    is_trained = ids >= 0
    if LOSS_MASK in sample:
        is_trained = decode_ids(sample[LOSS_MASK], "int64") > 0
    edges = np.append(starts, len(ids))
    ascend_from_zero = edges[0] == 0 and (np.diff(edges) > 0).all()
    if not ascend_from_zero:
        raise MixRefused(
            "the column `starts` of this packed row must contain the positions at which its "
            f"documents begin, ascending from 0, all below its {len(ids)} tokens, and does not; "
            "convert the data again."
        )
    if len(is_trained) != len(ids):
        raise MixRefused(
            f"the column loss_mask has {len(is_trained)} values for a packed row of {len(ids)} "
            "tokens; "
            "convert the data again."
        )
    is_trained[starts] = False  # nothing predicts a document's first token
    return PackedRow(ids, is_trained, starts)


def split_documents(sample: Sample) -> list[Document]:
    """Return the documents of a packed row. Raises MixRefused if its columns contradict each
    other.
    """
    row = decode_packed_row(sample)
    inner_starts = row.starts[1:]  # np.split needs no 0 for the first document
    ids_of_documents = np.split(row.ids, inner_starts)
    masks = np.split(row.is_trained, inner_starts)
    return [Document(ids, mask) for ids, mask in zip(ids_of_documents, masks, strict=True)]


def decode_ids(column: Any, dtype: str) -> Ids:
    """Return the ids in a sample's column. Raises MixRefused if its values are not ids.

    Args:
        column: the column's value: an array of integers, or plain bytes.
        dtype: the dtype of plain bytes.
    """
    if isinstance(column, bytes):
        column = np.frombuffer(column, dtype)
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "iu":
        actual = type(column).__name__
        if isinstance(column, np.ndarray):
            actual = f"an array of {column.dtype} with the shape {column.shape}"
        raise MixRefused(
            "a column of token ids must contain bytes or a row of integers, but this column "
            f"contains {actual}; convert the data again."
        )
    return column.astype(np.int64)


@frozen(slots=True)
class Tokens:
    """The token ids of n samples, and the lengths of their prompts and responses, as
    `decode_tokens` or `decode_sample_tokens` returns them.
    """

    ids: Ragged
    "One row for each sample: the ids of all its prompts and responses."
    prompts: NDArray[np.int64]
    """int64 [turns]: tokens of each prompt. A row of plain text is one turn with a prompt of 0
    tokens.
    """
    responses: NDArray[np.int64]
    "int64 [turns]: tokens of each response."
    turns: NDArray[np.int64]
    """int64 [n + 1]: sample i has the turns from number `turns[i]` up to, not including, number
    `turns[i + 1]`. Each document of a packed row is a turn with an empty prompt.
    """
    is_trained: NDArray[np.bool_] | None = None
    """bool [tokens]: whether each token of packed rows is trained; None for other samples, whose
    trained tokens follow from the target policies.
    """
    weights: NDArray[np.float32] | None = None
    "float32 [tokens]: the loss weight of each token; None if the samples have no weights."

    @property
    def trained(self) -> NDArray[np.int64] | None:
        """int64 [n]: the number of trained tokens of each packed row; None for other samples."""
        if self.is_trained is None:
            return None
        return np.add.reduceat(self.is_trained, self.ids.offsets[:-1], dtype=np.int64)

    @property
    def largest(self) -> NDArray[np.int64]:
        """int64 [n]: the largest id of each sample. To be used only if no sample is empty."""
        return np.maximum.reduceat(self.ids.values, self.ids.offsets[:-1]).astype(np.int64)


@frozen(slots=True)
class TrainedRows:
    """Rows as a loader gives them to the model, without padding."""

    ids: Ragged
    "The tokens of each row."
    is_trained: NDArray[np.bool_]
    """bool [tokens]: whether each token gives a loss. False for the first token of each document,
    since nothing predicts it.
    """
    starts: Ragged
    "int64: the positions in each row at which its documents begin, first 0."
    weights: NDArray[np.float32] | None = None
    """float32 [tokens]: the loss weight of each token, 0 if it gives no loss; None if the rows have
    no weights.
    """

    @staticmethod
    def of_one_document(
        ids: Ragged, is_trained: NDArray[np.bool_], weights: NDArray[np.float32] | None = None
    ) -> TrainedRows:
        """Return rows that contain one document each.

        Args:
            ids: the tokens of each row.
            is_trained: bool [tokens]: whether each token gives a loss. The flag of the first token
                of each row is cleared.
            weights: float32 [tokens]: the loss weight of each token, which counts only if the token
                gives a loss; None: the rows have no weights.
        """
        is_trained[ids.offsets[:-1]] = False  # nothing predicts it
        count = len(ids)
        starts = Ragged.from_lengths(np.zeros(count, np.int64), np.ones(count, np.int64))
        if weights is not None:
            weights = np.where(is_trained, weights, np.float32(0))
        return TrainedRows(ids, is_trained, starts, weights)


@frozen(slots=True)
class PreferenceRows:
    """The token ids of preferences, int64, one row for each preference."""

    prompts: Ragged
    chosen: Ragged
    "The chosen answers, without the prompts."
    rejected: Ragged
    rewards: Mapping[str, NDArray[np.float64]]
    "Column -> float64 [n]: the rewards of the answers; empty if the stream stores none."


@frozen(slots=True)
class UnpairedRows:
    """The token ids and labels of unpaired preferences, one row for each."""

    prompts: Ragged
    completions: Ragged
    "The completions, without the prompts."
    labels: NDArray[np.bool_]
    "bool [n]: whether each completion is desirable."


def find_token_columns(shard: Shard) -> tuple[str, ...]:
    """Return the names of the shard's columns whose ids `decode_tokens` decodes. Return () if there
    are no such columns, or if their encodings do not fix an integer dtype.
    """
    names = find_id_columns(shard.columns)
    if names == TURNS:
        return names if shard.columns["turns"] == "json" else ()
    if names == PROMPT_COLUMNS:
        return names if shard.columns["prompt"] == "bytes" else ()
    if names == PACKED_COLUMNS and LOSS_MASK in shard.columns:
        names = (*PACKED_COLUMNS, LOSS_MASK)
    codecs = [find_codec(shard.columns[name]) for name in names]
    are_ids = all(codec.is_array and np.dtype(codec.dtype).kind in "iu" for codec in codecs)
    # Prompts and responses are joined, so their columns must have one dtype. The columns of packed
    # rows are decoded one by one.
    has_one_dtype = len({codec.dtype for codec in codecs}) == 1 or STARTS in names
    return names if are_ids and has_one_dtype else ()


def decode_tokens(shard: Shard, samples: Ragged) -> Tokens | None:
    """Return the ids of samples. Return None if there are no samples, or if `find_token_columns`
    finds no columns.

    Raises ValueError, LookupError or TypeError if the bytes contradict the columns.

    Args:
        shard: the shard's entry in the index.
        samples: the bytes of each sample.
    """
    names = find_token_columns(shard)
    if not names or not len(samples):
        return None
    columns = {
        name: cells
        for name, cells in split_columns(shard, samples)
        if name in (*names, LOSS_WEIGHTS)
    }
    tokens = _decode_columns(shard, names, columns)
    if LOSS_WEIGHTS not in columns:
        return tokens
    weights = decode_arrays(columns[LOSS_WEIGHTS], find_codec(shard.columns[LOSS_WEIGHTS]))
    if (weights.lengths != tokens.ids.lengths).any():
        raise ValueError("the column loss_weights of a row has more or fewer values than tokens")
    return replace(tokens, weights=weights.values)


def _decode_columns(shard: Shard, names: Sequence[str], columns: Mapping[str, Ragged]) -> Tokens:
    """Return the ids of samples.

    Args:
        shard: the shard's entry in the index.
        names: the columns of ids, as `find_token_columns` returns them.
        columns: column -> the bytes of each sample's value.
    """
    if names == TURNS:
        return _decode_tokens_of_turns(columns["turns"])
    if names == PROMPT_COLUMNS:
        return _decode_tokens_of_prompts(columns["prompt"])
    arrays = [decode_arrays(columns[name], find_codec(shard.columns[name])) for name in names]
    if STARTS in names:
        return _decode_tokens_of_packed_rows(*arrays)
    # The last array has the responses. In front of it are the prompts, if the columns are
    # input_ids and labels.
    responses = arrays[-1].lengths
    prompts = arrays[0].lengths if len(arrays) == 2 else np.zeros_like(responses)
    return Tokens(
        ids=Ragged.zip(arrays),
        prompts=prompts,
        responses=responses,
        turns=np.arange(len(prompts) + 1),  # each sample is one turn
    )


def decode_sample_tokens(sample: Sample) -> Tokens:
    """Return the ids of one decoded sample. Raises MixRefused if its columns contain no ids."""
    turns = decode_turns(sample)
    # Prompt and response alternate in `sides`: prompt, response, prompt, response ...
    sides = Ragged.from_rows([side for turn in turns for side in turn], np.int64)
    ids = Ragged.from_lengths(sides.values, np.array([len(sides.values)]))
    return Tokens(
        ids=ids,
        prompts=sides.lengths[0::2],
        responses=sides.lengths[1::2],
        turns=np.array([0, len(turns)]),
    )


def decode_preferences(shard: Shard, samples: Ragged) -> PreferenceRows:
    """Return the ids of samples with the columns `prompt`, `chosen` and `rejected`.

    Raises ValueError or KeyError if the bytes contradict the columns.

    Args:
        shard: the shard's entry in the index.
        samples: the bytes of each sample.
    """
    columns = dict(split_columns(shard, samples))
    sides = [_read_int64_bytes(name, columns[name]) for name in PREFERENCE_COLUMNS]
    rewards = {}
    for name, cells in columns.items():
        if shard.columns[name] == "float64":
            rewards[name] = cells.values.view("<f8")
    prompts, chosen, rejected = sides
    return PreferenceRows(prompts, chosen, rejected, rewards)


def decode_unpaired(shard: Shard, samples: Ragged) -> UnpairedRows:
    """Return the ids and labels of samples with the columns of unpaired preferences.

    Raises ValueError or KeyError if the bytes contradict the columns.

    Args:
        shard: the shard's entry in the index.
        samples: the bytes of each sample.
    """
    columns = dict(split_columns(shard, samples))
    prompts, completions = (
        decode_arrays(columns[name], find_codec(shard.columns[name])) for name in UNPAIRED_COLUMNS
    )
    return UnpairedRows(prompts, completions, columns["label"].values.view(np.int8) > 0)


def _decode_tokens_of_packed_rows(
    rows: Ragged, starts_of_rows: Ragged, mask: Ragged | None = None
) -> Tokens:
    """Return the ids of packed rows.

    Raises ValueError if the starts of a row's documents do not ascend from 0 inside the row, or if
    its mask has another length than the row.

    Args:
        rows: the ids of each row.
        starts_of_rows: for each row, the positions at which its documents begin.
        mask: for each row, 1 for each trained token; None: all tokens may be trained.
    """
    if mask and (mask.lengths != rows.lengths).any():
        raise ValueError("the column loss_mask of a row has more or fewer values than tokens")
    # Turn positions in a row into positions in the tokens of all rows.
    row_starts = rows.offsets[:-1]
    offsets_of_rows = np.repeat(row_starts, starts_of_rows.lengths)
    starts = starts_of_rows.values.astype(np.int64) + offsets_of_rows
    ends = np.append(starts[1:], len(rows.values))
    # The first document of each row must begin where the row begins.
    begin_with_rows = np.array_equal(starts[starts_of_rows.offsets[:-1]], row_starts)
    has_row_without_starts = (starts_of_rows.lengths == 0).any()
    if has_row_without_starts or not begin_with_rows or (starts >= ends).any():
        raise ValueError(
            "the column starts of a packed row does not ascend from 0 to positions inside the row"
        )
    is_trained = mask.values > 0 if mask else np.ones(len(rows.values), bool)
    is_trained[starts] = False  # a document's first token is never trained, whatever the mask is
    lengths = ends - starts
    return Tokens(
        ids=rows,
        prompts=np.zeros_like(lengths),  # each document is a response with an empty prompt
        responses=lengths,
        turns=starts_of_rows.offsets,
        is_trained=is_trained,
    )


def _read_int64_bytes(name: str, cells: Ragged) -> Ragged:
    """Return the ids in a column of plain bytes. Raises ValueError if a value does not have 8 bytes
    for each id.

    Args:
        name: the name of the column.
        cells: the bytes of each value.
    """
    if (cells.lengths % 8).any():
        raise ValueError(
            f"a value of the column {name} is not an array of int64 ids: its bytes are not a "
            "multiple of 8"
        )
    return Ragged(cells.values.view("<i8"), cells.offsets // 8)


def _decode_tokens_of_prompts(cells: Ragged) -> Tokens:
    """Return the ids in the column of prompts, each as one turn with an empty response. Raises
    ValueError if a value is not a row of int64 ids.
    """
    ids = _read_int64_bytes("prompt", cells)
    return Tokens(
        ids=ids,
        prompts=ids.lengths,
        responses=np.zeros(len(ids), np.int64),
        turns=np.arange(len(ids) + 1),  # each sample is one turn
    )


def _decode_tokens_of_turns(cells: Ragged) -> Tokens:
    """Return the ids in a column `turns`.

    Args:
        cells: for each sample a JSON list of turns: [{"input_ids": [...], "labels": [...]}, ...].
    """
    samples = [*map(orjson.loads, cells.slices())]
    # Prompt and response alternate in `sides`: prompt, response, prompt, response ...
    all_turns = chain.from_iterable(samples)
    sides = Ragged.from_rows((turn[side] for turn in all_turns for side in SIDES), np.int64)
    turns = np.cumsum([0, *map(len, samples)])
    # A turn has two sides, so a sample that begins with turn n begins with side 2 n.
    ids = Ragged(sides.values, sides.offsets[2 * turns])
    return Tokens(ids=ids, prompts=sides.lengths[0::2], responses=sides.lengths[1::2], turns=turns)
