"""Surveys an unconverted source: splits it into parts, and encodes the beginnings of a few of these
splits as a conversion would encode them.

A plan uses a survey to estimate how many tokens a stream will have. A conversion uses a survey to
estimate which part of a source is enough for a stream's share of a budget. Documents differ in
length by orders of magnitude, but hardly in tokens per byte, so tokens are counted per byte.
Nothing is written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mdsmix import sources
from mdsmix.encode.backends import Backend, Unequal
from mdsmix.encode.encoded import Encoded
from mdsmix.frozen import frozen
from mdsmix.kinds.read_records import RecordReader, open_record_encoder
from mdsmix.kinds.resolved_stream import ResolvedStream
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.sources import SourceFile, Unit
from mdsmix.storage import Location
from mdsmix.tokenizer.card import Tokenizer


@frozen(kw_only=True, slots=True)
class SplitSample:
    """The encoded records from the beginning of one split. A split is a part of a source file."""

    encoded: Encoded
    weight: float
    "Uncompressed bytes of the source that were read, counted as `estimate_size` counts them."
    left_out: Counter[str]
    "Reason code -> records that became no sample."
    tokens: int
    """Tokens that a model sees. An image counts as many tokens as the processor makes of it; tokens
    that the loader cuts off do not count.
    """
    by_record: NDArray[Any]
    """One number for each record that becomes samples: its tokens, including tokens that the loader
    cuts off.
    """


@frozen(kw_only=True)
class Rates:
    """Tokens per byte and per record of a source, estimated from the splits (parts of source files)
    that were read.
    """

    tokens_per_byte: float
    "Tokens per uncompressed byte of the source, counted as `estimate_size` counts bytes."
    error: float
    """The relative standard error of `tokens_per_byte`, from the differences between splits; 0 if
    one split was read.
    """
    mean: float
    "Tokens per record, on average."
    spread: float
    "The standard deviation of the tokens of a record, divided by `mean`."
    splits: int
    "How many splits were read."


@frozen(kw_only=True)
class Survey:
    """Reads and encodes small parts of a stream's source, to estimate its tokens. The fields are
    the stream and how it is encoded.
    """

    stream: ResolvedStream
    tokenizer: Tokenizer
    open_backend: Callable[[str], Backend]
    "Opens a tokenizer backend by its name, such as `auto`."
    backend: str
    """The name of the backend that is used first. If its token ids differ from those of the
    reference backend, everything is encoded again by the reference.
    """
    images_root: Location | None
    "The folder that image paths are relative to; None: the folder of the file with the record."
    reads_images: bool
    "Whether image files are read; otherwise images are only counted."

    def choose_units(
        self, files: Sequence[SourceFile], least_window: int = sources.LEAST_WINDOW
    ) -> list[Unit]:
        """Choose up to 32 splits (parts of files) whose first records will be read. Hashes of the
        files' names decide, so the same files give the same splits.

        Args:
            files: all files of the source.
            least_window: the fewest bytes of a split.
        """
        return sources.choose_splits(
            files,
            least_window,
            fields=self.stream.fields_read,
            parsed=self.stream.fields_parsed,
            text_or_messages=self.stream.fields_with_text_or_messages,
        )

    def read(self, units: Sequence[Unit], size: int | None = None) -> list[SplitSample]:
        """Read and encode the first records of these splits (parts of source files).

        Args:
            units: the splits, from `choose_units`.
            size: bytes of source to read of each split; None: the default of `read_beginnings`.
        """
        # Image paths are relative to `images.root`, or else to the folder of the records' file.
        root = self.images_root if self.reads_images else None
        finds_images_by_file = self.reads_images and root is None

        def open_reader(backend: str) -> RecordReader:
            """Return a reader that encodes records with this backend."""
            return open_record_encoder(
                self.stream, self.tokenizer, self.open_backend(backend), root
            )

        # If the backend's token ids are wrong, encode everything again by the reference.
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
    """Read and encode the first records of each split (part of a source file).

    Args:
        units: the splits.
        reader: encodes their records.
        finds_images_by_file: whether image paths are relative to the folder of the records' file.
        size: bytes of source to read of each split; None: the default of `read_beginnings`.
    """
    samples = list[SplitSample]()
    for beginning in sources.read_beginnings(units, size):
        records = beginning.records
        folders = list[Location]()
        if finds_images_by_file:
            folders = [beginning.folder for _ in records]
        encoded = reader.encode(records, folders=folders)
        # An image is stored as one token, so the processor's other tokens are added here.
        copies = reader.kind.image_copies if reader.kind else 1
        image_tokens = [
            copies * sum(max(0, image.tokens - 1) for image in images) for images in encoded.images
        ]
        lengths = encoded.lengths
        if image_tokens:
            lengths = lengths + np.array(image_tokens, np.int64)
        # Add up the tokens of each record, since a record may give several samples. The positions
        # 4, 4, 7 become the numbers 0, 0, 1; `bincount` adds lengths of equal numbers.
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
    """Return the tokens per byte and per record over all splits; None if they contain no token.

    Args:
        samples: the splits (parts of source files) that were read.
    """
    tokens = np.array([sample.tokens for sample in samples])
    sizes = np.array([sample.weight for sample in samples])  # bytes
    if not tokens.sum():
        return None
    record_lengths = np.concatenate([sample.by_record for sample in samples])  # tokens
    splits = len(samples)
    tokens_per_byte = float(tokens.sum() / sizes.sum())
    error = 0.0
    if splits > 1:
        # The relative standard error of a ratio estimate (tokens to bytes). It follows from how far
        # the tokens of each split differ from the tokens that its bytes let expect.
        expected_tokens = sizes * tokens_per_byte
        squares = float(np.sum((tokens - expected_tokens) ** 2))
        variance = squares * splits / (splits - 1)
        error = math.sqrt(variance) / float(tokens.sum())
    return Rates(
        tokens_per_byte=tokens_per_byte,
        error=error,
        mean=float(np.mean(record_lengths)),
        spread=float(np.std(record_lengths) / np.mean(record_lengths)),
        splits=splits,
    )
