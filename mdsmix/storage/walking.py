"""What lies in folders of a disk: names below one, and those that match a pattern. What goes away meanwhile, and what leads nowhere, is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from mdsmix.storage.location import (
    Stat,
    name_matches,
)


def stat_of(found: os.stat_result) -> Stat:
    return Stat(found.st_size, f"{found.st_mtime_ns}-{found.st_ino}", found.st_mtime)


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def walked(folder: str, prefix: str, recursive: bool) -> Iterator[tuple[str, Stat]]:
    for entry in entries_of(folder):
        if not _is_folder(entry):
            with suppress(
                OSError
            ):  # deleted since it was listed, or a link to nowhere or to itself
                yield prefix + entry.name, stat_of(entry.stat())
        elif recursive and not entry.is_symlink():  # a link to a parent would never end
            yield from walked(entry.path, f"{prefix}{entry.name}/", recursive)


def matching(folder: str, patterns: list[str]) -> Iterator[str]:
    """The files below `folder` whose path matches; `**` does not follow links to folders."""
    head, *rest = patterns
    if head == "**":
        yield from matching(folder, rest or ["*"])
    for entry in entries_of(folder):
        if head == "**":
            if not entry.name.startswith(".") and _is_folder(entry) and not entry.is_symlink():
                yield from matching(entry.path, patterns)
        elif name_matches(entry.name, head):
            if _is_folder(entry) and rest:
                yield from matching(entry.path, rest)
            elif not _is_folder(entry) and not rest:
                yield entry.path
