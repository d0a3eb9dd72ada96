"""The bad records of a published stream, read: `quarantine/`, a file for each work unit that has any, a line of JSON for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from mdsmix.errors import Unreachable
from mdsmix.storage import Location

QUARANTINE = "quarantine"
SUFFIX = ".jsonl.zst"


def read_quarantine(folder: Location) -> Iterator[dict[str, Any]]:
    """All bad records of a stream, in the order of the files' names; Unreachable where a file is damaged."""
    quarantine = folder / QUARANTINE
    for name, _ in quarantine.list():
        if name.endswith(SUFFIX):
            yield from map(orjson.loads, read_lines(quarantine / name))


def read_lines(at: Location) -> Iterator[bytes]:
    """The lines of a file of bad records, without holding it; Unreachable where it is damaged or was cut off."""
    from zstandard import ZstdDecompressor, ZstdError

    frame, rest = ZstdDecompressor().decompressobj(), b""
    try:
        with at.open() as stored:
            while packed := stored.read(1 << 20):
                *lines, rest = (rest + frame.decompress(packed)).split(b"\n")
                yield from lines
        if not frame.eof:
            raise ZstdError("it was cut off")
    except ZstdError as error:
        raise Unreachable(
            f"{at} is damaged ({error}), and it holds bad records; delete it and run convert again, which writes it anew."
        ) from None
