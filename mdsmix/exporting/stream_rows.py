"""The samples of a published stream as a trainer sees them: ended with EOS, cut to max_seq_len, and
with the tokens that give a loss.

A shard is read and verified as a whole, usually 64 MiB, and its samples are decoded in batches. A
thread reads the next shard while the caller writes the rows of one. So memory does not grow with
the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.frozen import frozen
from mdsmix.kinds import kind_of
from mdsmix.kinds.kind import Kind
from mdsmix.mix.streams.mix import StreamInMix
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.published import VERSION_NAME
from mdsmix.shards.shard_samples import open_shard, read_all_samples
from mdsmix.shards.token_ids import (
    IGNORED_LABEL,
    LOSS_WEIGHTS,
    PREFERENCE_COLUMNS,
    PROMPT_COLUMNS,
    UNPAIRED_COLUMNS,
    PreferenceRows,
    TrainedRows,
    UnpairedRows,
    decode_preferences,
    decode_tokens,
    decode_unpaired,
    find_id_columns,
)

BATCH_BYTES = 4 << 20
"""Stored bytes of the samples that are decoded together: 4 MiB, or one larger sample. They are two
million tokens of uint16, which take about 60 MB until they are written.
"""


@frozen(kw_only=True, slots=True)
class Counts:
    """What an export contains, or a file of it."""

    samples: int = 0
    tokens: int = 0
    trained: int = 0
    "Tokens that give a loss."

    def __add__(self, added: Counts) -> Counts:
        return Counts(
            samples=self.samples + added.samples,
            tokens=self.tokens + added.tokens,
            trained=self.trained + added.trained,
        )


def sum_counts(counts: Iterable[Counts]) -> Counts:
    return sum(counts, Counts())


@frozen
class ExportedStream:
    """A published stream that is to be exported. Its manifest is known to fit its index."""

    name: str
    stream: StreamInMix
    manifest: Manifest

    @cached_property
    def kind(self) -> Kind:
        return kind_of(self.manifest.encoding)

    @property
    def split(self) -> str:
        """The split, such as `train`: mdsmix publishes a stream as <stream>/<split>."""
        folder = self.stream.folder.name
        version = VERSION_NAME.fullmatch(folder)
        return version[1] if version else folder

    @property
    def folder_name(self) -> str:
        """The name of the stream's folder in an export of several streams."""
        is_url = "/" in self.name
        return self.stream.folder.parent.name if is_url else self.name

    @property
    def published_name(self) -> str:
        """The stream and its split, such as `chat/train`, however the user named it."""
        return f"{self.stream.folder.parent.name}/{self.split}"

    @property
    def eos(self) -> int | None:
        return self.manifest.tokenizer.eos_id

    @property
    def has_preferences(self) -> bool:
        return find_id_columns(self.stream.columns) == PREFERENCE_COLUMNS

    @property
    def has_unpaired(self) -> bool:
        """Whether the samples are unpaired preferences: a prompt, a completion and a label."""
        return find_id_columns(self.stream.columns) == UNPAIRED_COLUMNS

    @property
    def has_prompts(self) -> bool:
        return find_id_columns(self.stream.columns) == PROMPT_COLUMNS

    @property
    def has_weights(self) -> bool:
        return LOSS_WEIGHTS in self.stream.columns

    @property
    def is_packed(self) -> bool:
        return self.manifest.encoding.pack

    @property
    def bytes(self) -> int:
        return self.stream.index.bytes

    @property
    def expected(self) -> Counts:
        """The counts that the manifest states."""
        totals = self.manifest.totals
        trained = totals.loss_tokens
        tokens = totals.seen_tokens
        if self.has_preferences:
            # The manifest subtracts the tokens that ComposeRL's collator cuts off so that both
            # answers fit into one row. Other trainers give each answer a row of its own.
            trained += totals.cut_tokens
            tokens += totals.cut_tokens
        return Counts(samples=totals.samples, tokens=tokens, trained=trained)

    @property
    def is_counted(self) -> bool:
        """Whether the manifest counts the tokens as training sees them. Those of earlier commits of
        mdsmix do not count the EOS tokens that are appended. They count the token of a target whose
        context fills the row, which is stored and then cut off; a manifest may add up units of
        earlier and of later commits.
        """
        encoding = self.manifest.encoding
        totals = self.manifest.totals
        if not self.kind.gets_eos:
            return True
        is_pair = "labels" in encoding.columns
        has_stored_cut = is_pair and totals.longest > encoding.max_seq_len
        return totals.is_eos_counted and not (has_stored_cut and encoding.decoder_only_format)

    def read_rows(self, shard: Shard, samples: Ragged) -> Iterator[TrainedRows]:
        """Yield the rows of a shard, some at a time.

        Raises Unreachable if a sample is damaged, or if no column contains token ids.

        Args:
            shard: the shard's entry in the index.
            samples: the bytes of its samples.
        """
        with open_shard(self.stream.folder, shard) as file:
            for batch in _split_samples(samples):
                tokens = decode_tokens(shard, batch)
                if tokens is None:
                    raise Unreachable(
                        f"none of the columns of the shard {file} contains token ids (they are "
                        f"{', '.join(shard.columns)}): convert the texts with mdsmix, and name "
                        "that stream."
                    )
                yield self.kind.finish_rows(tokens, self.eos)

    def read_preferences(self, shard: Shard, samples: Ragged) -> Iterator[PreferenceRows]:
        """Yield the preferences of a shard, some at a time. The arguments and errors are those of
        `read_rows`.
        """
        with open_shard(self.stream.folder, shard):
            for batch in _split_samples(samples):
                yield decode_preferences(shard, batch)

    def read_unpaired(self, shard: Shard, samples: Ragged) -> Iterator[UnpairedRows]:
        """Yield the unpaired preferences of a shard, some at a time. The arguments and errors are
        those of `read_rows`.
        """
        with open_shard(self.stream.folder, shard):
            for batch in _split_samples(samples):
                yield decode_unpaired(shard, batch)


