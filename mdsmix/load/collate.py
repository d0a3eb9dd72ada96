"""Rows -> one batch of int64 tensors, padded to max_seq_len.

The keys and values are those of LLM-Foundry 0.22, with one addition: batches of the text loader carry an
attention_mask too, so that a training loop reads one shape whatever the mix. Padding is made here and nowhere else;
its cost is what `packing_ratio` saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from mdsmix.errors import RecipeError
from mdsmix.load.packing import Packer
from mdsmix.load.training_rows import IGNORED, RowRules, Tokens, TrainingRow, positions
from mdsmix.load.vision import ROWS, Vision
from mdsmix.training.loader_keys import OtherLoader

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Separator:
    """The token between the documents of a pretraining row (`eos_token_id` or `bos_token_id` of the text loader)."""

    token: int
    starts: bool
    "True: it is a BOS, which belongs to the document after it."

    def count(self, tokens: Tokens) -> Tokens:
        """How many documents have ended before each token, or begun with it."""
        found = tokens == self.token
        count: Tokens = found.cumsum(axis=-1)
        return count if self.starts else count - found


@dataclass(slots=True, kw_only=True)
class Collate:
    """A list of rows in; input_ids, labels, attention_mask [batch, max_seq_len] and, where LLM-Foundry has it or rows are packed,
    sequence_id out."""

    rules: RowRules
    with_sequence_id: bool = True
    with_position_ids: bool = False
    "Positions that begin anew with each document; 0 for padding."
    separator: Separator | None = None
    packer: Packer | None = None
    vision: Vision | None = None
    "Of a loader with a processor."
    pad_to_longest: bool = False
    allow_pad_trimming: bool = False
    "Trim padding to a multiple of 8, but never in the first batch, which shows the largest memory use."
    has_seen_a_batch: bool = False

    def __call__(self, rows: Sequence[TrainingRow]) -> Batch:
        if not self.rules.decoder_only_format:
            return self._trimmed(self._two_sided(rows))
        if self.packer:
            return self._joined(self.packer.pack(rows), self.rules.max_seq_len)
        if self.vision:
            return self._pictured(rows, self.vision)
        longest = max(row.input_ids.size for row in rows)
        width = longest if self.pad_to_longest else self.rules.max_seq_len
        return self._trimmed(self._joined([[row] for row in rows], width))

    def _pictured(self, rows: Sequence[TrainingRow], vision: Vision) -> Batch:
        """A batch in which images are their tokens, and what the processor makes of their pixels."""
        rows, pixels = vision.expand(rows, self.rules)
        longest = max(row.input_ids.size for row in rows)
        width = longest if self.pad_to_longest else self.rules.max_seq_len
        batch = self._joined([[row] for row in rows], width)
        none = np.zeros(0, np.int64)
        for key in sorted({key for row in rows for key in row.said}):
            said = [row.said.get(key, none) for row in rows]
            batch[key] = torch.from_numpy(self._padded(said, width, 0))
        batch = self._trimmed(batch)
        if vision.with_dummy and not pixels:
            return self.with_dummy_image(batch)
        return batch | pixels

    def with_dummy_image(self, batch: Batch) -> Batch:
        """The batch with an image that nobody looks at."""
        assert self.vision is not None, "of a loader with a processor"
        piece, pixels = self.vision.dummy()
        return self._with_dummy(batch, piece) | pixels

    def _with_dummy(self, batch: Batch, piece: Mapping[str, Tokens]) -> Batch:
        """The batch with the tokens of an image in the padding of its shortest row, where nothing attends to them and none is trained;
        it is as much wider as that takes."""
        lengths = batch["attention_mask"].sum(dim=1)
        row, count = int(lengths.argmin()), len(piece["input_ids"])
        is_left = self.rules.ids.padding_side == "left"
        width = batch["attention_mask"].shape[1]
        more = max(0, count + int(lengths[row]) - width)
        fills = {"input_ids": self._fill, "labels": IGNORED, "sequence_id": -1}
        sides = (more, 0) if is_left else (0, more)
        batch = {k: pad(v, sides, value=fills.get(k, 0)) for k, v in batch.items()}
        start = width + more - int(lengths[row]) - count if is_left else int(lengths[row])
        for key, values in piece.items():
            if key not in batch:
                batch[key] = torch.zeros_like(batch["input_ids"])
            batch[key][row, start : start + count] = torch.from_numpy(values)
        return batch

    def _joined(self, bins: Sequence[Sequence[TrainingRow]], width: int) -> Batch:
        """One padded row per bin. The first label of a row that follows another is ignored: its document just begins."""
        input_ids = [_joint([row.input_ids for row in rows]) for rows in bins]
        labels = [_joint([_follows(row, i) for i, row in enumerate(rows)]) for rows in bins]
        batch = {
            "input_ids": self._padded(input_ids, width, self._fill),
            "labels": self._padded(labels, width, IGNORED),
            "attention_mask": self._mask(input_ids, width),
        }
        if self.with_sequence_id or self.with_position_ids:
            batch["sequence_id"] = self._places(bins, batch["attention_mask"])
            if not self.packer:
                self._mark_documents(batch, [row.is_plain for (row,) in bins])
        if self.with_position_ids:
            batch["position_ids"] = positions(batch["sequence_id"]) * batch["attention_mask"]
            if not self.with_sequence_id:
                del batch["sequence_id"]
        return {key: torch.from_numpy(rows) for key, rows in batch.items()}

    def _mark_documents(self, batch: dict[str, Tokens], plain: Sequence[bool]) -> None:
        """Counts the separators along pretraining rows, as LLM-Foundry's text collator does."""
        if self.separator is None or not any(plain):
            return
        batch["sequence_id"][plain] = self.separator.count(batch["input_ids"][plain])

    @property
    def _fill(self) -> int:
        fill = self.rules.ids.fill
        return 0 if fill is None else fill

    def _padded(self, rows: Sequence[Tokens], width: int, fill: int, side: str = "") -> Tokens:
        padded = np.empty((len(rows), width), np.int64)
        is_left = (side or self.rules.ids.padding_side) == "left"
        for line, row in zip(padded, rows, strict=True):
            begin = width - row.size if is_left else 0
            line[begin : begin + row.size] = row
            line[:begin] = line[begin + row.size :] = fill
        return padded

    def _mask(self, rows: Sequence[Tokens], width: int) -> Tokens:
        """1 where a row has tokens."""
        columns = np.arange(width)
        if self.rules.ids.padding_side == "left":
            columns = columns[::-1]
        return (columns < np.array([[row.size] for row in rows])).astype(np.int64)

    def _places(self, bins: Sequence[Sequence[TrainingRow]], mask: Tokens) -> Tokens:
        """Which row of its bin a token belongs to, or which document of a row: counted along the bin, -1 for padding."""
        if not self.packer and all(row.documents is None for (row,) in bins):
            return mask - 1
        places = [_numbered([self._documents(row) for row in rows]) for rows in bins]
        return self._padded(places, mask.shape[1], -1)

    def _documents(self, row: TrainingRow) -> Tokens:
        """The number of each token's document in the row. Only a packed row and a pretraining row may hold several."""
        if row.documents is not None:
            return np.repeat(np.arange(row.documents.size), row.documents)
        if self.separator is None or not row.is_plain:
            return np.zeros(row.input_ids.size, np.int64)
        return self.separator.count(row.input_ids)

    def _two_sided(self, rows: Sequence[TrainingRow]) -> Batch:
        """Encoder and decoder batch; targets are always padded on the right."""
        longest = max(max(row.input_ids.size, row.labels.size) for row in rows)
        width = longest if self.pad_to_longest else self.rules.max_seq_len
        labels = self._padded([row.labels for row in rows], width, IGNORED, "right")
        shifted = np.insert(labels[:, :-1], 0, self._fill, axis=1)
        batch = {
            "input_ids": self._padded([row.input_ids for row in rows], width, self._fill),
            "attention_mask": self._mask([row.input_ids for row in rows], width),
            "labels": labels,
            "decoder_input_ids": np.where(shifted == IGNORED, self._fill, shifted),
            "decoder_attention_mask": labels != IGNORED,
        }
        return {key: torch.from_numpy(value) for key, value in batch.items()}

    def _trimmed(self, batch: Batch) -> Batch:
        may_trim = self.allow_pad_trimming and self.has_seen_a_batch
        self.has_seen_a_batch = True
        if not may_trim:
            return batch
        if self.rules.decoder_only_format:
            left = self.rules.ids.padding_side == "left"
            return _narrowed(batch, list(batch), batch["attention_mask"], left)
        decoder = ["labels", "decoder_input_ids", "decoder_attention_mask"]
        return _narrowed(
            batch, ["input_ids", "attention_mask"], batch["attention_mask"], False
        ) | _narrowed(batch, decoder, batch["decoder_attention_mask"], False)


