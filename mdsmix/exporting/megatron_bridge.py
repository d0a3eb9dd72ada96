"""Packed rows of Megatron-Bridge: Parquet files `*.idx.parquet` with these columns.

- `input_ids`: list<int32>, the tokens of all documents.
- `seq_start_id`: list<int32>, the positions at which documents begin.
- `loss_mask`: list<int8>, as long as `input_ids`. The mask of a token is multiplied with the loss
  of what is predicted at that token. Our mask marks the token that is predicted, so it is moved by
  one: a 1 is at the token before the trained token. The last token of a document predicts nothing
  in it, and the first is never trained, so none of our marks is lost.

Source: megatron/bridge/data/packing/parquet.py and gpt_sft.py of Megatron-Bridge 0.6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from mdsmix.exporting.parquet import COMPRESSION, make_lists
from mdsmix.exporting.stream_rows import Counts, ExportedStream, count_trained_rows
from mdsmix.exporting.writer import FileWriter
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard

if TYPE_CHECKING:
    import pyarrow

    from mdsmix.shards.token_ids import TrainedRows

ROW_GROUP = 500
"""Rows of a row group. Megatron-Bridge writes 500, and reads a whole group for one row, at random
places.
"""


class MegatronBridge(FileWriter):
    """Writes each shard of packed rows as a Parquet file."""

    name = "megatron-bridge"
    suffix = ".idx.parquet"

    @classmethod
    def find_refusal(cls, stream: ExportedStream) -> str:
        if stream.is_packed:
            return ""
        if stream.has_preferences:
            return "has preferences, which are not packed rows: use --to parquet or --to litdata."
        return (
            "is not packed, and Megatron-Bridge reads tokens only as packed rows: set pack: true "
            "for this stream and convert it, or use --to parquet."
        )

    def notes(self) -> Iterator[str]:
        longest = self.stream.manifest.encoding.max_seq_len
        yield (
            f"set seq_length to {longest:,} or more, and leave answer_only_loss: true, which "
            "trains by the mask; false trains every token but those after EOS"
        )

    def write_file(self, file: BinaryIO, shard: Shard, samples: Ragged) -> Counts:
        import pyarrow.parquet

        counts = Counts()
        writer = None
        for rows in self.stream.read_rows(shard, samples):
            table = make_packed_table(rows)
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(
                    file, table.schema, compression=COMPRESSION, write_statistics=False
                )
            writer.write_table(table, row_group_size=ROW_GROUP)
            counts += count_trained_rows(rows)
        if writer:
            writer.close()
        return counts


def make_packed_table(rows: TrainedRows) -> pyarrow.Table:
    """Return a table in the columns of Megatron-Bridge, with a row for each row."""
    import pyarrow as pa

    offsets = rows.ids.offsets
    # The first token of a document is not trained, so no mark moves into the document before it.
    mask = np.zeros(len(rows.ids.values), np.int8)
    mask[:-1] = rows.is_trained[1:]
    return pa.table(
        {
            "input_ids": make_lists(rows.ids.values.astype(np.int32), offsets),
            "loss_mask": make_lists(mask, offsets),
            "seq_start_id": make_lists(rows.starts.values.astype(np.int32), rows.starts.offsets),
        }
    )
