"""Samples as every kind of stream returns them: columns and totals, and a reason for each record
that gave no sample.

Three layouts of finetuning samples:
- Turns are JSON, uncut, as Foundry's converter stores them.
- A pair is a context and a target, in a third of the bytes. Tokens beyond max_seq_len are not
  stored; the collator makes the same batch,
  the EOS at the end of an encoder's cut context included.
- A document is a part of a packed row. The EOS, the policies and the cut are applied before it is
  stored, since the loader cannot tell
  the samples of a packed row apart to apply them. `tests/test_encode_labels.py` compares documents
  with the collator's rule, token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.encode.labels import Flags, Labels, Lengths, Turns
from mdsmix.ragged import Interleaved, Ragged
from mdsmix.shards.counts import Totals, count_by_length
from mdsmix.shards.token_ids import SIDES
from mdsmix.tokenizer.card import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The samples of one batch of records, in the order of the records."""

    columns: Mapping[str, Ragged]
    """Column name -> one row per sample: token ids (of the tokenizer's dtype), or bytes (uint8) for
    a json column.
    """
    lengths: Lengths
    "int64 [n]: tokens of each sample."
    positions: NDArray[np.int64]
    "int64 [n]: the position of each sample's record in the batch."
    totals: Totals
    "Counts over the samples."
    rejected: Mapping[int, str] = field(default_factory=dict)
    "Position of a record that became no sample -> its reason code, a NoRecord where more is known."
    unread: Mapping[str, int] = field(default_factory=dict)
    """Field that holds something and is not read, such as a key of messages that the chat template
    does not print -> records that have it.
    """
    placeholders: Mapping[str, int] = field(default_factory=dict)
    "Placeholder of a medium, such as <image> -> records whose texts hold it."
    ids: Sequence[str | int | None] = ()
    "The name of each sample's record, where the recipe names a field for it (`source.id`)."
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
    **said: Any,
) -> Encoded:
    """Samples with their totals.

    Args:
        ids: the parts of the samples (say, contexts and targets), one row per sample in each. A
        sample's tokens are its rows together.
        loss_tokens: positions that give a loss in training, after the shift by one.
        lost_tokens: tokens of these records that no sample holds.
        cut: int64 [n], the tokens of each sample that the loader cuts off.
        specials: records whose text holds the string of a special token.
        truncated: int64 [n], the tokens of each sample that were cut off, which are among
        `lost_tokens`.
        appended: bool [n], whether the loader appends EOS to each sample; None if that is not
        counted for the kind.
        said: other fields of Encoded.
    """
    lengths = np.asarray(sum(rows.lengths for rows in ids))
    beyond = np.zeros(len(lengths), np.int64) if cut is None else cut
    off = np.zeros(len(lengths), np.int64) if truncated is None else truncated
    given_eos = 0 if appended is None else int(np.count_nonzero(appended))
    totals = Totals(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        loss_tokens=loss_tokens,
        lost_tokens=lost_tokens,
        largest_id=max((int(rows.values.max()) for rows in ids if len(rows.values)), default=-1),
        longest=int(lengths.max(initial=0)),
        lengths=count_by_length(lengths),
        cut_rows=int(np.count_nonzero(beyond)),
        cut_tokens=int(beyond.sum()),
        specials=specials,
        truncated_rows=int(np.count_nonzero((off > 0) & (beyond == 0))),
        truncated_tokens=int(off.sum()),
        given_eos=given_eos,
        not_given_eos=0 if appended is None else len(lengths) - given_eos,
    )
    positions = np.asarray(positions, np.int64)
    return Encoded(columns=columns, lengths=lengths, positions=positions, totals=totals, **said)


def lay_out_turns(labels: Labels, tokenizer: Tokenizer, positions: Any) -> Encoded:
    """Column `turns`: the JSON `[{"input_ids": [...], "labels": [...]}, ...]` of each sample.
    `positions`: of each sample's record.
    """
    columns, losses = {"turns": _as_json(labels.turns)}, int(labels.losses().sum())
    ids = [labels.turns.samples]
    return make_encoded(
        columns, ids, positions, losses, cut=labels.cut(), appended=labels.appended()
    )


def lay_out_pairs(labels: Labels, tokenizer: Tokenizer, positions: Any) -> Encoded:
    """Columns `input_ids`, all tokens before the last response, and `labels`, the last response,
    cut to max_seq_len.
    """
    longest = labels.targets.max_seq_len
    whole = _halves(labels.turns, tokenizer.dtype)
    most = np.full(len(whole), longest)
    if labels.targets.decoder_only_format:  # one target token stays: the collator reads its last
        most[1::2] = np.maximum(longest - whole.lengths[0::2], 1)
    halves = whole.first(most)
    if not labels.targets.decoder_only_format and tokenizer.eos_id is not None:
        _end_contexts(halves, whole.lengths > longest, tokenizer.eos_id)
    pairs = Ragged(halves.values, halves.offsets[::2])
    truncated = labels.turns.samples.lengths - pairs.lengths
    return make_encoded(
        Interleaved(SIDES, halves),
        [pairs],
        positions,
        int(labels.losses().sum()),
        lost_tokens=int(truncated.sum()),
        truncated=truncated,
        appended=labels.appended(),
    )


