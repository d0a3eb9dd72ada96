"""Parquet files of token ids, which `datasets`, TRL, axolotl and transformers' Trainer read.

A row of text or of prompts and responses has these columns, each a list with a value per token:

- `input_ids`: int32.
- `labels`: int32, the id if the token gives a loss, otherwise -100. Also -100 at the first token of
  each document, which nothing predicts. So the labels above -100 are the tokens that give a loss.
- `attention_mask`: int8, all 1, since rows are not padded.
- `position_ids`: int32, the position of the token in its document.

If the stream has loss weights, its rows have `loss_weights` (float32) too: the weight of each
label, 0 at labels of -100.

Rows of a packed stream have `seq_lengths` (int32) too: the length of each document, as TRL names
it. A preference has TRL's columns `prompt_ids`, `chosen_ids` and `rejected_ids`, and the rewards if
the stream stores them. An unpaired preference has TRL's columns `prompt_ids`, `completion_ids` and
`label` (bool).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mdsmix.exporting.stream_rows import (
    Counts,
    count_preferences,
    count_trained_rows,
    count_unpaired,
    find_documents,
    make_labels,
    number_tokens_of_documents,
)
from mdsmix.exporting.writer import FileWriter
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.shards.token_ids import LOSS_WEIGHTS

if TYPE_CHECKING:
    import pyarrow

    from mdsmix.exporting.stream_rows import ExportedStream
    from mdsmix.shards.token_ids import PreferenceRows, TrainedRows, UnpairedRows

COMPRESSION = "zstd"


class Parquet(FileWriter):
    """Writes each shard as a Parquet file with a row for each sample."""

    name = "parquet"
    has_weights = True
    suffix = ".parquet"

    @classmethod
    def find_refusal(cls, stream: ExportedStream) -> str:
        return refuse_encoder_decoder(stream)

    def notes(self) -> Iterator[str]:
        longest = self.stream.manifest.encoding.max_seq_len
        if self.stream.has_preferences or self.stream.has_unpaired:
            trainer = "KTOTrainer" if self.stream.has_unpaired else "DPOTrainer"
            yield (
                f"preferences: TRL's {trainer} tokenizes texts itself; docs/exporting.md has the "
                "lines with which it trains these ids"
            )
            return
        yield (
            "set max_length of TRL's SFTConfig (1,024 by default) or sequence_len of axolotl to at "
            f"least {longest:,}, or they cut rows"
        )
        if self.stream.is_packed:
            yield (
                "packed rows: TRL keeps the documents of a row apart only with padding_free=True "
                "and an attention kernel that supports it"
            )
        if self.stream.has_weights:
            yield (
                "no trainer uses the column loss_weights by itself: multiply a loss of your own by "
                "it"
            )

    def write_file(self, file: BinaryIO, shard: Shard, samples: Ragged) -> Counts:
        import pyarrow.parquet

        tables = self._make_tables(shard, samples)
        counts, first = next(tables)
        # Lists of token ids have no order that statistics could use.
        with pyarrow.parquet.ParquetWriter(
            file, first.schema, compression=COMPRESSION, write_statistics=False
        ) as writer:
            writer.write_table(first)
            for batch_counts, table in tables:
                counts += batch_counts
                writer.write_table(table)
        return counts

    def _make_tables(self, shard: Shard, samples: Ragged) -> Iterator[tuple[Counts, pyarrow.Table]]:
        """Yield the samples of a shard as tables, each a row group, with their counts."""
        if self.stream.has_preferences:
            for preferences in self.stream.read_preferences(shard, samples):
                yield count_preferences(preferences), make_preference_table(preferences)
        elif self.stream.has_unpaired:
            for unpaired in self.stream.read_unpaired(shard, samples):
                yield count_unpaired(unpaired), make_unpaired_table(unpaired)
        else:
            for rows in self.stream.read_rows(shard, samples):
                yield (
                    count_trained_rows(rows),
                    make_row_table(rows, is_packed=self.stream.is_packed),
                )


def make_row_table(rows: TrainedRows, *, is_packed: bool) -> pyarrow.Table:
    """Return a table with a row of token ids, labels, mask and positions for each row."""
    import pyarrow as pa

    offsets = rows.ids.offsets
    tokens = len(rows.ids.values)
    columns = {
        "input_ids": make_lists(rows.ids.values.astype(np.int32), offsets),
        "labels": make_lists(make_labels(rows), offsets),
        "attention_mask": make_lists(np.ones(tokens, np.int8), offsets),
        "position_ids": make_lists(number_tokens_of_documents(rows), offsets),
    }
    if rows.weights is not None:
        columns[LOSS_WEIGHTS] = make_lists(rows.weights, offsets)
    if is_packed:
        lengths = find_documents(rows).lengths.astype(np.int32)
        columns["seq_lengths"] = make_lists(lengths, rows.starts.offsets)
    return pa.table(columns)


def make_preference_table(preferences: PreferenceRows) -> pyarrow.Table:
    """Return a table with a row for each preference, in TRL's columns."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for name, ids in (
        ("prompt_ids", preferences.prompts),
        ("chosen_ids", preferences.chosen),
        ("rejected_ids", preferences.rejected),
    ):
        columns[name] = make_lists(ids.values.astype(np.int32), ids.offsets)
    for name, rewards in preferences.rewards.items():
        columns[name] = pa.array(rewards)
    return pa.table(columns)


def make_unpaired_table(rows: UnpairedRows) -> pyarrow.Table:
    """Return a table with a row for each unpaired preference, in TRL's columns."""
    import pyarrow as pa

    return pa.table(
        {
            "prompt_ids": make_lists(rows.prompts.values, rows.prompts.offsets),
            "completion_ids": make_lists(rows.completions.values, rows.completions.offsets),
            "label": pa.array(rows.labels),
        }
    )


def make_lists(values: NDArray[Any], offsets: NDArray[np.int64]) -> pyarrow.ListArray:
    """Return an Arrow array of lists: list `i` is `values[offsets[i]:offsets[i + 1]]`."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def refuse_encoder_decoder(stream: ExportedStream) -> str:
    """Return why rows of an encoder-decoder cannot be exported; "" if it has none."""
    if stream.manifest.encoding.decoder_only_format:
        return ""
    return (
        "was converted with decoder_only_format: false, and the formats here are for decoder-only "
        "models: convert it again with decoder_only_format: true."
    )
