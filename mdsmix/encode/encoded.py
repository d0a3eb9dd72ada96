"""What every kind of stream gives back: samples as columns with their totals, and what became of the records that gave none.

Turns are JSON and whole, as Foundry's converter stores them. A pair is a context and a target, a third of the bytes; a row is stored
only as far as max_seq_len lets it train, and the collator makes the same sample of it, the end of an encoder's context included.
A document is a part of a packed row: the EOS, the policies and the cut are in it, since a row of several samples can state none
of them any more. `tests/foundry/test_packed.py` holds documents against the collator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.encode.labels import Labels, Turns
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Totals, histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The samples of one batch of records, in the order of the records."""

    columns: Mapping[str, Ragged]
    "Column name -> one row per sample: token ids (of the tokenizer's dtype), or bytes (uint8) for a json column."
    lengths: NDArray[np.int64]
    "int64 [n]: tokens of each sample."
    positions: NDArray[np.int64]
    "int64 [n]: which record each sample is of."
    totals: Totals
    "What the samples hold."
    rejected: Mapping[int, str] = field(default_factory=dict)
    "Position of a record that became no sample -> its reason code, a NoRecord where more is known."
    unread: Mapping[str, int] = field(default_factory=dict)
    "What the chat template does not print of the messages -> records that hold it."
    placeholders: Mapping[str, int] = field(default_factory=dict)
    "Placeholder of a medium, such as <image> -> records whose texts hold it."
    ids: Sequence[str | int | None] = ()
    "The name of each row's record, where the recipe says which field names records."
    images: Sequence[Sequence[Any]] = ()
    "The images of each sample (`mdsmix.images.reader.Image`)."


def encoded(
    columns: Mapping[str, Ragged],
    ids: Sequence[Ragged],
    positions: Any,
    loss_tokens: int,
    lost_tokens: int = 0,
    cut: NDArray[np.int64] | None = None,
    specials: int = 0,
    **said: Any,
) -> Encoded:
    """Samples with their totals.

    Args:
        ids: one row per sample each; together they are the sample's tokens.
        loss_tokens: positions that give a loss in training, after the shift by one.
        lost_tokens: tokens that no sample holds, because they could not be trained on.
        cut: int64 [n], the tokens of each sample that the loader cuts off.
        specials: records whose text holds the string of a special token.
        said: other fields of Encoded.
    """
    lengths = np.asarray(sum(rows.lengths for rows in ids))
    beyond = np.zeros(0, np.int64) if cut is None else cut
    totals = Totals(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        loss_tokens=loss_tokens,
        lost_tokens=lost_tokens,
        largest_id=max((int(rows.values.max()) for rows in ids if len(rows.values)), default=-1),
        longest=int(lengths.max(initial=0)),
        lengths=histogram(lengths),
        cut_rows=int(np.count_nonzero(beyond)),
        cut_tokens=int(beyond.sum()),
        specials=specials,
    )
    positions = np.asarray(positions, np.int64)
    return Encoded(columns=columns, lengths=lengths, positions=positions, totals=totals, **said)


LayOut = Callable[[Labels, Tokenizer, Any], Encoded]
"Labels, the tokenizer, and which record each sample is of."


def as_turns(labels: Labels, tokenizer: Tokenizer, positions: Any) -> Encoded:
    """`turns`: `[{"input_ids": [...], "labels": [...]}, ...]` of each sample."""
    columns, losses = {"turns": _as_json(labels.turns)}, int(labels.losses().sum())
    return encoded(columns, [labels.turns.samples], positions, losses, cut=labels.cut())