def lay_out_documents(labels: Labels, tokenizer: Tokenizer, positions: Any) -> Encoded:
    """Columns `input_ids` and `loss_mask` (uint8, 1 where a token is trained): each sample with the
    EOS and the cut of the collator.
    """
    samples, ends = labels.turns.samples, labels.turns.samples.offsets[1:][labels.gets_eos]
    ids = np.insert(samples.values, ends, tokenizer.eos_id or 0).astype(tokenizer.dtype)
    mask = np.insert(labels.trained, ends, True).view(np.uint8)
    lengths, longest = samples.lengths + labels.gets_eos, labels.targets.max_seq_len
    documents, trained = (
        Ragged.from_lengths(values, lengths).first(longest) for values in (ids, mask)
    )
    trained.values[trained.offsets[:-1]] = 0  # no token stands before the first one to predict it
    columns, truncated = {"input_ids": documents, "loss_mask": trained}, labels.cut()
    return make_encoded(
        columns,
        [documents],
        positions,
        int(trained.values.sum()),
        lost_tokens=int(truncated.sum()),
        truncated=truncated,
    )


def _halves(turns: Turns, dtype: str) -> Ragged:
    """Two rows for each sample, context and target: the tokens before its last response, and the
    tokens of that response.
    """
    bounds = np.zeros(2 * len(turns.counts) + 1, np.int64)
    bounds[1::2], bounds[2::2] = turns.firsts[1:] - 1, turns.firsts[1:]
    return Ragged(turns.ids.values.astype(dtype, copy=False), turns.ids.offsets[bounds])


def _end_contexts(halves: Ragged, is_cut: Flags, eos: int) -> None:
    """Ends contexts that were cut in EOS, as the collator ends one. `is_cut`: bool, of each context
    and target.
    """
    is_cut[1::2] = False
    if is_cut.any():  # then the values are a copy
        halves.values[halves.offsets[1:][is_cut] - 1] = eos


def _as_json(turns: Turns) -> Ragged:
    """uint8 rows of JSON, one per sample. orjson writes numpy views without a Python object per
    token: 80-150 M tokens/s.
    """
    edges = turns.ids.offsets.tolist()
    rows = map(turns.ids.values.__getitem__, map(slice, edges, edges[1:]))
    pairs = [
        {"input_ids": prompt, "labels": response}
        for prompt, response in zip(rows, rows, strict=True)
    ]
    blobs = [
        orjson.dumps(pairs[start:end], option=orjson.OPT_SERIALIZE_NUMPY)
        for start, end in pairwise((turns.firsts // 2).tolist())
    ]
    return Ragged.from_rows(blobs, np.uint8)


def add_special_tokens(ids: Ragged, head: list[int], tail: list[int], dtype: str) -> Ragged:
    """Every row with `head` before and `tail` behind it, in `dtype`.

    2 ms for 2 M tokens, however short the rows; `Ragged.zip` takes half as much again.
    """
    lengths = ids.lengths + len(head) + len(tail)
    rows = Ragged.from_lengths(np.empty(int(lengths.sum()), dtype), lengths)
    starts, ends = rows.offsets[:-1], rows.offsets[1:] - len(tail)
    is_added = np.zeros(len(rows.values), bool)
    for first, added in ((starts, head), (ends, tail)):
        for place, token in enumerate(added):
            rows.values[first + place] = token
            is_added[first + place] = True
    rows.values[~is_added] = ids.values
    return rows


def split_rows(rows: Ragged, longest: int) -> tuple[Ragged, NDArray[np.int64]]:
    """Rows of more than `longest` tokens cut into pieces: full ones and a rest. A piece of one
    token has no loss and is left out.

    Returns the pieces, and the number of the row that each is cut from (int64).
    """
    lengths = rows.lengths
    pieces = np.asarray(-(-lengths // longest))
    sources = np.repeat(np.arange(len(rows)), pieces)
    if len(sources) == len(rows):
        return rows, sources
    cut = np.full(len(sources), longest, np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * longest
    keep = cut > 1
    return Ragged.from_lengths(rows.values, cut).take(keep), sources[keep]


def lay_out_targets(rows: Ragged) -> Mapping[str, Ragged]:
    """The columns `input_ids` and `labels` of the finetuning loader: the first token of a row is
    the context, the rest is trained.
    """
    begins = rows.offsets[:-1]
    edges = np.append(np.stack([begins, begins + 1], axis=1), rows.offsets[-1])
    return Interleaved(SIDES, Ragged(rows.values, edges))
