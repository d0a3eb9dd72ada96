"""What a unit holds, by digests that are worked out while its blocks stream by.

Each window is known by the records that start in it, uncompressed: not by the name of a file, how it is packed, or what the
unit's other windows hold. So a file that was renamed or compressed anew is known again, and a window is known as soon as it
has been read, which is when its shards are made: at a first conversion every byte is read once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.sources.format import Block
from mdsmix.sources.units import SourceFile, Unit
from mdsmix.storage import CHANGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window of a unit in which records start."""

    number: int
    digest: str
    "xxh3_128 of its content and of where one file ends and another begins, 32 hex digits: equal content gives equal records."
    place: str
    "8 hex digits for the files and where in them the records stand: what is kept of bad records says that."
    images: str = ""
    "xxh3_128 of the images that its records name, in their order; blank where they name none."

    @property
    def said(self) -> str:
        """All that its rows come from."""
        return f"{self.digest} images {self.images}" if self.images else self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a unit was found to hold."""

    windows: tuple[Window, ...]
    files: tuple[str, ...]
    "Of each of its files, the xxh3_128 of the content that the unit owns."


@dataclass(slots=True)
class _Part:
    """What one file holds in one window."""

    format: str
    start: tuple[Any, ...]
    hasher: Any = field(default_factory=xxhash.xxh3_128)
    length: int = 0


class Digests:
    """Told of a unit's blocks in their order."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._files = [xxhash.xxh3_128() for _ in unit.files]
        self._windows: dict[int, dict[int, _Part]] = {}
        self._images: dict[int, str] = {}

    def add(self, position: int, block: Block) -> None:
        """The next block, of the unit's file at this position."""
        name, content = self._unit.files[position].name, block.content()
        parts = self._windows.setdefault(block.window, {})
        if position not in parts:
            parts[position] = _Part(block.format, (name, *block.start))
        parts[position].hasher.update(content)
        parts[position].length += len(content)
        self._files[position].update(content)

    def add_images(self, number: int, digest: str) -> None:
        """The images of a window, by whoever has read them."""
        self._images[number] = digest

    def window(self, number: int) -> Window:
        """What was read of a window; all of it, where a block of a later one was."""
        parts = self._windows.get(number, {}).values()
        said = [f"{part.format} {part.length} {part.hasher.hexdigest()}\n" for part in parts]
        return Window(
            number=number,
            digest=xxhash.xxh3_128_hexdigest("".join(said)),
            place=xxhash.xxh32_hexdigest(repr([part.start for part in parts])),
            images=self._images.get(number, ""),
        )

    def content(self) -> Content:
        """Of the whole unit, which has a window even where no record starts in it."""
        return Content(
            windows=tuple(map(self.window, self._windows or [0])),
            files=tuple(hasher.hexdigest() for hasher in self._files),
        )


def file_hash(digests: Iterable[str]) -> str:
    """Of a file, from the digests of what its units hold of it, in order: which other files are read with it counts for nothing."""
    return xxhash.xxh128_hexdigest(" ".join(digests))


def check_unchanged(file: SourceFile) -> None:
    """Refuses a file that is no longer the one that was planned."""
    if file.location.stat() != file.stat:
        raise Unreachable(CHANGED.format(url=file.location.url))