def as_pairs(labels: Labels, tokenizer: Tokenizer, positions: Any) -> Encoded:
    """`input_ids`: all before the last response; `labels`: that response."""
    longest = labels.targets.max_seq_len
    contexts, targets = _halves(labels.turns, tokenizer.dtype)
    if labels.targets.decoder_only_format:  # one target token is left: the collator reads the last
        contexts = contexts.first(longest)
        targets = targets.first(np.maximum(longest - contexts.lengths, 1))
    else:
        contexts = _context(contexts, longest, tokenizer.eos_id)
        targets = targets.first(longest)
    lost = len(labels.turns.ids.values) - len(contexts.values) - len(targets.values)
    columns = {"input_ids": contexts, "labels": targets}
    return encoded(columns, [contexts, targets], positions, int(labels.losses().sum()), lost)


def as_documents(labels: Labels, tokenizer: Tokenizer, positions: Any) -> Encoded:
    """`input_ids` and `loss_mask` (uint8, 1 where a token is trained), as the collator would make them of each sample."""
    samples, ends = labels.turns.samples, labels.turns.samples.offsets[1:][labels.gets_eos]
    ids = np.insert(samples.values, ends, tokenizer.eos_id or 0).astype(tokenizer.dtype)
    mask = np.insert(labels.trained, ends, True).view(np.uint8)
    lengths, longest = samples.lengths + labels.gets_eos, labels.targets.max_seq_len
    documents, trained = (
        Ragged.from_lengths(values, lengths).first(longest) for values in (ids, mask)
    )
    trained.values[trained.offsets[:-1]] = 0  # nothing stands before it that could predict it
    columns, lost = {"input_ids": documents, "loss_mask": trained}, int(labels.cut().sum())
    return encoded(columns, [documents], positions, int(trained.values.sum()), lost)


def _halves(turns: Turns, dtype: str) -> tuple[Ragged, Ragged]:
    """Of each sample all before its last response, and that response."""
    bounds = np.zeros(2 * len(turns.counts) + 1, np.int64)
    bounds[1::2], bounds[2::2] = turns.firsts[1:] - 1, turns.firsts[1:]
    halves = Ragged(turns.ids.values.astype(dtype), turns.ids.offsets[bounds])
    even = np.arange(0, len(halves), 2)
    return halves.take(even), halves.take(even + 1)


def _context(contexts: Ragged, longest: int, eos: int | None) -> Ragged:
    """To max_seq_len, with EOS in the last place, as the collator would end what it cuts itself."""
    is_cut = contexts.lengths > longest
    contexts = contexts.first(longest)
    if eos is not None and is_cut.any():
        contexts.values[contexts.offsets[1:][is_cut] - 1] = eos
    return contexts


def _as_json(turns: Turns) -> Ragged:
    """uint8 rows. orjson writes numpy views without a Python object per token: 80-150 M tokens/s, where cutting up one text of all
    numbers at its commas reached 60."""
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
    return Ragged.of(blobs, np.uint8)


def add_special_tokens(ids: Ragged, head: list[int], tail: list[int], dtype: str) -> Ragged:
    """Every row with `head` before and `tail` behind it, in `dtype`.

    Slices of bytes are joined by what stands between two rows, which costs 0.2 us a row and a copy; masks over tokens cost ten times the copy.
    """
    rows = Ragged(ids.values.astype(dtype), ids.offsets)
    if not head and not tail:
        return rows
    between = np.array([*tail, *head], dtype).tobytes()
    joined = np.frombuffer(between.join([b"", *rows.slices(), b""]), dtype)
    values = joined[len(tail) : len(joined) - len(head)]
    return Ragged.from_lengths(values, ids.lengths + len(head) + len(tail))


def split_rows(rows: Ragged, longest: int) -> tuple[Ragged, NDArray[np.int64]]:
    """Rows of more than `longest` tokens cut into full ones and a rest; a rest of one token has no loss and is left out.

    Returns the rows, and int64: which row each is a piece of.
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


def as_targets(rows: Ragged) -> Mapping[str, Ragged]:
    """The columns of the finetuning loader: the first token is context, the rest is trained."""
    return {"input_ids": rows.first(1), "labels": rows.cut(1, rows.lengths - 1)}
