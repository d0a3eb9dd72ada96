"""The indexed dataset of Megatron-LM, NeMo and Megatron-Bridge: `train.bin` with the tokens of all
documents, one after the other, and `train.idx` with their lengths.

A document of a packed row becomes a document of its own, and so does each row of a stream that is
not packed. The format has no mask: Megatron cuts the documents, joined and shuffled, into sequences
of its own, and trains each of their tokens.

Both files grow while shards are read, under names with the suffix UNFINISHED. The lengths are
written as int32, and the index is made of them at the end, in blocks. So memory does not grow with
the number of documents.

Source: megatron/core/datasets/indexed_dataset.py, the same in 0.16 and 0.19.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import RecipeError
from mdsmix.exporting.stream_rows import Counts, ExportedStream, count_trained_rows, find_documents
from mdsmix.exporting.writer import UNFINISHED, Piece, Writer, flush_file
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.storage.local import LocalPath, explain_errors

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES = {"int32": 4, "uint16": 8}
"The codes of the dtypes that are written."
MOST_UINT16 = 65_500
"Megatron stores the ids of a vocabulary below this size as uint16, others as int32."
DATA_ARGS = "data-args.txt"
"The name of the file with the weights of the streams, for Megatron's --data-args-path."
BLOCK = 1 << 20
"Documents whose index is written at a time: 8 MB."


class Megatron(Writer):
    """Writes a stream of text as one indexed dataset."""

    name = "megatron"
    weighs: ClassVar[Literal["samples", "tokens"]] = "tokens"

    def __init__(self, stream: ExportedStream, folder: Path) -> None:
        super().__init__(stream, folder)
        if len(str(folder).split()) > 1:
            raise RecipeError(
                f"--out {folder} contains white space, at which Megatron would split the paths of "
                "its option --data-path: name another folder."
            )
        self._ends = {self._bin: 0, self._lengths: 0}
        "Name of a file -> its bytes up to the last finished piece."

    @classmethod
    def find_refusal(cls, stream: ExportedStream) -> str:
        if stream.has_preferences:
            return (
                "has preferences, and Megatron's .bin is plain text: use --to parquet or --to "
                "litdata."
            )
        if not stream.kind.has_targets:
            return ""
        return (
            "has prompts and responses, but Megatron's .bin has no mask, so its prompts would be "
            "trained: use --to megatron-bridge with pack: true, or --to parquet."
        )

    @property
    def _bin(self) -> str:
        return f"{self.stream.split}.bin"

    @property
    def _idx(self) -> str:
        return f"{self.stream.split}.idx"

    @property
    def _lengths(self) -> str:
        """The name of the file with the lengths of the documents, which is deleted at the end."""
        return f"{self.stream.split}.lengths"

    @property
    def names(self) -> str:
        return rf"{re.escape(self.stream.split)}\.(bin|idx|lengths)"

    @property
    def dtype(self) -> str:
        """The dtype of the ids that Megatron itself would choose for this vocabulary."""
        manifest = self.stream.manifest
        ids = max(manifest.tokenizer.vocab_size, manifest.totals.largest_id + 1)
        return "uint16" if ids < MOST_UINT16 else "int32"

    def notes(self) -> Iterator[str]:
        yield (
            "Megatron cuts the joined documents into sequences of its own, and trains each of "
            "their tokens; --eod-mask-loss and --reset-attention-mask find documents by EOS"
        )

    def keep_pieces(self, pieces: Mapping[int, Piece], sources: Sequence[str]) -> list[Piece]:
        """Return the pieces at the beginning of the unfinished files that belong to the same
        shards.
        """
        unfinished = self.folder / (self._bin + UNFINISHED)
        was_published = self._find_size(self._lengths) and not unfinished.exists()
        if was_published and (self.folder / self._bin).exists():
            # The export was killed in `finish`, between the two renames.
            (self.folder / self._bin).replace(unfinished)
        sizes = {name: self._find_size(name) for name in self._ends}
        reused = list[Piece]()
        ends = dict(self._ends)
        for number, source in enumerate(sources):
            piece = pieces.get(number)
            if piece is None or piece.source != source:
                break
            ends = {name: end + piece.files[name] for name, end in ends.items()}
            if any(sizes[name] < end for name, end in ends.items()):
                break
            reused.append(piece)
            self._ends = ends
        return reused

    def _find_size(self, name: str) -> int:
        """Return the bytes of an unfinished file; 0 if it is missing."""
        stat = LocalPath(str(self.folder / (name + UNFINISHED))).stat()
        return stat.size if stat else 0

    def write_piece(self, number: int, source: str, shard: Shard, samples: Ragged) -> Piece:
        added = {self._bin: 0, self._lengths: 0}
        counts = Counts()
        documents_written = 0
        with (
            explain_errors("write", str(self.folder / self._bin)),
            self._append_to(self._bin) as tokens,
            self._append_to(self._lengths) as lengths,
        ):
            for rows in self.stream.read_rows(shard, samples):
                documents = find_documents(rows)
                documents_written += len(documents)
                added[self._bin] += tokens.write(documents.values.astype(self.dtype).data)
                added[self._lengths] += lengths.write(documents.lengths.astype("<i4").data)
                counts += count_trained_rows(rows)
            flush_file(tokens)
            flush_file(lengths)
        for name, size in added.items():
            self._ends[name] += size
        return Piece(
            number=number,
            source=source,
            files=added,
            samples=counts.samples,
            tokens=counts.tokens,
            trained=counts.trained,
            extra={"documents": documents_written},
        )

    def _append_to(self, name: str) -> BinaryIO:
        """Open an unfinished file at the end of its last finished piece."""
        path = self.folder / (name + UNFINISHED)
        path.touch()
        file = path.open("r+b")
        file.truncate(self._ends[name])
        file.seek(self._ends[name])
        return file

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Write the index, and publish both files: the index last, since readers open it first."""
        documents = _count_documents(pieces)
        unfinished = self.folder / (self._idx + UNFINISHED)
        lengths = self.folder / (self._lengths + UNFINISHED)
        with explain_errors("write", str(self.folder / self._idx)):
            with unfinished.open("wb") as file:
                write_index(file, lengths, documents, self.dtype)
                flush_file(file)
            # An earlier index does not fit the new tokens.
            (self.folder / self._idx).unlink(missing_ok=True)
            (self.folder / (self._bin + UNFINISHED)).replace(self.folder / self._bin)
            unfinished.replace(self.folder / self._idx)
            lengths.unlink()
        LocalPath(str(self.folder)).flush()

    def list_files(self, pieces: Sequence[Piece]) -> Mapping[str, int]:
        documents = _count_documents(pieces)
        header = len(MAGIC) + 8 + 1 + 8 + 8
        return {
            self._bin: sum(piece.files.get(self._bin, 0) for piece in pieces),
            self._idx: header + 4 * documents + 8 * documents + 8 * (documents + 1),
        }

    def discard(self, pieces: Sequence[Piece]) -> None:
        super().discard(pieces)
        LocalPath(str(self.folder / (self._lengths + UNFINISHED))).delete()

    @classmethod
    def finish_mix(
        cls, root: Path, folders: Mapping[str, Path], weights: Mapping[str, float]
    ) -> Path | None:
        """Write a file with the arguments of Megatron's --data-path: for each training stream its
        share of the tokens, and the prefix of its two files. Streams with a share of 0 are left
        out, since Megatron refuses such a weight when training begins.
        """
        if not weights:
            return None
        words = []
        for name, weight in weights.items():
            if not weight:
                continue
            (index,) = folders[name].glob("*.idx")
            # Six significant digits: a share of 0.0000001 must not become 0.
            words.append(f"{weight:.6g} {index.with_suffix('')}")
        path = root / DATA_ARGS
        LocalPath(str(path)).write((" ".join(words) + "\n").encode())
        return path


