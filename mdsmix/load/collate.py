"""Rows -> one batch of int64 tensors, padded to max_seq_len; short rows are packed where that is asked.

The keys and values are those of LLM-Foundry 0.22, with one addition: batches of the text loader carry an attention_mask too, so that a
training loop reads one shape whatever the mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from mdsmix.load.training_rows import IGNORED, RowRules, Tokens, TrainingRow, positions
from mdsmix.load.vision import Vision
from mdsmix.training.loader_keys import OtherLoader

Batch = dict[str, torch.Tensor]
Rows = Sequence[TrainingRow]
DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")
"Keys of an encoder-decoder batch that are as wide as its targets."


@dataclass(slots=True, kw_only=True)
class Packer:
    """The rows of a batch -> `bins` packed rows, first fit from the longest down, in the order of LLM-Foundry's BinPackCollator.

    Rows that do not fit wait for the next batch; those that wait at the end of the epoch are never trained on.
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
            # When the rows that are left are only just enough to make the batch full, each gets a bin of its own.
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


def ratios(max_seq_len: int, bins: int, steps: int = 20) -> dict[int, float]:
    """The packing ratios that `auto` tries, from 1 to max_seq_len / 100, by the rows that each draws for a batch of `bins`."""
    tried = np.round(np.linspace(1, max(1, max_seq_len / 100), steps), 1).tolist()
    return {int(ratio * bins): ratio for ratio in reversed(tried)}


