"""Digests of a work unit's content, computed while its blocks are read.

The digest of a window (a slice of a work unit) covers the uncompressed records that start in the
window. File names, compression and the unit's other windows do not matter, so a file that was
renamed or compressed again is recognised. A window's digest is complete as soon as the window has
been read, before its shards are stored. So a first conversion reads every byte only once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.frozen import frozen
from mdsmix.sources.format import Block, describe_cells
from mdsmix.sources.formats import format_of
from mdsmix.sources.units import SourceFile, Unit
from mdsmix.storage import CHANGED


@frozen(kw_only=True, slots=True)
class Window:
    """The digests of one window (a slice of a work unit): of its records, and of their images."""

    number: int
    digest: str
    """xxh3_128 (32 hex digits) of the window's content and of the boundaries between its files.
    Windows with equal digests have equal records.
    """
    place: str
    """Hash (8 hex digits) of file names and start offsets. It is part of the name of the file with
    the window's bad records.
    """
    images: str = ""
    "xxh3_128 of the images that the window's records name, in order; empty if they name none."

    @property
    def full_digest(self) -> str:
        """The window's digests in one string: of its records, and of their images if it has any. A
        window is a slice of a work unit; it is converted again if this string changes.
        """
        return f"{self.digest} images {self.images}" if self.images else self.digest


@frozen(kw_only=True, slots=True)
class Content:
    """The digests of all bytes that a work unit reads: one digest for each of its windows (slices
    of the unit), and one for each of its files.
    """

    windows: tuple[Window, ...]
    files: tuple[str, ...]
    "For each file of the unit, the xxh3_128 of the bytes of this file that the unit reads."


@dataclass(slots=True)
class _FileInWindow:
    """Hash and length of the bytes of one file in one window (a slice of a work unit), as far as
    they were read.
    """

    format: str
    """`Block.format`, then the fields with texts or messages (`describe_cells`), then the format's
    version for this file if it is above 1.
    """
    start: tuple[Any, ...]
    "The file's name, and the start of its first block."
    hasher: Any = field(default_factory=xxhash.xxh3_128)
    length: int = 0


class Digests:
    """Computes the digests of a work unit while its blocks (about 4 MB of one file each) are read.

    `add` is called with each block in order; `window` and `content` return the digests.
    """

    def __init__(self, unit: Unit) -> None:
        """Start with nothing hashed.

        Args:
            unit: the work unit (files that are converted together) whose blocks will be added.
        """
        self._unit = unit
        self._file_hashers = dict[int, Any]()
        """Position of a file in the unit -> hasher of all bytes of the file. In the file's first
        window, this is the same object as the hasher of the file's bytes in this window. So the
        bytes of a file with one window are hashed only once.
        """
        self._windows: dict[int, dict[int, _FileInWindow]] = {}
        "Number of a window -> position of a file -> the file's bytes in the window."
        self._images: dict[int, str] = {}
        "Number of a window -> digest of its images."

    def add(self, position: int, block: Block) -> None:
        """Hash the next block (about 4 MB of one file).

        Args:
            position: the number of the block's file in `Unit.files`, from 0.
            block: the block that follows the last one that was added.
        """
        files = self._windows.setdefault(block.window, {})
        if position not in files:
            files[position] = self._begin_file(position, block)
        file = files[position]
        content = block.content()
        file.hasher.update(content)
        file.length += len(content)
        # In the file's first window both hashers are the same object (`_begin_file`).
        file_hasher = self._file_hashers[position]
        if file_hasher is not file.hasher:
            file_hasher.update(content)

    def _begin_file(self, position: int, block: Block) -> _FileInWindow:
        """Return a new object that will collect hash and length of a file's bytes in a window (a
        slice of the unit). Also prepare the hasher of the whole file.

        Args:
            position: the position of the file in the unit.
            block: the first block (about 4 MB) of this file in this window.
        """
        # What decides how cells are decoded, and a version above 1, are hashed into the digest
        # together with the format.
        file = self._unit.files[position]
        format = format_of(file)
        decoding = block.format
        if format.cells_are_texts:
            decoding += describe_cells(self._unit)
        version = format.version_for(file, self._unit.fields)
        if version != 1:
            decoding += f" version {version}"
        begun = _FileInWindow(decoding, (file.name, *block.start))
        # In the file's first window, one hasher serves for both the window and the whole file. In a
        # later window the whole file gets its own hasher, which continues from the earlier windows.
        earlier = self._file_hashers.get(position)
        self._file_hashers[position] = earlier.copy() if earlier else begun.hasher
        return begun

    def add_images(self, number: int, digest: str) -> None:
        """Set the digest of the images that the records of a window (a slice of the unit) name.

        Args:
            number: the window's number in the unit.
            digest: `WindowImages.digest`, which the reader of images computes.
        """
        self._images[number] = digest

    def window(self, number: int) -> Window:
        """Return the digests of a window (a slice of the unit) from the blocks that were added so
        far. The digests are final once a block of a later window has been added.

        Args:
            number: the window's number in the unit.
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
        """Return the digests of the whole unit, after all its blocks were added.

        A unit without records has one window (a slice of the unit), number 0, which is empty. A
        file without records has the digest of no bytes.
        """
        empty = xxhash.xxh3_128()
        hashers = [
            self._file_hashers.get(position, empty) for position in range(len(self._unit.files))
        ]
        numbers = list(self._windows) if self._windows else [0]
        return Content(
            windows=tuple(self.window(number) for number in numbers),
            files=tuple(hasher.hexdigest() for hasher in hashers),
        )


def file_hash(digests: Iterable[str]) -> str:
    """Return the hash of a whole file.

    Args:
        digests: the file's digest (`Content.files`) in each unit that reads a part of the file, in
            the order of these parts.
    """
    return xxhash.xxh128_hexdigest(" ".join(digests))


def check_unchanged(file: SourceFile) -> None:
    """Raise Unreachable if the file has changed since the source's files were listed."""
    if file.location.stat() != file.stat:
        raise Unreachable(CHANGED.format(url=file.location.url))
