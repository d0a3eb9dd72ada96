"""Digests of a unit's content, worked out while its blocks stream by.

The digest of a window covers the records that start in it, uncompressed; file names, packing and
the unit's other windows play no part. So a file that was renamed or compressed anew is known again.
A window's digest is known as soon as the window has been read, when its shards are made: a first
conversion reads every byte once.
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
    """A window of a unit in which records start."""

    number: int
    digest: str
    """xxh3_128 of its content and of where one file ends and another begins, 32 hex digits: equal
    content gives equal records.
    """
    place: str
    """8 hex digits for the files of the records and the places in them, which bad records are kept
    with.
    """
    images: str = ""
    "xxh3_128 of the images that its records name, in their order; blank where they name none."

    @property
    def full_digest(self) -> str:
        """The digests of all that the window's rows come from."""
        return f"{self.digest} images {self.images}" if self.images else self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a unit, as digests."""

    windows: tuple[Window, ...]
    files: tuple[str, ...]
    "For each file of the unit, the xxh3_128 of the part that the unit owns."


@dataclass(slots=True)
class _FilePart:
    """The part of one file in one window."""

    format: str
    "As a Block has it, and the version of the rule that reads the file, if it is above 1."
    start: tuple[Any, ...]
    hasher: Any = field(default_factory=xxhash.xxh3_128)
    length: int = 0


class Digests:
    """Works out the digests of a unit, from its blocks in their order."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._files = dict[int, Any]()
        """Position of a file -> the hasher of its part, which is that of its first window until a
        second one begins.
        """
        self._windows: dict[int, dict[int, _FilePart]] = {}
        self._images: dict[int, str] = {}

    def add(self, position: int, block: Block) -> None:
        """Adds the next block; `position`: that of its file in the unit."""
        file, content = self._unit.files[position], block.content()
        parts = self._windows.setdefault(block.window, {})
        if position not in parts:
            version = format_of(file).version_for(file, self._unit.fields)
            format = block.format if version == 1 else f"{block.format} version {version}"
            parts[position] = first = _FilePart(format, (file.name, *block.start))
            before = self._files.get(position)
            self._files[position] = before.copy() if before else first.hasher
        part = parts[position]
        part.hasher.update(content)
        part.length += len(content)
        if self._files[position] is not part.hasher:
            self._files[position].update(content)

    def add_images(self, number: int, digest: str) -> None:
        """Sets the digest of a window's images, from the reader of the images."""
        self._images[number] = digest

    def window(self, number: int) -> Window:
        """The digests of a window as far as it was read: wholly, once a block of a later window was
        added.
        """
        parts = self._windows.get(number, {}).values()
        said = [f"{part.format} {part.length} {part.hasher.hexdigest()}\n" for part in parts]
        return Window(
            number=number,
            digest=xxhash.xxh3_128_hexdigest("".join(said)),
            place=xxhash.xxh32_hexdigest(repr([part.start for part in parts])),
            images=self._images.get(number, ""),
        )

    def content(self) -> Content:
        """The digests of the whole unit. A unit without records has one window too."""
        return Content(
            windows=tuple(map(self.window, self._windows or [0])),
            files=tuple(
                self._files.get(position, xxhash.xxh3_128()).hexdigest()
                for position in range(len(self._unit.files))
            ),
        )


def file_hash(digests: Iterable[str]) -> str:
    """The hash of a file, from the digests of its parts in all units, in order. Other files of
    these units play no part.
    """
    return xxhash.xxh128_hexdigest(" ".join(digests))


def check_unchanged(file: SourceFile) -> None:
    """Unreachable where the file is no longer the one that was planned."""
    if file.location.stat() != file.stat:
        raise Unreachable(CHANGED.format(url=file.location.url))
