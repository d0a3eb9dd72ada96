"""Samples as every kind of stream returns them: columns and totals, and a reason for each record
without a sample.

A finetuning sample is stored in one of three layouts:
- Turns: JSON with all tokens, as Foundry's converter stores them.
- A pair: a context and a target, in a third of the bytes. Tokens beyond max_seq_len are not stored,
  but the collator makes the same batch. This includes the EOS that it writes at the end of a
  truncated context of an encoder-decoder.
- A document of a packed row. EOS, target policies and truncation are applied before it is stored,
  since the loader cannot distinguish the samples of a packed row. The tests compare documents with
  the collator's rule, token by token (`tests/test_encode_labels.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import orjson

from mdsmix.encode.labels import Flags, Labels, Lengths, Turns
from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.ragged import Interleaved, Ragged
from mdsmix.shards.counts import Totals, count_by_length
from mdsmix.shards.token_ids import LOSS_WEIGHTS, SIDES
from mdsmix.tokenizer.card import Tokenizer


@frozen(kw_only=True, slots=True)
class Encoded:
    """The samples of one batch of records, in the order of the records."""

    columns: Mapping[str, Ragged]
    """Column name -> one row per sample. A row has token ids (of the tokenizer's dtype), or bytes
    (uint8) if the column is json.
    """
    lengths: Lengths
    "int64 [n]: tokens of each sample."
    positions: NDArray[np.int64]
    "int64 [n]: the position of each sample's record in the batch."
    totals: Totals
    "Counts over the samples."
    rejected: Mapping[int, str] = field(default_factory=dict)
    """Position in the batch of a record without a sample -> reason code (a `NoRecord` if there are
    details).
    """
    unread: Mapping[str, int] = field(default_factory=dict)
    """Name of a field that is not read, such as a key of messages that the chat template does not
    print -> number of records that have a value in the field.
    """
    placeholders: Mapping[str, int] = field(default_factory=dict)
    "Placeholder of a medium, such as <image> -> number of records whose texts contain it."
    ids: Sequence[str | int | None] = ()
    "The name of each sample's record; empty if the recipe names no field for it (`source.id`)."
    images: Sequence[Sequence[Any]] = ()
    "The images of each sample (`mdsmix.images.reader.Image`)."


def make_encoded(
    columns: Mapping[str, Ragged],
    ids: Sequence[Ragged],
    positions: Any,
    loss_tokens: int,
    lost_tokens: int = 0,
    cut: Lengths | None = None,
    specials: int = 0,
    truncated: Lengths | None = None,
    appended: Flags | None = None,
    **fields: Any,
) -> Encoded:
    """Count the totals of samples, and return the samples with them.

    Args:
        columns: column name -> one row per sample, as in Encoded.
        ids: the token ids, in one or more Raggeds with one row per sample. The tokens of sample i
            are the rows i of all Raggeds, for example of the contexts and of the targets.
        positions: the position of each sample's record in the batch.
        loss_tokens: positions that give a loss in training, after the shift by one.
        lost_tokens: tokens of these records that conversion stores in no sample.
        cut: int64 [n], the tokens of each sample that are stored, and that the loader will cut off.
        specials: records whose text contains the string of a special token.
        truncated: int64 [n], the tokens of each sample that conversion has cut off already. They
            are among `lost_tokens`.
        appended: bool [n], whether the loader appends EOS to each sample; None if this is not
            counted.
        fields: other fields of Encoded.
    """
    lengths = np.asarray(sum(rows.lengths for rows in ids))
    nothing = np.zeros(len(lengths), np.int64)
    if cut is None:
        cut = nothing
    if truncated is None:
        truncated = nothing
    largest_ids = [int(rows.values.max()) for rows in ids if len(rows.values)]
    largest_id = max(largest_ids, default=-1)
    given_eos = 0
    not_given_eos = 0
    if appended is not None:
        given_eos = int(np.count_nonzero(appended))
        not_given_eos = len(lengths) - given_eos
    totals = Totals(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        loss_tokens=loss_tokens,
        lost_tokens=lost_tokens,
        largest_id=largest_id,
        longest=int(lengths.max(initial=0)),
        lengths=count_by_length(lengths),
        cut_rows=int(np.count_nonzero(cut)),
        cut_tokens=int(cut.sum()),
        specials=specials,
        # A sample that the loader truncates again counts in cut_rows only.
        truncated_rows=int(np.count_nonzero((truncated > 0) & (cut == 0))),
        truncated_tokens=int(truncated.sum()),
        given_eos=given_eos,
        not_given_eos=not_given_eos,
    )
    return Encoded(
        columns=columns,
        lengths=lengths,
        positions=np.asarray(positions, np.int64),
        totals=totals,
        **fields,
    )


def lay_out_turns(
    labels: Labels, tokenizer: Tokenizer, positions: Any, with_weights: bool = False
) -> Encoded:
    """Return samples with the column `turns`: the JSON `[{"input_ids": [...], "labels": [...]},
    ...]` with an object for each turn (a prompt and its response).

    Args:
        labels: the samples as turns, with the rules on which tokens are trained.
        tokenizer: not used; the functions of all layouts have the same arguments.
        positions: the position of each sample's record in the batch.
        with_weights: add the column `loss_weights`, float32: the weights in the marks of the turns,
            0 for prompts. The EOS that the loader appends is not in it.
    """
    columns = {"turns": _write_json(labels.turns)}
    if with_weights:
        weights = labels.turns.response_weights
        columns[LOSS_WEIGHTS] = Ragged(weights, labels.turns.samples.offsets)
    return make_encoded(
        columns,
        [labels.turns.samples],
        positions,
        int(labels.count_losses().sum()),
        cut=labels.count_cut(),
        appended=labels.find_appended(),
    )


def lay_out_pairs(labels: Labels, tokenizer: Tokenizer, positions: Any) -> Encoded:
    """Return samples with the columns `input_ids` (all tokens before the last response) and
    `labels` (the last response), truncated to max_seq_len.

    Args:
        labels: the samples as turns, with the rules on which tokens are trained.
        tokenizer: the tokenizer of the stream.
        positions: the position of each sample's record in the batch.
    """
    targets = labels.targets
    longest = targets.max_seq_len
    # Rows alternate: context, target, context, target ...
    uncut = _split_at_last_response(labels.turns, tokenizer.dtype)
    limits = np.full(len(uncut), longest)
    if targets.decoder_only_format:
        # At least one target token is stored, since the collator reads the target's last token.
        limits[1::2] = np.maximum(longest - uncut.lengths[0::2], 1)
    # Each row is truncated to its limit.
    halves = uncut.first(limits)
    if not targets.decoder_only_format and tokenizer.eos_id is not None:
        _end_contexts(halves, uncut.lengths > longest, tokenizer.eos_id)
    pairs = Ragged(halves.values, halves.offsets[::2])
    truncated = labels.turns.samples.lengths - pairs.lengths
    cut = None
    if targets.decoder_only_format:
        # The target token of a context that fills the row: it is stored, and the loader cuts it.
        cut = np.maximum(pairs.lengths - longest, 0)
    return make_encoded(
        Interleaved(SIDES, halves),
        [pairs],
        positions,
        int(labels.count_losses().sum()),
        lost_tokens=int(truncated.sum()),
        cut=cut,
        truncated=truncated,
        appended=labels.find_appended(),
    )


def lay_out_documents(
    labels: Labels, tokenizer: Tokenizer, positions: Any, with_weights: bool = False
) -> Encoded:
    """Return samples with the columns `input_ids` and `loss_mask` (uint8, 1 if a token is trained).
    Each sample has the EOS that the collator would append, and is truncated to max_seq_len.

    Args:
        labels: the samples as turns, with the rules on which tokens are trained.
        tokenizer: the tokenizer of the stream.
        positions: the position of each sample's record in the batch.
        with_weights: add the column `loss_weights`, float32: the weights in the marks of the turns,
            0 for tokens that are not trained.
    """
    rows = labels.finish_rows()
    documents = Ragged(rows.ids.values.astype(tokenizer.dtype), rows.ids.offsets)
    loss_masks = Ragged(rows.is_trained.view(np.uint8), rows.ids.offsets)
    truncated = labels.count_cut()
    columns = {"input_ids": documents, "loss_mask": loss_masks}
    if with_weights:
        assert rows.weights is not None
        columns[LOSS_WEIGHTS] = Ragged(rows.weights, rows.ids.offsets)
    return make_encoded(
        columns,
        [documents],
        positions,
        int(loss_masks.values.sum()),
        lost_tokens=int(truncated.sum()),
        truncated=truncated,
    )


def _split_at_last_response(turns: Turns, dtype: str) -> Ragged:
    """Return two rows for each sample: the context, which is all tokens before the last response,
    and the target, which is the last response.
    """
    # The number of the row in turns.ids at which each context and each target begins, alternately.
    # The target of sample i is the last row before firsts[i + 1], where the next sample begins.
    edges = np.zeros(2 * len(turns.counts) + 1, np.int64)
    edges[1::2] = turns.firsts[1:] - 1
    edges[2::2] = turns.firsts[1:]
    return Ragged(turns.ids.values.astype(dtype, copy=False), turns.ids.offsets[edges])


def _end_contexts(halves: Ragged, is_cut: Flags, eos: int) -> None:
    """Replace the last token of each truncated context by EOS, as the collator does. A context is
    what an encoder reads: all tokens before the last response, which is the target.

    Args:
        halves: rows of ids: context, target, context, target ... Changed in place.
        is_cut: bool, whether each context and target was truncated. The flags of the targets are
            cleared in place.
        eos: the tokenizer's EOS.
    """
    is_cut[1::2] = False  # targets
    if is_cut.any():  # truncation has copied the values, so they can be changed in place
        halves.values[halves.offsets[1:][is_cut] - 1] = eos


class _Joint(NamedTuple):
    """The JSON between two lists of ids, and numbers that are written in its place first."""

    text: bytes
    "The end of the list before, and the beginning of the next one."
    numbers: tuple[int, int]
    """With the commas before, between and after them, they have as many bytes as the text. The
    first is negative, unlike all ids.
    """


_NEXT_RESPONSE = _Joint(b'],"labels":[', (-(10**6), 1))
_NEXT_TURN = _Joint(b']},{"input_ids":[', (-(10**9), 10**2))
_END_OF_SAMPLE = b"]}]"
_NEXT_SAMPLE = _Joint(_END_OF_SAMPLE + b'[{"input_ids":[', (-(10**9), 10**3))


def _write_json(turns: Turns) -> Ragged:
    """Return the JSON of each sample's turns as a uint8 row.

    orjson writes the ids of all samples as one list, 200 M tokens/s. With a list for each prompt
    and response, the JSON of chats took a third more CPU time.

    Args:
        turns: the samples. No prompt or response is empty.
    """
    if not len(turns.counts):
        return Ragged(np.empty(0, np.uint8), np.zeros(1, np.int64))
    assert turns.ids.lengths.all()  # the numbers in front of two lists would share a comma
    # Write two numbers in front of each prompt and response, in the place of the text between.
    rows = add_special_tokens(turns.ids, [*_NEXT_TURN.numbers], [], "int32")
    starts = rows.offsets[:-1]
    first_prompts = turns.firsts[:-1]
    for joint, places in (
        (_NEXT_RESPONSE, starts[1::2]),
        (_NEXT_SAMPLE, starts[first_prompts]),
    ):
        rows.values[places], rows.values[places + 1] = joint.numbers
    content = bytearray(orjson.dumps(rows.values, option=orjson.OPT_SERIALIZE_NUMPY))
    content += _END_OF_SAMPLE[1:]  # after the bracket that ends the list
    # Replace the numbers by the text. In front of each minus is a comma, or the first bracket.
    text = np.frombuffer(content, np.uint8)
    starts = np.flatnonzero(text == ord("-")) - 1
    for joint, places in (
        (_NEXT_TURN, starts[0::2]),
        (_NEXT_RESPONSE, starts[1::2]),
        (_NEXT_SAMPLE, starts[first_prompts]),
    ):
        windows = np.lib.stride_tricks.sliding_window_view(text, len(joint.text), writeable=True)
        windows[places] = np.frombuffer(joint.text, np.uint8)
    # The text in front of the first sample begins with the end of a sample: leave this out.
    sample_offsets = np.append(starts[first_prompts], len(text) - len(_END_OF_SAMPLE))
    return Ragged(text[len(_END_OF_SAMPLE) :], sample_offsets)


def add_special_tokens(ids: Ragged, head: list[int], tail: list[int], dtype: str) -> Ragged:
    """Return every row with the ids `head` before it and the ids `tail` after it.

    This takes 2 ms for 2 M tokens, however short the rows are; `Ragged.zip` takes 3 ms.

    Args:
        ids: the rows.
        head: ids such as [BOS].
        tail: ids such as [EOS].
        dtype: the dtype of the result.
    """
    if not head and not tail:
        return Ragged(ids.values.astype(dtype, copy=False), ids.offsets)
    lengths = ids.lengths + len(head) + len(tail)
    rows = Ragged.from_lengths(np.empty(int(lengths.sum()), dtype), lengths)
    is_free = np.ones(len(rows.values), bool)

    def add(tokens: list[int], starts: Lengths) -> None:
        """Write the tokens at these positions of `rows.values`, which are then no longer free."""
        for offset, token in enumerate(tokens):
            rows.values[starts + offset] = token
            is_free[starts + offset] = False

    add(head, rows.offsets[:-1])
    add(tail, rows.offsets[1:] - len(tail))
    rows.values[is_free] = ids.values
    return rows


class SplitRows(NamedTuple):
    """The pieces into which `split_rows` has split rows of tokens."""

    pieces: Ragged
    "One row per piece, in the order of the rows."
    sources: NDArray[np.int64]
    "int64 [pieces]: the number of the row from which each piece was split."


def split_rows(rows: Ragged, longest: int) -> SplitRows:
    """Split rows of more than `longest` tokens into pieces of `longest` tokens and a remainder: a
    row of 10 tokens into pieces of 4, 4 and 2 if `longest` is 4. A piece of one token gives no
    loss, so it is left out.
    """
    lengths = rows.lengths
    counts = np.asarray(-(-lengths // longest))  # pieces of each row, rounded up
    sources = np.repeat(np.arange(len(rows)), counts)
    if len(sources) == len(rows):  # no row is too long
        return SplitRows(rows, sources)
    piece_lengths = np.full(len(sources), longest, np.int64)
    # The last piece of each row has the remaining tokens.
    piece_lengths[np.cumsum(counts) - 1] = lengths - (counts - 1) * longest
    keep = piece_lengths > 1
    pieces = Ragged.from_lengths(rows.values, piece_lengths).take(keep)
    return SplitRows(pieces, sources[keep])


def lay_out_targets(rows: Ragged) -> Mapping[str, Ragged]:
    """Return the columns `input_ids` and `labels` of the finetuning loader. The first token of a
    row is in `input_ids`; all other tokens are in `labels`, so they are trained.
    """
    # Each row of the same values is split into two: its first token, and the tokens after it.
    starts = rows.offsets[:-1]
    edges = np.append(np.stack([starts, starts + 1], axis=1), rows.offsets[-1])
    return Interleaved(SIDES, Ragged(rows.values, edges))