def _joint(parts: Sequence[Tokens]) -> Tokens:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _follows(row: TrainingRow, position: int) -> Tokens:
    if position == 0:
        return row.labels
    labels = row.labels.copy()
    labels[:1] = IGNORED
    return labels


def _numbered(rows: Sequence[Tokens]) -> Tokens:
    """The numbers of the rows' documents, end to end: each row counts on where the one before it stopped."""
    first, places = 0, []
    for documents in rows:
        begin = documents[0] if documents.size else 0
        places.append(documents + (first - begin))
        first = places[-1][-1] + 1 if documents.size else first
    return np.concatenate(places)


def _narrowed(batch: Batch, keys: Sequence[str], mask: torch.Tensor, left: bool) -> Batch:
    """The columns that hold the longest row of the batch, rounded up to 8 for the sake of tensor cores."""
    keep = -(-int(mask.sum(dim=1).max()) // 8) * 8
    cut = slice(-keep, None) if left else slice(None, keep)
    return {key: batch[key][:, cut].contiguous() for key in keys}


@dataclass(slots=True, kw_only=True)
class OtherCollate:
    """The batches of a loader that a kind of stream brings."""

    rules: RowRules
    loader: OtherLoader
    packer: None = None
    vision: None = None
    with_position_ids: bool = False

    def __call__(self, rows: Sequence[Any]) -> Batch:
        ids = self.rules.ids
        eos, fill = (-1 if token is None else token for token in (ids.eos, ids.fill))
        batch = self.loader.batch(rows, self.rules.max_seq_len, eos, fill)
        return {key: torch.from_numpy(values) for key, values in batch.items()}


Split = Callable[[Batch, int | float], list[Batch]]


def prepare(collate: Collate) -> Split:
    """Makes the batches of a loader that sees such as can be cut, and returns what cuts them."""
    vision = collate.vision
    assert vision is not None, "a loader of images"
    vision.is_split, with_dummy = True, vision.with_dummy
    vision.with_dummy = False  # each microbatch has its own

    def split(batch: Batch, size: int | float) -> list[Batch]:
        if isinstance(size, float):
            raise RecipeError(
                f"device_train_microbatch_size is {size}, and a row with its images cannot be cut: give a whole number of rows."
            )
        return [
            collate.with_dummy_image(part) if with_dummy and not has_images else part
            for part, has_images in _parts(batch, size)
        ]

    return split


def rows_of(batch: Batch) -> int:
    """Rows of a batch or of a microbatch."""
    return len(batch["input_ids"])


def _parts(batch: Batch, size: int) -> Iterator[tuple[Batch, bool]]:
    """So many rows each, and whether there are images among them: else no tensor of pixels is in it."""
    whose: Any = batch.get(ROWS, {})
    for start in range(0, rows_of(batch), size):
        stop = start + size
        part = {k: v[start:stop] for k, v in batch.items() if k != ROWS and k not in whose}
        pixels = {
            key: batch[key][sum(counts[:start]) : sum(counts[:stop])]
            for key, counts in whose.items()
        }
        has_images = any(len(tensor) for tensor in pixels.values())
        yield (part | pixels if has_images else part), has_images
