"""The hash of exactly the bytes that a unit owns, by which it is known again whatever its name.

Plain files are hashed from the first line that the unit owns to the end of the last, so that lines
appended to a file change its last unit only. Of compressed files the stored bytes are hashed, since
inflating them only to find them unchanged would cost most of a conversion.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.sources.formats import suffix_of
from mdsmix.sources.lines import owned_bytes
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Unit


def content_hash(unit: Unit) -> str:
    """xxh3_128, as 32 hex digits, of the owned bytes, their lengths and their formats.

    The windows of a compressed unit share it: a window is known by this and its number.
    """
    total = xxhash.xxh3_128()
    for file in unit.files:
        hasher = xxhash.xxh3_128()
        length = 0
        for piece in _pieces(file, unit):
            hasher.update(piece)
            length += len(piece)
        check_unchanged(file)
        total.update(f"{suffix_of(file.name)} {length} {hasher.hexdigest()}\n")
    return total.hexdigest()


def _pieces(file: SourceFile, unit: Unit) -> Iterator[bytes]:
    with file.location.open(max(0, unit.start - 1)) as stored:
        if unit.end is None:
            yield from iter(lambda: stored.read(BLOCK_BYTES), b"")
        else:
            yield from (piece for _, piece in owned_bytes(stored.read, unit.start, unit.end))


def check_unchanged(file: SourceFile) -> None:
    """Refuses a file that is no longer the one that was planned."""
    if file.location.stat() != file.stat:
        raise Unreachable(
            f"{file.location.url} was changed while it was being read, so its records may be half "
            "old and half new: wait until it is complete and run the same command again"
        )