def delete_data_args(root: Path, folders: Collection[Path]) -> Path | None:
    """Delete the arguments that an earlier export to Megatron left, if they name a dataset in one
    of the folders, and return the file's path. Return None if there is nothing to delete.

    Args:
        root: the folder of the export.
        folders: the folders whose streams were now exported in another format.
    """
    path = root / DATA_ARGS
    fetched = LocalPath(str(path)).fetch()
    if fetched is None:
        return None
    _, content = fetched
    prefixes = content.decode(errors="replace").split()[1::2]  # each follows its weight
    if not any(Path(prefix).parent in folders for prefix in prefixes):
        return None
    LocalPath(str(path)).delete()
    return path


def _count_documents(pieces: Sequence[Piece]) -> int:
    return sum(piece.extra.get("documents", 0) for piece in pieces)


def write_index(file: BinaryIO, lengths: Path, documents: int, dtype: str) -> None:
    """Write the index of an indexed dataset. Each of its sequences is a document.

    It contains int32 [documents] the length of each document in tokens, int64 [documents] the byte
    at which it begins, and int64 [documents + 1] the number of the sequence at which it begins.

    Args:
        file: the index.
        lengths: a file of int32 with the lengths.
        documents: their number.
        dtype: the dtype of the tokens.
    """
    file.write(MAGIC + struct.pack("<QB", VERSION, DTYPE_CODES[dtype]))
    file.write(struct.pack("<QQ", documents, documents + 1))
    width = np.dtype(dtype).itemsize
    for block in _read_blocks(lengths):
        file.write(block.data)
    position = 0
    for block in _read_blocks(lengths):
        ends = position + np.cumsum(block.astype("<i8") * width)
        file.write((ends - block.astype("<i8") * width).data)
        position = int(ends[-1])
    for start in range(0, documents + 1, BLOCK):
        file.write(np.arange(start, min(documents + 1, start + BLOCK), dtype="<i8").data)


def _read_blocks(path: Path) -> Iterator[NDArray[np.int32]]:
    """Yield the numbers of a file of int32, some at a time."""
    with path.open("rb") as file:
        while content := file.read(4 * BLOCK):
            yield np.frombuffer(content, "<i4")
