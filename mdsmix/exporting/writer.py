"""The base classes of the writers, one for each format.

A shard of the stream becomes a piece of the export. Most formats store each piece as a file of its
own (`FileWriter`), which gets its name when it is complete. So a killed export continues after its
last piece, and an export of a changed stream writes only the pieces of new shards.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal

from mdsmix.exporting.stream_rows import Counts, ExportedStream
from mdsmix.frozen import frozen
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.storage.local import LocalPath, explain_errors

UNFINISHED = ".unfinished"
"Appended to the name of a file that is being written."


@frozen(kw_only=True)
class Piece:
    """The part of an export that one shard became."""

    number: int
    "The position of the shard in the index."
    source: str
    "The hash of the shard."
    files: dict[str, int]
    """Name -> bytes of the files that contain only this piece. If a format joins all pieces: the
    bytes that this piece added to each file.
    """
    samples: int
    tokens: int
    trained: int
    extra: dict[str, int] = field(default_factory=dict)
    "Further numbers that the writer needs at the end."

    @property
    def counts(self) -> Counts:
        return Counts(samples=self.samples, tokens=self.tokens, trained=self.trained)


class Writer(ABC):
    """Writes one stream into one folder."""

    name: ClassVar[str]
    "The format's name, as `--to` takes it."
    version: ClassVar[int] = 1
    "Increased when the same rows become other bytes. Earlier exports are then written again."
    has_weights: ClassVar[bool] = False
    "Whether the format contains the loss weights of tokens."
    weighs: ClassVar[Literal["samples", "tokens"]] = "samples"
    "What the weights of streams count in this format: samples or tokens."

    def __init__(self, stream: ExportedStream, folder: Path) -> None:
        """Prepare to write a stream that `find_refusal` does not refuse. The folder may not exist
        yet.
        """
        self.stream = stream
        self.folder = folder

    @property
    @abstractmethod
    def names(self) -> str:
        """A regular expression that the names of the files match, and no other file's name."""

    @classmethod
    @abstractmethod
    def find_refusal(cls, stream: ExportedStream) -> str:
        """Return why the format cannot contain the stream, and what to do instead: the end of a
        sentence that begins with the stream's name. Return "" if it can. Streams of images and
        of prompts are refused for all formats, and unpaired preferences for all but Parquet.
        """

    def notes(self) -> Iterator[str]:
        """Yield sentences on the settings that a trainer needs to train exactly these rows."""
        yield from ()

    @abstractmethod
    def keep_pieces(self, pieces: Mapping[int, Piece], sources: Sequence[str]) -> list[Piece]:
        """Return the pieces of an earlier export that need not be written again.

        Args:
            pieces: number -> piece of the earlier export, which had the same settings.
            sources: the hash of each shard of the stream as it is now.
        """

    @abstractmethod
    def write_piece(self, number: int, source: str, shard: Shard, samples: Ragged) -> Piece:
        """Write a shard's samples, and flush them to the disk. Pieces are written in the order of
        their numbers.

        Args:
            number: the position of the shard in the index.
            source: the hash of the shard.
            shard: the shard's entry in the index.
            samples: the bytes of its samples.
        """

    def finish(self, pieces: Sequence[Piece]) -> None:  # noqa: B027 - most formats need nothing
        """Write what belongs to all pieces, after their counts were compared with the manifest."""

    @abstractmethod
    def list_files(self, pieces: Sequence[Piece]) -> Mapping[str, int]:
        """Return name -> bytes of the files of a finished export with these pieces."""

    def discard(self, pieces: Sequence[Piece]) -> None:
        """Delete the files of pieces whose counts are wrong."""
        for name in self.list_files(pieces):
            for path in (self.folder / name, self.folder / (name + UNFINISHED)):
                LocalPath(str(path)).delete()

    @classmethod
    def finish_mix(
        cls, root: Path, folders: Mapping[str, Path], weights: Mapping[str, float]
    ) -> Path | None:
        """Write the weights of several streams to a file, if the format has one, and return its
        path; otherwise None.

        Args:
            root: the folder of the export.
            folders: name of a stream -> its folder.
            weights: name of a training stream -> its weight; empty if nothing weighs them.
        """
        return None


class FileWriter(Writer):
    """The base class of formats with a file for each piece, that is for each shard."""

    suffix: ClassVar[str]
    "The end of the files' names, such as `.parquet`."

    def name_file(self, number: int) -> str:
        """Return the name of a piece's file: `train-00007.parquet` for the split `train`."""
        return f"{self.stream.split}-{number:05}{self.suffix}"

    @property
    def names(self) -> str:
        return rf"{re.escape(self.stream.split)}-\d{{5,}}{re.escape(self.suffix)}"

    @abstractmethod
    def write_file(self, file: BinaryIO, shard: Shard, samples: Ragged) -> Counts:
        """Write a shard's samples to an open file, and count them."""

    def keep_pieces(self, pieces: Mapping[int, Piece], sources: Sequence[str]) -> list[Piece]:
        reused = list[Piece]()
        for number, source in enumerate(sources):
            piece = pieces.get(number)
            if piece and piece.source == source and has_files(self.folder, piece.files):
                reused.append(piece)
        return reused

    def write_piece(self, number: int, source: str, shard: Shard, samples: Ragged) -> Piece:
        name = self.name_file(number)
        unfinished = self.folder / (name + UNFINISHED)
        with explain_errors("write", str(self.folder / name)):
            with unfinished.open("wb") as file:
                counts = self.write_file(file, shard, samples)
                size = file.tell()
                flush_file(file)
            unfinished.replace(self.folder / name)
        LocalPath(str(self.folder)).flush()
        return Piece(
            number=number,
            source=source,
            files={name: size},
            samples=counts.samples,
            tokens=counts.tokens,
            trained=counts.trained,
        )

    def list_files(self, pieces: Sequence[Piece]) -> Mapping[str, int]:
        files = dict[str, int]()
        for piece in pieces:
            files |= piece.files
        return files


def has_files(folder: Path, files: Mapping[str, int]) -> bool:
    """Check whether all files exist with these sizes, given as name -> bytes."""
    for name, size in files.items():
        stat = LocalPath(str(folder / name)).stat()
        if stat is None or stat.size != size:
            return False
    return True


def flush_file(file: BinaryIO) -> None:
    """Flush an open file to the disk, so that it survives a power cut."""
    file.flush()
    os.fsync(file.fileno())
