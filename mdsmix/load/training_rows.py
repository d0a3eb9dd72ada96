"""One sample of a stream -> one row to train on: token ids and labels, stitched, ended and cut.

The sample's own columns say what it is, so streams of both kinds can be mixed. The rules are those
of LLM-Foundry 0.22 (its text and finetuning collators), worked on whole arrays: a row of 2,048
tokens costs a dozen numpy calls, no loop over tokens. The price is that a sample is judged alone,
in the worker that reads it, which is also why a refusal can name its shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mdsmix.encode.labels import Targets
from mdsmix.errors import MixRefused
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import (
    IGNORED_LABEL,
    PACKED_COLUMNS,
    Turn,
    decode_packed_row,
    decode_turns,
    find_id_columns,
    has_images,
)

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """The parts of a tokenizer that a loader needs."""

    eos: int | None
    pad: int | None = None
    bos: int | None = None
    padding_side: str = "right"
    "left or right."

    @property
    def fill(self) -> int | None:
        """The id of padding: EOS where the tokenizer has no padding token, as in LLM-Foundry."""
        return self.eos if self.pad is None else self.pad


@dataclass(frozen=True, kw_only=True)
class RowRules(Targets):
    """How samples become rows: what is trained of them, the tokenizer's ids, and how plain bytes
    are read.
    """

    ids: TokenIds
    token_encoding_type: str = "int64"
    "The dtype of tokens that lie in a column of plain bytes."
    separator: int | None = None
    """The token between the documents of a pretraining row (`eos_token_id` or `bos_token_id` of the
    loader).
    """
    separator_starts: bool = False
    "True: it is a BOS, which belongs to the document after it."
    image: int | None = None
    "The id that stands for an image in the tokens; None where the loader has no processor."


@dataclass(slots=True)
class RowImages:
    """The images of a row, before a processor has seen them."""

    images: Sequence[Any]
    "PIL images, opened and not decoded."
    sizes: Sequence[Sequence[int]]
    "Height and width of each as it is seen."
    spots: Tokens
    "The position of each image in input_ids."
    where: str = ""
    "Stream, shard and row, for errors."


class TrainingRow(NamedTuple):
    """A row before padding. Under `decoder_only_format: false` the two arrays are encoder input and
    target.
    """

    input_ids: Tokens
    labels: Tokens
    "The same length as input_ids (decoder-only)."
    documents: Tokens | None = None
    "The number of each token's document, from 0; None where the row is one document."
    pictures: RowImages | None = None
    """The images of the row. Such a row may be longer than max_seq_len: it is cut after its images
    have become tokens.
    """
    outputs: Mapping[str, Tokens] = {}
    "Further outputs of a processor: name -> one value per token."


def make_row(sample: Sample, rules: RowRules) -> TrainingRow:
    """The row of a decoded MDS sample; MixRefused says why there is none (the caller knows stream
    and shard).
    """
    layout, end = find_id_columns(sample), rules.max_seq_len
    if layout in (PACKED_COLUMNS, ("tokens",)) and not rules.decoder_only_format:
        raise MixRefused(
            "it is a pretraining or packed row, which has no encoder input; set decoder_only_format: true or leave its stream out."
        )
    if layout == PACKED_COLUMNS:
        return _packed(sample, rules)
    turns = decode_turns(sample, rules.token_encoding_type)
    if layout == ("tokens",):
        return _plain(turns[0].response[:end], rules)
    if is_pictured := has_images(sample):
        if rules.image is None:
            raise MixRefused(
                "it has images, each of which is one bare placeholder in its tokens, and no processor turns them into what a model sees; "
                "set train_loader.dataset.processor to the folder or name of the model's, or take its stream out of the mix."
            )
    elif layout != ("turns",):
        turns = [Turn(*(side[:end] for side in turns[0]))]
    ended = _ended(turns, rules)
    if not rules.decoder_only_format:
        *before, (prompt, target) = ended
        context = np.concatenate([*chain(*before), prompt])
        _must_be_ids(context)
        _must_be_ids(target)
        return TrainingRow(_cut_ended(context, rules), _cut_ended(target, rules))
    row = _decoder_only(ended, rules)
    _must_be_ids(row.input_ids)
    if is_pictured and sample["sizes"]:
        return _pictured(row, sample, rules)
    return cut_row(row, rules)


def _pictured(row: TrainingRow, sample: Sample, rules: RowRules) -> TrainingRow:
    """The row with the images of its sample, whose tokens it is cut with later."""
    spots = np.flatnonzero(row.input_ids == rules.image)
    if not len(spots) == len(sample["sizes"]) == len(sample["images"]):
        raise MixRefused(
            f"it has {len(sample['images'])} images and {len(spots)} tokens with the id {rules.image}, which the processor expands; name "
            "the processor that the stream was converted for."
        )
    return row._replace(pictures=RowImages(sample["images"], sample["sizes"], spots))


def cut_row(row: TrainingRow, rules: RowRules, spare: int = 1) -> TrainingRow:
    """The row with max_seq_len tokens at most; MixRefused where nothing of it is left to train on.
    `spare`: tokens that are cut without a warning, as the EOS that was just added to a full
    pretraining chunk in finetuning columns.
    """
    whole, end = row.input_ids.size, rules.max_seq_len
    if whole <= end:
        return row
    _must_train(row.labels[:end], rules)
    if whole > end + spare:
        _warn_of_cuts(end)
    return row._replace(
        input_ids=row.input_ids[:end],
        labels=row.labels[:end],
        outputs={key: values[:end] for key, values in row.outputs.items()},
    )


def _must_be_ids(input_ids: Tokens) -> None:
    if input_ids.size and input_ids.min() < 0:
        raise MixRefused(
            f"it contains the id {input_ids.min()}, which no vocabulary has; if its labels are input_ids masked by -100 (Hugging "
            "Face's form), write the prompt as input_ids and the answer as labels, or convert the data with `mdsmix convert`."
        )


def _must_train(labels: Tokens, rules: RowRules) -> None:
    if (labels == IGNORED_LABEL).all():
        raise MixRefused(
            f"at max_seq_len {rules.max_seq_len} it has nothing left to train on under target_prompts: {rules.target_prompts} "
            f"and target_responses: {rules.target_responses}; convert the data with these settings, which leaves such records out."
        )


def _packed(sample: Sample, rules: RowRules) -> TrainingRow:
    """A row of several documents, whose labels were settled by the conversion: the run's policies
    change none.
    """
    ids, trained, starts = decode_packed_row(sample)
    row = cut_row(TrainingRow(ids, np.where(trained, ids, IGNORED_LABEL)), rules, spare=0)
    _must_train(row.labels, rules)
    documents = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, ids.size)))
    return row._replace(documents=documents[: row.input_ids.size])


def _plain(tokens: Tokens, rules: RowRules) -> TrainingRow:
    """A pretraining row: every token is a label but the tokenizer's own padding token, as in
    LLM-Foundry. Its separators part documents.
    """
    _must_be_ids(tokens)
    labels, documents = tokens, None
    if rules.ids.pad is not None and (is_pad := tokens == rules.ids.pad).any():
        labels = np.where(is_pad, IGNORED_LABEL, tokens)
    if rules.separator is not None and tokens.size:
        is_separator = tokens == rules.separator
        count = is_separator.cumsum()
        documents = count - (count[0] if rules.separator_starts else is_separator)
    return TrainingRow(tokens, labels, documents)


def _ended(turns: Sequence[Turn], rules: RowRules) -> Sequence[Turn]:
    """The turns, the last response ended by EOS where it is not."""
    eos = rules.ids.eos
    if not turns or (eos is not None and not turns[-1].response.size):
        raise MixRefused(
            "it holds no turns or its last response is empty, so there is nothing to learn from it; convert the data again, which leaves such "
            "records out."
        )
    *before, (prompt, response) = turns
    if eos is None or response[-1] == eos:
        return turns
    return [*before, Turn(prompt, np.append(response, eos))]


def _decoder_only(turns: Sequence[Turn], rules: RowRules) -> TrainingRow:
    """Prompts and responses end to end; labels that no policy trains on are IGNORED."""
    input_ids = np.concatenate([*chain(*turns)])
    labels, start = input_ids.copy(), 0
    for turn in turns:
        trains = rules.trains_prompt(turn.prompt.size), rules.trains_response(turn is turns[-1])
        for side, is_trained in zip(turn, trains, strict=True):
            # A slice of a copy: 40 us a pair where an array for each side took 49.
            if not is_trained:
                labels[start : start + side.size] = IGNORED_LABEL
            start += side.size
    return TrainingRow(input_ids, labels)


def _cut_ended(tokens: Tokens, rules: RowRules) -> Tokens:
    """At most max_seq_len tokens; a side that was cut still ends in EOS."""
    if tokens.size <= rules.max_seq_len:
        return tokens
    _warn_of_cuts(rules.max_seq_len)
    if rules.ids.eos is None:
        return tokens[: rules.max_seq_len]
    return np.append(tokens[: rules.max_seq_len - 1], rules.ids.eos)


last_warned = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
"""int64 [1]: the max_seq_len that was warned of last. Forked processes share it: workers, and the
passes of `mdsmix bench`. Other workers get it with their dataset.
"""


def _warn_of_cuts(max_seq_len: int) -> None:
    """Warn that rows are cut: once a run, not once in each of its workers."""
    if last_warned.item() == max_seq_len:
        return
    last_warned.fill_(max_seq_len)
    warnings.warn(
        f"Rows longer than max_seq_len {max_seq_len} are cut; `mdsmix check` counts them.",
        stacklevel=2,
    )


def make_position_ids(sequence_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [batch, n]: the place of each token in its document, a run of one sequence_id."""
    columns = np.arange(sequence_id.shape[1])
    begins = np.diff(sequence_id, prepend=-2) != 0
    return np.asarray(columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1))


def document_mask(sequence_id: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The attention mask of a causal model in which no document sees another.

    Args:
        sequence_id: int64 [batch, n], -1 for padding, as batches have it.
        dtype: of the model's activations.

    Returns:
        dtype [batch, 1, n, n], to be added to the scores: 0 where token i may look at token j, else
        the least number of `dtype`.
        It takes n * n numbers a row, so prefer a kernel that reads position_ids where the model has
        one.

    >>> from mdsmix.load import document_mask
    >>> (document_mask(torch.tensor([[0, 0, 1]])) == 0).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    sees = (sequence_id[:, :, None] == sequence_id[:, None, :]).tril()
    mask = torch.zeros(sees.shape, dtype=dtype, device=sequence_id.device)
    return mask.masked_fill(~sees, torch.finfo(dtype).min)[:, None]
