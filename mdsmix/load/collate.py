"""Rows -> one batch of int64 tensors, padded to max_seq_len; short rows are packed if the YAML asks
for it.

Keys and values are those of LLM-Foundry 0.22, with one addition: batches of the text loader have an
attention_mask too, so that a training loop gets the same keys for every mix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from mdsmix.load.training_rows import RowRules, Tokens, TrainingRow, make_position_ids
from mdsmix.load.vision import Vision
from mdsmix.shards.token_ids import IGNORED_LABEL

Batch = dict[str, torch.Tensor]
Rows = Sequence[TrainingRow]


class Bin(NamedTuple):
    """Rows that will be joined end to end into one packed row of at most max_seq_len tokens."""

    size: int
    "Tokens of its rows."
    rows: list[TrainingRow]


@dataclass(slots=True, kw_only=True)
class Packer:
    """Packs the rows of a batch into `bins` packed rows, first fit from the longest row down, in
    the order of LLM-Foundry's BinPackCollator.

    Rows that do not fit wait for the next batch; those that wait at the end of the epoch are never
    trained.
    """

    bins: int
    "Packed rows per batch: the batch size of the training loop."
    max_seq_len: int
    keep: int | None = None
    "The most leftover bins that wait for the next batch; None: all."
    waiting: list[list[TrainingRow]] = field(default_factory=list)
    "The rows of each leftover bin."

    def pack(self, rows: Rows) -> list[list[TrainingRow]]:
        """Return the rows of each packed row: at most `bins`, the fullest first."""
        bins = [Bin(sum(map(_count_tokens, waiting)), waiting) for waiting in self.waiting]
        by_length = sorted(rows, key=_count_tokens, reverse=True)
        for remaining, row in zip(range(len(rows), 0, -1), by_length, strict=True):
            size = _count_tokens(row)
            # If the remaining rows are only just enough to fill the batch, each gets a bin of its
            # own.
            must_open = remaining <= self.bins - len(bins)
            room = self.max_seq_len - size
            fitting = (number for number, bin in enumerate(bins) if bin.size <= room)
            number = None if must_open else next(fitting, None)
            filled = Bin(0, []) if number is None else bins.pop(number)
            bins.append(Bin(filled.size + size, [*filled.rows, row]))
        bins.sort(key=lambda bin: bin.size, reverse=True)
        packed = [bin.rows for bin in bins]
        self.waiting = packed[self.bins :][: self.keep]
        return packed[: self.bins]


def _count_tokens(row: TrainingRow) -> int:
    return row.input_ids.size


def list_ratios(max_seq_len: int, bins: int) -> dict[int, float]:
    """Return the 20 packing ratios that `auto` tries, from 1 to max_seq_len / 100, as {rows drawn
    for a batch of `bins`: ratio}.
    """
    # From the largest down: of ratios that draw the same number of rows the smallest is kept.
    ratios = np.round(np.linspace(1, max(1, max_seq_len / 100), 20), 1).tolist()
    return {int(ratio * bins): ratio for ratio in reversed(ratios)}


def find_best_ratio(rows: Rows, ratios: Mapping[int, float], bins: int, max_seq_len: int) -> float:
    """Pack all rows at rising ratios, and return the last one before a row is left waiting; 1 if
    that is the case at the first ratio.

    Args:
        ratios: {rows drawn for a batch: ratio}, from `list_ratios`.
        bins: packed rows of a batch.
    """
    best = 1.0
    for drawn, ratio in sorted(ratios.items()):
        packer = Packer(bins=bins, max_seq_len=max_seq_len)
        batches = [rows[start : start + drawn] for start in range(0, len(rows), drawn)]
        full_batches = [batch for batch in batches if len(batch) >= bins]
        for batch in full_batches:
            packer.pack(batch)
        if packer.waiting or not full_batches:
            break
        best = ratio
    return best


@dataclass(slots=True, kw_only=True)
class Collate:
    """Makes a batch from a list of rows: input_ids, labels and attention_mask, int64 [batch,
    max_seq_len], and sequence_id if LLM-Foundry has it or rows are packed.
    """

    rules: RowRules
    with_sequence_id: bool = True
    with_position_ids: bool = False
    "Add position_ids, which begin at 0 again with each document; 0 for padding."
    packer: Packer | None = None
    vision: Vision | None = None
    "The processor of the loader, if it has one."
    other_batch: Callable[[Sequence[Any], int, int, int], dict[str, Any]] | None = None
    "`ExtraLoader.batch`, if a kind of stream has a loader of its own."
    pad_to_longest: bool = False
    allow_pad_trimming: bool = False
    """Batches are as wide as their longest row, rounded up to 8 for tensor cores. The first batch
    keeps the full width: it shows the most memory.
    """
    has_seen_a_batch: bool = False

    def __call__(self, rows: Sequence[Any]) -> Batch:
        """Make a batch of these rows. Torch's DataLoader calls this.

        Args:
            rows: TrainingRow each, or what `ExtraLoader.row` returns if a kind has its own loader.
        """
        if self.other_batch:
            return self._make_other_batch(rows)
        if self.packer:
            packed_rows = [join_rows(packed) for packed in self.packer.pack(rows)]
            return self._make_decoder_batch(packed_rows, self.rules.max_seq_len)

        # Expand images.
        pixels: Batch = {}
        if self.vision:
            rows, pixels = self.vision.expand(rows, self.rules)

        # Choose the width of the batch; encoder and decoder may differ after trimming.
        inputs = [row.input_ids for row in rows]
        labels = [row.labels for row in rows]
        full_width = self.rules.max_seq_len
        if self.pad_to_longest:
            full_width = max(map(len, (*inputs, *labels)))
        input_width = full_width
        label_width = full_width
        if self.allow_pad_trimming and self.has_seen_a_batch:
            input_width = min(full_width, _round_up_to_eight(max(map(len, inputs))))
            label_width = min(full_width, _round_up_to_eight(max(map(len, labels))))
        self.has_seen_a_batch = True

        # An encoder-decoder has its own batch. Otherwise add the pixels, or a blank image.
        if not self.rules.decoder_only_format:
            return self._make_encoder_decoder_batch(inputs, labels, input_width, label_width)
        batch = self._make_decoder_batch(rows, input_width)
        if self.vision and self.vision.with_dummy and not pixels:
            return self.with_dummy_image(batch)
        return batch | pixels

    def _make_other_batch(self, rows: Sequence[Any]) -> Batch:
        """Make a batch by the loader of a kind of stream."""
        assert self.other_batch
        ids = self.rules.ids
        eos = -1 if ids.eos is None else ids.eos
        fill = -1 if ids.fill is None else ids.fill
        arrays = self.other_batch(rows, self.rules.max_seq_len, eos, fill)
        return {key: torch.from_numpy(values) for key, values in arrays.items()}

    def with_dummy_image(self, batch: Batch) -> Batch:
        """Add an image to the padding of the batch's shortest row. No token attends to its tokens,
        and none of them is trained. The batch is widened if the image needs more room.
        """
        assert self.vision is not None, "of a loader with a processor"
        piece, pixels = self.vision.make_dummy()
        count = len(piece["input_ids"])
        mask = batch["attention_mask"]
        # The shortest row: its number of tokens, and its position in the batch.
        length, row = map(int, mask.sum(dim=1).min(dim=0))
        width = max(mask.shape[1], length + count)
        added = width - mask.shape[1]
        if self._is_left:
            start = width - length - count
            sides = (added, 0)
        else:
            start = length
            sides = (0, added)
        fills = {"input_ids": self._fill, "labels": IGNORED_LABEL, "sequence_id": -1}
        wide_batch = {}
        for key, tensor in batch.items():
            wide_batch[key] = pad(tensor, sides, value=fills.get(key, 0))
        for key, values in piece.items():
            # An output of the processor that the batch lacks is 0 for all other tokens.
            wide_batch.setdefault(key, torch.zeros_like(wide_batch["input_ids"]))
            wide_batch[key][row, start : start + count] = torch.from_numpy(values)
        return wide_batch | pixels

    def _make_decoder_batch(self, rows: Rows, width: int) -> Batch:
        """Make the batch of a decoder-only model, each row padded to `width` tokens."""
        # The number of each token's document; -1 marks padding.
        documents = self._pad([number_documents(row) for row in rows], width, -1)
        batch = {
            "input_ids": self._pad([row.input_ids for row in rows], width, self._fill),
            "labels": self._pad([row.labels for row in rows], width, IGNORED_LABEL),
            "attention_mask": (documents >= 0).astype(np.int64),
        }
        if self.with_position_ids:
            batch["position_ids"] = make_position_ids(documents) * batch["attention_mask"]
        if self.with_sequence_id:
            batch["sequence_id"] = documents
        no_values = np.zeros(0, np.int64)
        for key in {key for row in rows for key in row.outputs}:
            outputs = [row.outputs.get(key, no_values) for row in rows]
            batch[key] = self._pad(outputs, width, 0)
        return {key: torch.from_numpy(values) for key, values in batch.items()}

    def _make_encoder_decoder_batch(
        self, inputs: Sequence[Tokens], targets: Sequence[Tokens], width: int, target_width: int
    ) -> Batch:
        """Make the batch of an encoder-decoder model; targets are always padded on the right."""
        labels = self._pad(targets, target_width, IGNORED_LABEL, is_left=False)
        shifted = np.insert(labels[:, :-1], 0, self._fill, axis=1)
        batch = {
            "input_ids": self._pad(inputs, width, self._fill),
            "attention_mask": self._pad([*map(np.ones_like, inputs)], width, 0),
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

    def _pad(
        self, rows: Sequence[Tokens], width: int, fill: int, is_left: bool | None = None
    ) -> Tokens:
        """Pad rows to one width: int64 [rows, width].

        Args:
            fill: the value of the padding.
            is_left: pad on the left; None: on the tokenizer's side.
        """
        if is_left is None:
            is_left = self._is_left
        padded = np.empty((len(rows), width), np.int64)
        for line, row in zip(padded, rows, strict=True):
            start = width - row.size if is_left else 0
            line[start : start + row.size] = row
            line[:start] = line[start + row.size :] = fill
        return padded


def _round_up_to_eight(length: int) -> int:
    return -(-length // 8) * 8


def number_documents(row: TrainingRow) -> Tokens:
    """Return the number of each token's document, from 0."""
    return np.zeros_like(row.input_ids) if row.documents is None else row.documents


def join_rows(rows: Rows) -> TrainingRow:
    """Join rows end to end into a row of several documents.

    The first label of each row but the first is ignored: it is the beginning of a document.
    """
    if len(rows) == 1:
        return rows[0]
    labels = list[Tokens]()
    documents = list[Tokens]()
    next_document = 0
    for row in rows:
        labels_of_row = row.labels.copy()
        if next_document:
            labels_of_row[:1] = IGNORED_LABEL
        labels.append(labels_of_row)
        documents.append(number_documents(row) + next_document)
        next_document = int(documents[-1][-1]) + 1
    return TrainingRow(
        np.concatenate([row.input_ids for row in rows]),
        np.concatenate(labels),
        np.concatenate(documents),
    )
