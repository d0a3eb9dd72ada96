"""Surveys of an unconverted source: the beginnings of a few of its splits are encoded as a
conversion would encode them.

A plan estimates from a survey how many tokens a stream will have, and a conversion which part of a
source fills its share of a budget. Documents differ in length by orders of magnitude, but hardly in
tokens per byte, so counts are taken per byte. Nothing is written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix import sources
from mdsmix.encode.backends import Backend, Unequal
from mdsmix.encode.encoded import Encoded
from mdsmix.kinds.read_records import RecordReader, open_record_encoder
from mdsmix.kinds.resolved_stream import ResolvedStream
from mdsmix.sources import SourceFile, Unit
from mdsmix.storage import Location
from mdsmix.tokenizer.card import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSample:
    """The beginning of one split."""

    encoded: Encoded
    weight: float
    "The bytes of its records, as `estimate_size` counts those of all files."
    left_out: Counter[str]
    "Reason code -> records that became no sample."
    tokens: int
    """Tokens that a model sees: images count with the processor's tokens, and tokens that the
    loader cuts off do not count.
    """
    by_record: NDArray[Any]
    "Tokens of each record that becomes samples; tokens that the loader cuts off count."


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens per byte and per record of a source, estimated from the splits that were read."""

    tokens_per_byte: float
    "Bytes as `estimate_size` counts them."
    error: float
    """The relative standard error of `tokens_per_byte`, from the differences between splits; 0 if
    one split was read.
    """
    mean: float
    "Tokens per record, on average."
    spread: float
    "The standard deviation of the tokens of a record, as a part of their mean."
    splits: int
    "How many splits were read."


@dataclass(frozen=True, kw_only=True)
class Survey:
    """How the source of a stream is surveyed."""

    stream: ResolvedStream
    tokenizer: Tokenizer
    open_backend: Callable[[str], Backend]
    "Opens the backend of a name for the tokenizer."
    backend: str
    """The backend's name. If its ids differ from the reference's, all is encoded again by the
    reference.
    """
    images_root: Location | None
    "The folder where paths of images begin; None: that of the records' file."
    reads_images: bool
    "Whether images are read, and not only counted."

    def choose_units(
        self, files: Sequence[SourceFile], least_window: int = sources.LEAST_WINDOW
    ) -> list[Unit]:
        """Choose the splits whose beginnings are read.

        Args:
            files: all files of the source.
            least_window: the least bytes of a split.
        """
        return sources.choose_splits(
            files,
            least_window,
            fields=self.stream.fields_read,
            parsed=self.stream.fields_parsed,
        )

    def read(self, units: Sequence[Unit], size: int | None = None) -> list[SplitSample]:
        """Read and encode the beginnings of these splits.

        Args:
            units: the splits.
            size: source bytes to read of each; None: the default of `read_beginnings`.
        """
        has_root = self.reads_images and self.images_root is not None
        root = self.images_root if has_root else None

        def open_reader(backend: str) -> RecordReader:
            return open_record_encoder(
                self.stream, self.tokenizer, self.open_backend(backend), root
            )

        finds_images_by_file = self.reads_images and not has_root
        try:
            return read_splits(units, open_reader(self.backend), finds_images_by_file, size)
        except Unequal:
            return read_splits(units, open_reader("reference"), finds_images_by_file, size)


def read_splits(
    units: Sequence[Unit],
    reader: RecordReader,
    finds_images_by_file: bool,
    size: int | None = None,
) -> list[SplitSample]:
    """Read and encode the beginnings of splits.

    Args:
        units: the splits.
        reader: encodes their records.
        finds_images_by_file: whether paths of images begin at the folder of the records' file.
        size: source bytes to read of each split; None: the default of `read_beginnings`.
    """
    samples = list[SplitSample]()
    for beginning in sources.read_beginnings(units, size):
        records = beginning.records
        folders = [beginning.folder] * len(records) if finds_images_by_file else []
        encoded = reader.encode(records, folders=folders)
        # A stored image is one token.
        image_tokens = [
            sum(max(0, image.tokens - 1) for image in images) for images in encoded.images
        ]
        lengths = encoded.lengths
        if image_tokens:
            lengths = lengths + np.array(image_tokens, np.int64)
        _, record_numbers = np.unique(encoded.positions, return_inverse=True)
        samples.append(
            SplitSample(
                encoded=encoded,
                weight=beginning.weight,
                left_out=Counter(map(str, encoded.rejected.values())) + beginning.bad,
                tokens=encoded.totals.seen_tokens + sum(image_tokens),
                by_record=np.bincount(record_numbers, lengths),
            )
        )
    return samples


def estimate_rates(samples: Sequence[SplitSample]) -> Rates | None:
    """Return the rates of the splits together; None if they contain no token."""
    tokens = np.array([sample.tokens for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    if not tokens.sum():
        return None
    lengths = np.concatenate([sample.by_record for sample in samples])
    splits = len(samples)
    tokens_per_byte = float(tokens.sum() / weights.sum())
    error = 0.0
    if splits > 1:
        squares = float(np.sum((tokens - weights * tokens_per_byte) ** 2))
        variance = squares * splits / (splits - 1)
        error = math.sqrt(variance) / float(tokens.sum())
    return Rates(
        tokens_per_byte=tokens_per_byte,
        error=error,
        mean=float(np.mean(lengths)),
        spread=float(np.std(lengths) / np.mean(lengths)),
        splits=splits,
    )
