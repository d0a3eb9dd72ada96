"""Digests of a work unit's content, computed while its blocks are read.

The digest of a window (a slice of a work unit) covers the uncompressed records that start in it.
File names, packing and the unit's other windows do not matter, so a file that was renamed or
compressed again is recognised. A window's digest is complete as soon as the window has been read,
in time for its shards. So a first conversion reads every byte only once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.sources.format import Block
from mdsmix.sources.formats import format_of
from mdsmix.sources.units import SourceFile, Unit
from mdsmix.storage import CHANGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window (a slice of a work unit) in which at least one record starts."""

    number: int
    digest: str
    """xxh3_128, 32 hex digits, of its content and of the boundaries between files. Windows of equal
    digests have equal records.
    """
    place: str
    """Hash (8 hex digits) of file names and start offsets; names the file of the window's bad
    records.
    """
    images: str = ""
    "xxh3_128 of the images that its records name, in order; empty if they name none."

    @property
    def full_digest(self) -> str:
        """The digests of everything that decides on the window's rows: records and images."""
        return f"{self.digest} images {self.images}" if self.images else self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The digests of all bytes that a work unit reads, by window and by file."""

    windows: tuple[Window, ...]
    files: tuple[str, ...]
    "For each file of the unit, the xxh3_128 of the range of it that the unit reads."


@dataclass(slots=True)
class _FileInWindow:
    """What was hashed so far of one file's bytes in one window (a slice of a work unit)."""

    format: str
    "The `Block.format`; followed by the format's version for this file if that is above 1."
    start: tuple[Any, ...]
    "The file's name, and the start of its first block."
    hasher: Any = field(default_factory=xxhash.xxh3_128)
    length: int = 0


class Digests:
    """Computes the digests of a unit from its blocks, in order."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._file_hashers = dict[int, Any]()
        """Position of a file in the unit -> hasher of the file. As long as the file is in one
        window only, this is the same object as the hasher of its bytes in that window, so that they
        are hashed only once.
        """
        self._windows: dict[int, dict[int, _FileInWindow]] = {}
        "Number of a window -> position of a file -> the file's bytes in the window."
        self._images: dict[int, str] = {}

    def add(self, position: int, block: Block) -> None:
        """Add the next block. `position`: the position of the block's file in the unit."""
        files = self._windows.setdefault(block.window, {})
        if position not in files:
            files[position] = self._begin_file(position, block)
        file = files[position]
        content = block.content()
        file.hasher.update(content)
        file.length += len(content)
        file_hasher = self._file_hashers[position]
        if file_hasher is not file.hasher:
            file_hasher.update(content)

    def _begin_file(self, position: int, block: Block) -> _FileInWindow:
        """Begin to hash a file's bytes in a window (a slice of the unit). Return the object that
        collects their length and hash, still empty.

        Args:
            position: the position of the file in the unit.
            block: the first block of this file in this window.
        """
        file = self._unit.files[position]
        version = format_of(file).version_for(file, self._unit.fields)
        format = block.format if version == 1 else f"{block.format} version {version}"
        begun = _FileInWindow(format, (file.name, *block.start))
        # In its first window the file shares the window's hasher. In a later one it gets a hasher
        # of its own, which continues from the earlier windows.
        earlier = self._file_hashers.get(position)
        self._file_hashers[position] = earlier.copy() if earlier else begun.hasher
        return begun

    def add_images(self, number: int, digest: str) -> None:
        """Set the digest of a window's images, which the reader of images computes.

        Args:
            number: the window's number in the unit.
        """
        self._images[number] = digest

    def window(self, number: int) -> Window:
        """Return the digests of a window, as far as it has been read. They are final once a block
        of a later window has been added.
        """
        files = self._windows.get(number, {}).values()
        lines = [f"{file.format} {file.length} {file.hasher.hexdigest()}\n" for file in files]
        return Window(
            number=number,
            digest=xxhash.xxh3_128_hexdigest("".join(lines)),
            place=xxhash.xxh32_hexdigest(repr([file.start for file in files])),
            images=self._images.get(number, ""),
        )

    def content(self) -> Content:
        """Return the digests of the whole unit.

        A unit without records has one empty window (number 0), and each of its files the digest of
        no bytes.
        """
        empty = xxhash.xxh3_128()
        hashers = [
            self._file_hashers.get(position, empty) for position in range(len(self._unit.files))
        ]
        return Content(
            windows=tuple(map(self.window, self._windows or [0])),  # [0]: the empty window
            files=tuple(hasher.hexdigest() for hasher in hashers),
        )


def file_hash(digests: Iterable[str]) -> str:
    """Return the hash of a file from its digests (`Content.files`) in all units that read a part of
    it, in order.
    """
    return xxhash.xxh128_hexdigest(" ".join(digests))


def check_unchanged(file: SourceFile) -> None:
    """Raise Unreachable if the file has changed since the source's files were listed."""
    if file.location.stat() != file.stat:
        raise Unreachable(CHANGED.format(url=file.location.url))