def best_ratio(rows: Rows, tried: Mapping[int, float], bins: int, max_seq_len: int) -> float:
    """The last ratio before one that leaves a row waiting when all rows are packed; 1 where they fill no batch."""
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
    """A list of rows in; input_ids, labels, attention_mask [batch, max_seq_len] and, where LLM-Foundry has it or rows are packed,
    sequence_id out."""

    rules: RowRules
    with_sequence_id: bool = True
    with_position_ids: bool = False
    "Positions that begin anew with each document; 0 for padding."
    packer: Packer | None = None
    vision: Vision | None = None
    "Of a loader with a processor."
    other: OtherLoader | None = None
    "What makes the batches, where a kind of stream brings a loader of its own."
    pad_to_longest: bool = False
    allow_pad_trimming: bool = False
    "Trim padding to a multiple of 8, but never in the first batch, which shows the largest memory use."
    has_seen_a_batch: bool = False

    def __call__(self, rows: Sequence[Any]) -> Batch:
        if self.other:
            ids = self.rules.ids
            eos, fill = (-1 if token is None else token for token in (ids.eos, ids.fill))
            arrays = self.other.batch(rows, self.rules.max_seq_len, eos, fill)
            return {key: torch.from_numpy(values) for key, values in arrays.items()}
        if not self.rules.decoder_only_format:
            return self._trimmed(self._two_sided(rows))
        if self.packer:
            return self._joined(self.packer.pack(rows), self.rules.max_seq_len)
        pixels: dict[str, Any] = {}
        if self.vision:
            rows, pixels = self.vision.expand(rows, self.rules)
        batch = self._trimmed(self._joined([[row] for row in rows], self._width(rows)))
        if self.vision and self.vision.with_dummy and not pixels:
            return self.with_dummy_image(batch)
        return batch | pixels

    def with_dummy_image(self, batch: Batch) -> Batch:
        """The batch with an image in the padding of its shortest row, where nothing attends to its tokens and none is trained; the batch
        is as much wider as that takes."""
        assert self.vision is not None, "of a loader with a processor"
        piece, pixels = self.vision.dummy()
        mask = batch["attention_mask"]
        (length, row), count = mask.sum(dim=1).min(dim=0), len(piece["input_ids"])
        more = max(0, count + int(length) - mask.shape[1])
        sides = (more, 0) if self._is_left else (0, more)
        fills = {"input_ids": self._fill, "labels": IGNORED, "sequence_id": -1}
        batch = {k: pad(v, sides, value=fills.get(k, 0)) for k, v in batch.items()}
        free = (batch["attention_mask"][row] == 0).nonzero()[:, 0]
        spots = free[-count:] if self._is_left else free[:count]
        for key, values in piece.items():
            batch.setdefault(key, torch.zeros_like(batch["input_ids"]))
            batch[key][row, spots] = torch.from_numpy(values)
        return batch | pixels

    def _joined(self, bins: Sequence[Rows], width: int) -> Batch:
        """One padded row per bin. The first label of a row that follows another is ignored: its document just begins."""
        ids = [_joint([row.input_ids for row in rows]) for rows in bins]
        labels = [_joint([rows[0].labels, *map(_follows, rows[1:])]) for rows in bins]
        batch = {
            "input_ids": self._padded(ids, width, self._fill),
            "labels": self._padded(labels, width, IGNORED),
            "attention_mask": self._padded([*map(np.ones_like, ids)], width, 0),
        }
        if self.with_sequence_id or self.with_position_ids:
            documents = batch["attention_mask"] - 1
            if self.packer or any(row.documents is not None for row in chain(*bins)):
                documents = self._padded([*map(_documents, bins)], width, -1)
            if self.with_position_ids:
                batch["position_ids"] = positions(documents) * batch["attention_mask"]
            if self.with_sequence_id:
                batch["sequence_id"] = documents
        for key in {key for row in chain(*bins) for key in row.said}:
            none = np.zeros(0, np.int64)
            said = [_joint([row.said.get(key, none) for row in rows]) for rows in bins]
            batch[key] = self._padded(said, width, 0)
        return {key: torch.from_numpy(rows) for key, rows in batch.items()}

    @property
    def _fill(self) -> int:
        return self.rules.ids.fill or 0

    @property
    def _is_left(self) -> bool:
        return self.rules.ids.padding_side == "left"

    def _width(self, rows: Rows) -> int:
        sizes = (part.size for row in rows for part in (row.input_ids, row.labels))
        return max(sizes) if self.pad_to_longest else self.rules.max_seq_len

    def _padded(self, rows: Sequence[Tokens], width: int, fill: int, side: str = "") -> Tokens:
        padded = np.empty((len(rows), width), np.int64)
        is_left = self._is_left and not side
        for line, row in zip(padded, rows, strict=True):
            begin = width - row.size if is_left else 0
            line[begin : begin + row.size] = row
            line[:begin] = line[begin + row.size :] = fill
        return padded

    def _two_sided(self, rows: Rows) -> Batch:
        """Encoder and decoder batch; targets are always padded on the right."""
        width, ids = self._width(rows), [row.input_ids for row in rows]
        labels = self._padded([row.labels for row in rows], width, IGNORED, "right")
        shifted = np.insert(labels[:, :-1], 0, self._fill, axis=1)
        batch = {
            "input_ids": self._padded(ids, width, self._fill),
            "attention_mask": self._padded([*map(np.ones_like, ids)], width, 0),
            "labels": labels,
            "decoder_input_ids": np.where(shifted == IGNORED, self._fill, shifted),
            "decoder_attention_mask": labels != IGNORED,
        }
        return {key: torch.from_numpy(value) for key, value in batch.items()}

    def _trimmed(self, batch: Batch) -> Batch:
        """The columns that hold the longest row of the batch, rounded up to 8 for the sake of tensor cores."""
        narrowed, may_trim = Batch(), self.allow_pad_trimming and self.has_seen_a_batch
        self.has_seen_a_batch = True
        if not may_trim:
            return batch
        two_sided = not self.rules.decoder_only_format
        for key, values in batch.items():
            mask = batch["decoder_" * (two_sided and key in DECODER) + "attention_mask"]
            keep = -(-int(mask.sum(dim=1).max()) // 8) * 8
            columns = slice(-keep, None) if self._is_left and not two_sided else slice(keep)
            narrowed[key] = values[:, columns].contiguous()
        return narrowed


def _joint(parts: Sequence[Tokens]) -> Tokens:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _documents(rows: Rows) -> Tokens:
    """The number of each token's document in rows end to end, counted on from row to row."""
    parts, first = list[Tokens](), 0
    for row in rows:
        own = np.zeros_like(row.input_ids) if row.documents is None else row.documents
        parts.append(own + first if first else own)
        first += 1 if row.documents is None else int(own[-1]) + 1
    return _joint(parts)


def _follows(row: TrainingRow) -> Tokens:
    """The labels of a row that follows another."""
    labels = row.labels.copy()
    labels[:1] = IGNORED
    return labels