def _split_samples(samples: Ragged) -> Iterator[Ragged]:
    """Yield the samples in batches of about BATCH_BYTES, in their order."""
    edges = np.arange(BATCH_BYTES, samples.offsets[-1], BATCH_BYTES)
    # The first sample that begins after each edge begins a batch.
    starts = np.unique(np.searchsorted(samples.offsets[:-1], edges)).tolist()
    bounds = [0, *(start for start in starts if 0 < start < len(samples)), len(samples)]
    for start, stop in pairwise(bounds):
        if start < stop:
            yield samples.slice(start, stop)


def read_shards(
    stream: ExportedStream, numbers: Sequence[int]
) -> Iterator[tuple[int, Shard, Ragged]]:
    """Yield (number, shard, its samples) for some shards of a stream, in this order. The next shard
    is read while the caller works on one.

    Raises Unreachable if a shard is not as its index states.

    Args:
        numbers: the positions of the shards in the index.
    """
    shards = stream.stream.shards
    folder = stream.stream.folder
    with ThreadPoolExecutor(1) as reader:
        pending = None
        for number in numbers:
            samples = reader.submit(read_all_samples, folder, shards[number])
            if pending:
                yield pending[0], shards[pending[0]], pending[1].result()
            pending = (number, samples)
        if pending:
            yield pending[0], shards[pending[0]], pending[1].result()


def count_trained_rows(rows: TrainedRows) -> Counts:
    return Counts(
        samples=len(rows.ids),
        tokens=len(rows.ids.values),
        trained=int(np.count_nonzero(rows.is_trained)),
    )


def count_preferences(rows: PreferenceRows) -> Counts:
    """Count preferences as the manifest does: a prompt counts twice, once for each answer."""
    answers = len(rows.chosen.values) + len(rows.rejected.values)
    return Counts(
        samples=len(rows.prompts), tokens=2 * len(rows.prompts.values) + answers, trained=answers
    )


def count_unpaired(rows: UnpairedRows) -> Counts:
    """Count unpaired preferences: the tokens of completions are trained."""
    trained = len(rows.completions.values)
    return Counts(
        samples=len(rows.prompts), tokens=len(rows.prompts.values) + trained, trained=trained
    )


def make_labels(rows: TrainedRows) -> NDArray[np.int32]:
    """Return int32 [tokens]: each id that gives a loss, and IGNORED_LABEL for the others."""
    ids = rows.ids.values.astype(np.int32)
    return np.where(rows.is_trained, ids, np.int32(IGNORED_LABEL))


def find_documents(rows: TrainedRows) -> Ragged:
    """Return the documents of all rows as rows of their own, without a copy. A row that is not
    packed is one document.
    """
    starts = rows.starts.values + np.repeat(rows.ids.offsets[:-1], rows.starts.lengths)
    return Ragged(rows.ids.values, np.append(starts, len(rows.ids.values)))


def number_tokens_of_documents(rows: TrainedRows) -> NDArray[np.int32]:
    """Return int32 [tokens]: the position of each token in its document."""
    documents = find_documents(rows)
    positions = np.arange(len(documents.values), dtype=np.int64)
    positions -= np.repeat(documents.offsets[:-1], documents.lengths)
    return positions.astype(np.int32)
