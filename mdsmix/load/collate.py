"""Rows -> one batch of int64 tensors, padded to max_seq_len; short rows are packed where that is
asked.

The keys and values are those of LLM-Foundry 0.22, with one addition: batches of the text loader
carry an attention_mask too, so that a training loop reads one shape whatever the mix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from mdsmix.load.training_rows import RowRules, Tokens, TrainingRow, make_position_ids
from mdsmix.load.vision import Vision
from mdsmix.shards.token_ids import IGNORED_LABEL

Batch = dict[str, torch.Tensor]
Rows = Sequence[TrainingRow]


@dataclass(slots=True, kw_only=True)
class Packer:
    """The rows of a batch -> `bins` packed rows, first fit from the longest down, in the order of
    LLM-Foundry's BinPackCollator.

    Rows that do not fit wait for the next batch; those that wait at the end of the epoch are never
    trained on.
    """

    bins: int
    "Packed rows per batch: the batch size of the training loop."
    max_seq_len: int
    keep: int | None = None
    "At most so many leftover bins wait for the next batch; None: all."
    waiting: list[list[TrainingRow]] = field(default_factory=list)

    def pack(self, rows: Rows) -> list[list[TrainingRow]]:
        bins = [(sum(map(_size, waiting)), waiting) for waiting in self.waiting]
        by_length = sorted(rows, key=_size, reverse=True)
        for left, row in zip(range(len(rows), 0, -1), by_length, strict=True):
            room = self.max_seq_len - _size(row)
            # When the rows that are left are only just enough to make the batch full, each gets a
            # bin of its own.
            must_open = left <= self.bins - len(bins)
            fits = (i for i, (size, _) in enumerate(bins) if size <= room)
            at = None if must_open else next(fits, None)
            size, others = (0, []) if at is None else bins.pop(at)
            bins.append((size + _size(row), [*others, row]))
        bins.sort(key=lambda bin: bin[0], reverse=True)
        packed = [rows for _, rows in bins]
        self.waiting = packed[self.bins :][: self.keep]
        return packed[: self.bins]


def _size(row: TrainingRow) -> int:
    return row.input_ids.size


def list_ratios(max_seq_len: int, bins: int) -> dict[int, float]:
    """The 20 packing ratios that `auto` tries, from 1 to max_seq_len / 100, by the rows that each
    draws for a batch of `bins`.
    """
    tried = np.round(np.linspace(1, max(1, max_seq_len / 100), 20), 1).tolist()
    return {int(ratio * bins): ratio for ratio in reversed(tried)}


def find_best_ratio(rows: Rows, tried: Mapping[int, float], bins: int, max_seq_len: int) -> float:
    """The last of the `tried` ratios (`ratios`) before one that leaves a row waiting when all rows
    are packed; 1 where none is.
    """
    best = 1.0
    for drawn, ratio in sorted(tried.items()):
        packer = Packer(bins=bins, max_seq_len=max_seq_len)
        batches = [rows[at : at + drawn] for at in range(0, len(rows), drawn)]
        whole = [packer.pack(batch) for batch in batches if len(batch) >= bins]
        if packer.waiting or not whole:
            break
        best = ratio
    return best


@dataclass(slots=True, kw_only=True)
class Collate:
    """A list of rows in; input_ids, labels, attention_mask [batch, max_seq_len] and, where
    LLM-Foundry has it or rows are packed, sequence_id out.
    """

    rules: RowRules
    with_sequence_id: bool = True
    with_position_ids: bool = False
    "Positions that begin anew with each document; 0 for padding."
    packer: Packer | None = None
    vision: Vision | None = None
    "The processor of the loader; None without one."
    other_batch: Callable[[Sequence[Any], int, int, int], dict[str, Any]] | None = None
    "`ExtraLoader.batch`, if a kind of stream has a loader of its own."
    pad_to_longest: bool = False
    allow_pad_trimming: bool = False
    """Batches are as wide as their longest row, rounded up to 8 for tensor cores. The first batch
    stays full: it shows the most memory.
    """
    has_seen_a_batch: bool = False

    def __call__(self, rows: Sequence[Any]) -> Batch:
        if self.other_batch:
            ids = self.rules.ids
            eos, fill = (-1 if token is None else token for token in (ids.eos, ids.fill))
            arrays = self.other_batch(rows, self.rules.max_seq_len, eos, fill)
            return {key: torch.from_numpy(values) for key, values in arrays.items()}
        if self.packer:
            return self._one_sided(
                [*map(join_rows, self.packer.pack(rows))], self.rules.max_seq_len
            )
        pixels: Batch = {}
        if self.vision:
            rows, pixels = self.vision.expand(rows, self.rules)
        inputs, labels = [row.input_ids for row in rows], [row.labels for row in rows]
        whole = max(
            map(len, (*inputs, *labels)) if self.pad_to_longest else [self.rules.max_seq_len]
        )
        widths = whole, whole
        if self.allow_pad_trimming and self.has_seen_a_batch:
            inner, outer = (-(-max(map(len, side)) // 8) * 8 for side in (inputs, labels))
            widths = min(whole, inner), min(whole, outer)
        self.has_seen_a_batch = True
        if not self.rules.decoder_only_format:
            return self._two_sided(inputs, labels, *widths)
        batch = self._one_sided(rows, widths[0])
        if self.vision and self.vision.with_dummy and not pixels:
            return self.with_dummy_image(batch)
        return batch | pixels

    def with_dummy_image(self, batch: Batch) -> Batch:
        """The batch with an image in the padding of its shortest row, where nothing attends to its
        tokens and none is trained; the batch is as much wider as that takes.
        """
        assert self.vision is not None, "of a loader with a processor"
        piece, pixels = self.vision.dummy()
        count, mask = len(piece["input_ids"]), batch["attention_mask"]
        length, row = map(int, mask.sum(dim=1).min(dim=0))
        width = max(mask.shape[1], length + count)
        more, start = width - mask.shape[1], width - length - count if self._is_left else length
        fills = {"input_ids": self._fill, "labels": IGNORED_LABEL, "sequence_id": -1}
        sides = (more, 0) if self._is_left else (0, more)
        batch = {key: pad(of, sides, value=fills.get(key, 0)) for key, of in batch.items()}
        for key, values in piece.items():
            batch.setdefault(key, torch.zeros_like(batch["input_ids"]))
            batch[key][row, start : start + count] = torch.from_numpy(values)
        return batch | pixels

    def _one_sided(self, rows: Rows, width: int) -> Batch:
        documents = self._padded([*map(number_documents, rows)], width, -1)
        batch = {
            "input_ids": self._padded([row.input_ids for row in rows], width, self._fill),
            "labels": self._padded([row.labels for row in rows], width, IGNORED_LABEL),
            "attention_mask": (documents >= 0).astype(np.int64),
        }
        if self.with_position_ids:
            batch["position_ids"] = make_position_ids(documents) * batch["attention_mask"]
        if self.with_sequence_id:
            batch["sequence_id"] = documents
        for key in {key for row in rows for key in row.outputs}:
            none = np.zeros(0, np.int64)
            batch[key] = self._padded([row.outputs.get(key, none) for row in rows], width, 0)
        return {key: torch.from_numpy(values) for key, values in batch.items()}

    def _two_sided(
        self, inputs: Sequence[Tokens], targets: Sequence[Tokens], width: int, target_width: int
    ) -> Batch:
        """Encoder and decoder batch; targets are always padded on the right."""
        labels = self._padded(targets, target_width, IGNORED_LABEL, is_left=False)
        shifted = np.insert(labels[:, :-1], 0, self._fill, axis=1)
        batch = {
            "input_ids": self._padded(inputs, width, self._fill),
            "attention_mask": self._padded([*map(np.ones_like, inputs)], width, 0),
            "labels": labels,
            "decoder_input_ids": np.where(shifted == IGNORED_LABEL, self._fill, shifted),
            "decoder_attention_mask": labels != IGNORED_LABEL,
        }
        return {key: torch.from_numpy(values) for key, values in batch.items()}

    @property
    def _fill(self) -> int:
        return self.rules.ids.fill or 0

    @property
    def _is_left(self) -> bool:
        return self.rules.ids.padding_side == "left"

    def _padded(
        self, rows: Sequence[Tokens], width: int, fill: int, is_left: bool | None = None
    ) -> Tokens:
        """int64 [rows, width]. `is_left`: the side, in place of the tokenizer's."""
        padded = np.empty((len(rows), width), np.int64)
        for line, row in zip(padded, rows, strict=True):
            begin = width - row.size if (self._is_left if is_left is None else is_left) else 0
            line[begin : begin + row.size] = row
            line[:begin] = line[begin + row.size :] = fill
        return padded


def number_documents(row: TrainingRow) -> Tokens:
    """The number of each token's document, from 0."""
    return np.zeros_like(row.input_ids) if row.documents is None else row.documents


def join_rows(rows: Rows) -> TrainingRow:
    """Joins rows end to end into a row of several documents. The first label of each following row
    is ignored: its document just begins.
    """
    if len(rows) == 1:
        return rows[0]
    labels, documents, first = list[Tokens](), list[Tokens](), 0
    for row in rows:
        labels.append(row.labels.copy())
        labels[-1][: bool(first)] = IGNORED_LABEL
        documents.append(number_documents(row) + first)
        first = int(documents[-1][-1]) + 1
    return TrainingRow(
        np.concatenate([row.input_ids for row in rows]),
        np.concatenate(labels),
        np.concatenate(documents),
    )
