"""One sample of a stream -> one row to train on: token ids and labels, joined, ended with EOS and
cut.

The sample's own columns decide the rules, so streams of both kinds can be mixed. The rules are
those of LLM-Foundry 0.22 (its text and finetuning collators), applied to whole arrays: a row of
2,048 tokens costs a dozen numpy calls and no loop over tokens. Each sample is checked by itself, in
the worker that reads it, so an error can name its shard.
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
from mdsmix.frozen import frozen
from mdsmix.load.stored_rows import StoredRow
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import (
    IGNORED_LABEL,
    LOSS_WEIGHTS,
    PACKED_COLUMNS,
    PLAIN,
    TURNS,
    Turn,
    decode_packed_row,
    decode_turns,
    find_id_columns,
    has_images,
)

Tokens = NDArray[np.int64]
Weights = NDArray[np.float32]


@frozen(kw_only=True, slots=True)
class TokenIds:
    """The facts about a tokenizer that a loader needs."""

    eos: int | None
    pad: int | None = None
    bos: int | None = None
    padding_side: str = "right"
    "left or right."

    @property
    def fill(self) -> int | None:
        """The id of padding: EOS if the tokenizer has no padding token, as in LLM-Foundry."""
        return self.eos if self.pad is None else self.pad


@frozen(kw_only=True)
class RowRules(Targets):
    """The rules for making rows from samples: which tokens are trained, the tokenizer's ids, and
    how documents are separated.
    """

    ids: TokenIds
    token_encoding_type: str = "int64"
    "The dtype of tokens in a column of plain bytes."
    separator: int | None = None
    """The id of the token between the documents of a pretraining row (`eos_token_id` or
    `bos_token_id` of the loader); None if the loader names neither.
    """
    separator_starts: bool = False
    "True if the separator is a BOS, which belongs to the document after it."
    image: int | None = None
    "The id of an image's placeholder in the tokens; None if the loader has no processor."


@dataclass(slots=True)
class RowImages:
    """The images of a row, before a processor has seen them."""

    images: Sequence[Any]
    "PIL images, opened and not decoded."
    sizes: Sequence[Sequence[int]]
    "Height and width of each, after rotation."
    spots: Tokens
    "The position of each image in input_ids."
    where: str = ""
    "Stream, shard and row, for messages."


class TrainingRow(NamedTuple):
    """A row before padding. Under `decoder_only_format: false`, input_ids is the encoder's input
    and labels is the target.
    """

    input_ids: Tokens
    labels: Tokens
    """The ids to predict, with IGNORED_LABEL for tokens that are not trained. As long as input_ids,
    except for an encoder-decoder.
    """
    documents: Tokens | None = None
    "The number of each token's document, from 0; None if the row is one document."
    pictures: RowImages | None = None
    """The images of the row. Such a row may be longer than max_seq_len: it is cut after its images
    have become tokens.
    """
    outputs: Mapping[str, Tokens] = {}
    "Further outputs of a processor: name -> one value per token."
    weights: Weights | None = None
    """float32: the loss weight of each token; None if the sample has none: then each trained token
    has the weight 1.
    """
    stream: int = 0
    "The number of the row's stream in the mix. It is set only if batches have stream ids."


def make_training_row(sample: Sample, rules: RowRules) -> TrainingRow:
    """Turn a decoded MDS sample into a row to train on. The sample's columns decide how.

    Raises MixRefused if the sample does not fit the rules. The caller puts stream, shard and row
    before the message, which begins with "this row".
    """
    columns = find_id_columns(sample)
    end = rules.max_seq_len
    if columns in (PACKED_COLUMNS, PLAIN) and not rules.decoder_only_format:
        raise MixRefused(
            "this row is a pretraining or packed row, which has no input for an encoder; set "
            "decoder_only_format: true, or take the row's stream out of the training YAML."
        )
    if columns == PACKED_COLUMNS:
        return _make_packed_row(sample, rules)
    turns = decode_turns(sample, rules.token_encoding_type)
    if columns == PLAIN:
        return _make_plain_row(turns[0].response[:end], rules)
    is_pictured = has_images(sample)
    if is_pictured:
        refuse_bare_placeholders(rules)
    # Prompt and response in columns of their own (input_ids and labels) are cut one by one, before
    # EOS is added. Conversations and rows with images or loss weights are cut as a whole, at the
    # end.
    if not is_pictured and columns != TURNS and LOSS_WEIGHTS not in sample:
        turn = turns[0]
        turns = [Turn(turn.prompt[:end], turn.response[:end])]
    ended_turns = _end_with_eos(turns, rules)
    if not rules.decoder_only_format:
        if LOSS_WEIGHTS in sample:
            raise MixRefused(
                "this row has loss weights, which rows of an encoder-decoder cannot have; set "
                "decoder_only_format: true, or take the row's stream out of the training YAML."
            )
        return _make_encoder_decoder_row(ended_turns, rules)
    row = _make_decoder_row(ended_turns, rules)
    refuse_negative_ids(row.input_ids)
    if LOSS_WEIGHTS in sample:
        row = row._replace(weights=_read_weights(sample, row.input_ids.size, spare=1))
    if is_pictured and sample["sizes"]:  # the row is cut later, with the tokens of its images
        return row._replace(pictures=find_pictures(row.input_ids, sample, rules))
    return cut_row(row, rules)


def refuse_bare_placeholders(rules: RowRules) -> None:
    """Raise MixRefused if the loader has no processor, which a row with images needs."""
    if rules.image is None:
        raise MixRefused(
            "this row has images, but the loader has no processor, so its tokens would contain "
            "only a bare placeholder for each image; set train_loader.dataset.processor to the "
            "folder or name of the model's processor, or take the stream out of the mix."
        )


def make_named_row(stored: StoredRow, rules: RowRules, numbers_stream: bool) -> TrainingRow:
    """Turn a stored sample into a row to train on.

    Raises MixRefused if the sample does not fit the rules, Unreachable if it does not decode. Both
    name stream, shard and row.

    Args:
        numbers_stream: set the number of the row's stream, which batches with stream ids need.
    """
    row = stored.decode(lambda sample: make_training_row(sample, rules))
    if row.pictures:  # they are decoded later
        row.pictures.where = stored.name
    return row._replace(stream=stored.source.stream_number) if numbers_stream else row


def find_pictures(ids: Tokens, sample: Sample, rules: RowRules) -> RowImages:
    """Return the images of a sample, with the position of each in the row's token ids.

    Raises MixRefused if there are more or fewer images than image tokens.
    """
    spots = np.flatnonzero(ids == rules.image)
    if not len(spots) == len(sample["sizes"]) == len(sample["images"]):
        raise MixRefused(
            f"this row has {len(sample['images'])} images, but {len(spots)} tokens with the id "
            f"{rules.image}, the processor's placeholder for an image; set "
            "train_loader.dataset.processor to the processor that the stream was converted for."
        )
    return RowImages(sample["images"], sample["sizes"], spots)


def cut_row(row: TrainingRow, rules: RowRules, spare: int = 1) -> TrainingRow:
    """Cut a row to max_seq_len tokens. Raises MixRefused if nothing of it is left to train on.

    Args:
        spare: tokens that are cut without a warning, such as the EOS that was just added to a full
            pretraining chunk in finetuning columns.
    """
    length = row.input_ids.size
    end = rules.max_seq_len
    if length <= end:
        return row
    _refuse_untrained(row.labels[:end], rules)
    if length > end + spare:
        _warn_of_cuts(end)
    return row._replace(
        input_ids=row.input_ids[:end],
        labels=row.labels[:end],
        weights=None if row.weights is None else row.weights[:end],
        outputs={key: values[:end] for key, values in row.outputs.items()},
    )


def refuse_negative_ids(input_ids: Tokens) -> None:
    """Raise MixRefused if an id is negative, such as -100."""
    if input_ids.size and input_ids.min() < 0:
        raise MixRefused(
            f"this row contains the token id {input_ids.min()}, which no vocabulary has; if its "
            "labels are its input_ids with -100 for untrained tokens (as Hugging Face writes "
            "them), write the prompt as input_ids and the answer as labels, or convert the data "
            "with `mdsmix convert`."
        )


def _refuse_untrained(labels: Tokens, rules: RowRules) -> None:
    """Raise MixRefused if no label is trained."""
    if (labels == IGNORED_LABEL).all():
        raise MixRefused(
            f"this row, cut to max_seq_len {rules.max_seq_len}, has nothing left to train on "
            f"under target_prompts: {rules.target_prompts} and target_responses: "
            f"{rules.target_responses}; convert the data with these settings, which leaves such "
            "records out."
        )


def _make_packed_row(sample: Sample, rules: RowRules) -> TrainingRow:
    """Make a row of several documents. The conversion decided its labels; the run's target policies
    do not change them.
    """
    ids, is_trained, starts = decode_packed_row(sample)  # starts: first token of each document
    refuse_negative_ids(ids)
    labels = np.where(is_trained, ids, IGNORED_LABEL)
    weights = _read_weights(sample, ids.size) if LOSS_WEIGHTS in sample else None
    row = cut_row(TrainingRow(ids, labels, weights=weights), rules, spare=0)
    _refuse_untrained(row.labels, rules)
    lengths = np.diff(np.append(starts, ids.size))
    documents = np.repeat(np.arange(len(starts)), lengths)
    return row._replace(documents=documents[: row.input_ids.size])


def _read_weights(sample: Sample, length: int, spare: int = 0) -> Weights:
    """Return the loss weight of each token of a row. An EOS that was appended has the weight of the
    token before it.

    Raises MixRefused if there are not as many weights as tokens.

    Args:
        sample: the decoded sample.
        length: the tokens of the row.
        spare: how many tokens may have been appended.
    """
    weights = np.asarray(sample[LOSS_WEIGHTS], np.float32)
    missing = length - weights.size
    if not 0 <= missing <= spare or not weights.size:
        raise MixRefused(
            f"the column {LOSS_WEIGHTS} of this row has {weights.size} values for {length} tokens; "
            "convert the data again."
        )
    return np.append(weights, weights[-1:].repeat(missing))


def _make_plain_row(tokens: Tokens, rules: RowRules) -> TrainingRow:
    """Make a pretraining row: every token is a label, except the tokenizer's own padding token, as
    in LLM-Foundry. Separators divide it into documents.
    """
    refuse_negative_ids(tokens)
    labels = tokens
    documents = None
    if rules.ids.pad is not None:
        is_pad = tokens == rules.ids.pad
        if is_pad.any():
            labels = np.where(is_pad, IGNORED_LABEL, tokens)
    if rules.separator is not None and tokens.size:
        documents = number_plain_documents(tokens, rules)
    return TrainingRow(tokens, labels, documents)


def number_plain_documents(tokens: Tokens, rules: RowRules) -> Tokens:
    """Return the number of each token's document, from 0, in a pretraining row with separators. The
    row has at least one token.
    """
    is_separator = tokens == rules.separator
    # The number of separators up to each token, itself included.
    count = is_separator.cumsum()
    # 5, BOS, 6, BOS, 7 -> 0, 1, 1, 2, 2. The first document is 0 also if BOS begins it.
    # 5, EOS, 6, EOS, 7 -> 0, 0, 1, 1, 2, since an EOS belongs to the document that it ends.
    not_counted = count[0] if rules.separator_starts else is_separator
    return np.asarray(count - not_counted)


def _end_with_eos(turns: Sequence[Turn], rules: RowRules) -> Sequence[Turn]:
    """Append EOS to the last response if it does not end with EOS.

    Raises MixRefused if there are no turns, or the last response is empty.
    """
    eos = rules.ids.eos
    if not turns or not turns[-1].response.size:
        raise MixRefused(
            "this row has no turns, or its last response is empty, so there is nothing to train "
            "on; convert the data again, which leaves such records out."
        )
    *earlier_turns, last_turn = turns
    if eos is None or last_turn.response[-1] == eos:
        return turns
    return [*earlier_turns, Turn(last_turn.prompt, np.append(last_turn.response, eos))]


def _make_encoder_decoder_row(turns: Sequence[Turn], rules: RowRules) -> TrainingRow:
    """Make the row of an encoder-decoder model: its input is everything before the last response,
    and its target is the last response.
    """
    *earlier_turns, last_turn = turns
    context = np.concatenate([*chain(*earlier_turns), last_turn.prompt])
    refuse_negative_ids(context)
    refuse_negative_ids(last_turn.response)
    return TrainingRow(
        _cut_before_eos(context, rules),
        _cut_before_eos(last_turn.response, rules),
    )


def _make_decoder_row(turns: Sequence[Turn], rules: RowRules) -> TrainingRow:
    """Join prompts and responses end to end. The labels are the ids, or IGNORED_LABEL for tokens
    that target_prompts and target_responses do not train.
    """
    input_ids = np.concatenate([*chain(*turns)])
    labels = input_ids.copy()
    start = 0
    for turn in turns:
        trains_prompt = rules.trains_prompt(turn.prompt.size)
        trains_response = rules.trains_response(turn is turns[-1])
        for side, is_trained in ((turn.prompt, trains_prompt), (turn.response, trains_response)):
            # A slice of a copy takes 40 us a pair; an array for each side took 49.
            if not is_trained:
                labels[start : start + side.size] = IGNORED_LABEL
            start += side.size
    return TrainingRow(input_ids, labels)


def _cut_before_eos(tokens: Tokens, rules: RowRules) -> Tokens:
    """Cut to max_seq_len tokens. Tokens that were cut still end with EOS."""
    if tokens.size <= rules.max_seq_len:
        return tokens
    _warn_of_cuts(rules.max_seq_len)
    if rules.ids.eos is None:
        return tokens[: rules.max_seq_len]
    return np.append(tokens[: rules.max_seq_len - 1], rules.ids.eos)


last_warned = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
"""int64 [1]: the max_seq_len that was last warned of. Forked processes share it: workers, and the
passes of `mdsmix bench`. Other workers receive it with their dataset.
"""


def has_warned_of_cuts(max_seq_len: int) -> bool:
    """Return whether this run has warned that rows are cut."""
    return int(last_warned.item()) == max_seq_len


def _warn_of_cuts(max_seq_len: int) -> None:
    """Warn that rows are cut: once a run, not once in each of its workers."""
    if has_warned_of_cuts(max_seq_len):
        return
    last_warned.fill_(max_seq_len)
    warnings.warn(
        f"The loader cuts rows that are longer than max_seq_len {max_seq_len}: `mdsmix check` on "
        "the training YAML counts them. To train all tokens, raise max_seq_len, or convert the "
        "streams with this max_seq_len.",
        stacklevel=2,
    )


def make_position_ids(sequence_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [batch, n]: the position of each token in its document.

    Args:
        sequence_id: int64 [batch, n]; equal values next to each other are one document.

    Example: 0, 0, 0, 1, 1 -> 0, 1, 2, 0, 1.
    """
    # Whether a token begins a document; the first of each row does.
    begins = np.ones(sequence_id.shape, bool)
    np.not_equal(sequence_id[:, 1:], sequence_id[:, :-1], out=begins[:, 1:])
    # The batch as one line: where each document begins, and for each token where its own does.
    # A running maximum of the starts takes 60 us for 8 rows of 2,048, this 25.
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, sequence_id.size))
    positions = np.arange(sequence_id.size) - np.repeat(starts, lengths)
    return positions.reshape(sequence_id.shape)


def document_mask(sequence_id: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the attention mask of a causal model whose documents do not attend to each other.

    The mask has n * n numbers for each row, so prefer an attention kernel that reads position_ids
    if the model has one.

    Args:
        sequence_id: int64 [batch, n], -1 for padding, as in a batch.
        dtype: of the model's activations.

    Returns:
        dtype [batch, 1, n, n], to be added to the scores: 0 if token i may attend to token j,
        otherwise the least number of `dtype`.

    >>> from mdsmix.load import document_mask
    >>> (document_mask(torch.tensor([[0, 0, 1]])) == 0).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    may_attend = (sequence_id[:, :, None] == sequence_id[:, None, :]).tril()
    mask = torch.zeros(may_attend.shape, dtype=dtype, device=sequence_id.device)
    return mask.masked_fill(~may_attend, torch.finfo(dtype).min)[:, None]
