"""Chunks of litData: `chunk-0-0.bin`, ... and `index.json`, which its StreamingDataset reads.

A sample is a dict of 1-d tensors: `input_ids` (int32) and `labels` (int64, -100 for tokens that are
not trained, as PyTorch's loss takes them), and `position_ids` (int64) if rows are packed. A
preference is `prompt_ids`, `chosen_ids` and `rejected_ids` (int32).

A chunk has the layout of an MDS shard: the number of samples and n + 1 offsets (uint32), then the
samples. A sample is the sizes of its values in bytes (uint32), then the values.

Source: litdata/streaming/writer.py and item_loader.py of litData 0.2.76.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.exporting.parquet import refuse_encoder_decoder
from mdsmix.exporting.stream_rows import (
    Counts,
    ExportedStream,
    count_preferences,
    count_trained_rows,
    make_labels,
    number_tokens_of_documents,
)
from mdsmix.exporting.writer import FileWriter, Piece
from mdsmix.ragged import Ragged
from mdsmix.shards.index import INDEX, Shard
from mdsmix.storage.local import LocalPath

TORCH_CODES = {"int32": 16, "int64": 18}
"NumPy dtype -> the code that litData gives the same torch dtype."
Columns = Mapping[str, Ragged]
"Key of a sample -> its value in each sample."


class LitData(FileWriter):
    """Writes each shard as a chunk, and the index at the end."""

    name = "litdata"
    suffix = ".bin"

    @classmethod
    def find_refusal(cls, stream: ExportedStream) -> str:
        return refuse_encoder_decoder(stream)

    @property
    def names(self) -> str:
        return r"chunk-0-\d+\.bin|index\.json"

    def name_file(self, number: int) -> str:
        return f"chunk-0-{number}.bin"

    @property
    def dtypes(self) -> dict[str, str]:
        """Key of a sample -> NumPy dtype of its tensor."""
        if self.stream.has_preferences:
            return dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), "int32")
        dtypes = {"input_ids": "int32", "labels": "int64"}
        return dtypes | {"position_ids": "int64"} if self.stream.is_packed else dtypes

    def write_piece(self, number: int, source: str, shard: Shard, samples: Ragged) -> Piece:
        # An earlier index does not fit the new chunks, and litData would read both without a word.
        LocalPath(str(self.folder / INDEX)).delete()
        return super().write_piece(number, source, shard, samples)

    def write_file(self, file: BinaryIO, shard: Shard, samples: Ragged) -> Counts:
        counts = Counts()
        # The table of offsets is written when the sizes of all samples are known.
        table_bytes = 4 * (shard.samples + 2)
        file.write(bytes(table_bytes))
        ends = [np.array([table_bytes], np.int64)]
        for batch_counts, columns in self._make_columns(shard, samples):
            counts += batch_counts
            chunk = lay_out_chunk(columns, self.dtypes)
            ends.append(ends[-1][-1] + chunk.offsets[1:])
            file.write(chunk.values.data)
        offsets = np.concatenate(ends)
        if offsets[-1] >= 1 << 32:
            raise Unreachable(
                f"the shard {shard.stored.basename} cannot be exported to litData: it would be a "
                f"chunk of {offsets[-1]:,} bytes, but litData's chunks have at most 4,294,967,295. "
                "Use --to parquet."
            )
        file.seek(0)
        file.write(np.concatenate([[shard.samples], offsets]).astype("<u4").data)
        file.seek(0, 2)
        return counts

    def _make_columns(self, shard: Shard, samples: Ragged) -> Iterator[tuple[Counts, Columns]]:
        """Yield the values of samples by their keys, with their counts."""
        if self.stream.has_preferences:
            for preferences in self.stream.read_preferences(shard, samples):
                sides = (preferences.prompts, preferences.chosen, preferences.rejected)
                yield count_preferences(preferences), dict(zip(self.dtypes, sides, strict=True))
            return
        for rows in self.stream.read_rows(shard, samples):
            values: dict[str, NDArray[Any]] = {"input_ids": rows.ids.values}
            values["labels"] = make_labels(rows)
            if self.stream.is_packed:
                values["position_ids"] = number_tokens_of_documents(rows)
            offsets = rows.ids.offsets
            yield (
                count_trained_rows(rows),
                {key: Ragged(row, offsets) for key, row in values.items()},
            )

    def finish(self, pieces: Sequence[Piece]) -> None:
        LocalPath(str(self.folder / INDEX)).write(self._make_index(pieces))

    def list_files(self, pieces: Sequence[Piece]) -> Mapping[str, int]:
        return {**super().list_files(pieces), INDEX: len(self._make_index(pieces))}

    def _make_index(self, pieces: Sequence[Piece]) -> bytes:
        """Return the index as litData's writer would write it."""
        chunks = list[dict[str, Any]]()
        for piece in pieces:
            for name, size in piece.files.items():
                chunks.append(
                    {
                        "chunk_bytes": size,
                        "chunk_size": piece.samples,
                        "dim": None,
                        "filename": name,
                    }
                )
        leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
        spec = {
            "type": "builtins.dict",
            "context": json.dumps(list(self.dtypes)),
            "children_spec": [leaf for _ in self.dtypes],
        }
        config = {
            "compression": None,
            "chunk_size": None,
            "chunk_bytes": max((chunk["chunk_bytes"] for chunk in chunks), default=0),
            "data_format": [f"no_header_tensor:{TORCH_CODES[t]}" for t in self.dtypes.values()],
            "data_spec": json.dumps([1, spec]),
            "encryption": None,
            "item_loader": "PyTreeLoader",
        }
        # litData names the cache of a stream by this time. Here it is a hash, so that the same
        # stream gives the same bytes.
        identity = xxhash.xxh64_intdigest("".join(piece.source for piece in pieces))
        index = {"chunks": chunks, "config": config, "updated_at": str(identity)}
        return json.dumps(index, sort_keys=True).encode()


def lay_out_chunk(columns: Columns, dtypes: Mapping[str, str]) -> Ragged:
    """Return samples as bytes: of each the sizes of its values (uint32), then the values.

    Args:
        columns: key of a sample -> its value in each sample.
        dtypes: key -> dtype of the stored value.
    """
    parts = list[Ragged]()
    sizes = []
    for key, dtype in dtypes.items():
        rows = columns[key]
        width = np.dtype(dtype).itemsize
        parts.append(Ragged(rows.values.astype(dtype).view(np.uint8), rows.offsets * width))
        sizes.append(rows.lengths * width)
    head = np.stack(sizes, axis=1).astype("<u4")
    heads = Ragged.from_lengths(head.view(np.uint8).ravel(), np.full(len(head), 4 * len(sizes)))
    return Ragged.zip([heads, *parts])
