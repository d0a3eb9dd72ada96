"""The unit records: one small object per finished work unit, in `.mdsmix/` beneath the stream it belongs to. Once there are many
they are joined (segments.py).

A record that is there means that the unit's shards are there too, since it is written after them. So a run that was
killed loses only the units that were being worked on, and whoever has the target can go on, on any machine.
"""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from mdsmix import typed
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Shard
from mdsmix.shards.side_files import SideFile
from mdsmix.storage import Location

FOLDER = ".mdsmix"
RECORD = re.compile("[0-9a-f]{32}")
"The name of a unit record."


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRecord:
    """What a work unit came to."""

    key: str
    backend: str
    shards: list[Shard]
    totals: Totals
    records: Records
    size: int = 0
    "Uncompressed source bytes."
    lines: int = 0
    "Lines or rows of the source that the unit owns: where those of the file's next unit begin to be counted."
    base: str = ""
    "The key of its lines alone, by which the fingerprints of its records are named, where duplicates are dropped from it or it has images."
    fetched: dict[str, str] = field(default_factory=dict)
    "URL of an image that a server gave -> xxh3_128 of that, or the reason code of why it gave none."
    side_files: list[SideFile] = field(default_factory=list)
    "Where records have names: one for each shard, in order."
    leftover: str = ""
    "Concat: the tokens behind the last full row, as bytes in base64; less than one row."

    def leftover_tokens(self, dtype: str) -> NDArray[Any]:
        return np.frombuffer(base64.b64decode(self.leftover), dtype)


def pack_tokens(tokens: NDArray[Any]) -> str:
    return base64.b64encode(tokens.tobytes()).decode()


def write_record(folder: Location, record: UnitRecord) -> None:
    write_sealed(folder / FOLDER / record.key, orjson.dumps(record))


def read_record(folder: Location, key: str) -> UnitRecord | None:
    """The record of a finished unit; None where there is none, or where it is damaged and the unit is redone."""
    found = (folder / FOLDER / key).fetch()
    if found is None:
        return None
    content = unsealed(found[1])
    return None if content is None else parse_record(content, key)


def is_of_earlier(folder: Location) -> bool:
    """Whether the unit records in the folder, of which the first is read, are whole and of a format that is not read any more."""
    names = (name for name, _ in (folder / FOLDER).list() if RECORD.fullmatch(name))
    name = next(names, "")
    content = unsealed((folder / FOLDER / name).read()) if name else None
    return content is not None and parse_record(content, name) is None


def parse_record(content: bytes, key: str) -> UnitRecord | None:
    """The record of this unit from its JSON; None where it is none."""
    with suppress(typed.Misfit):
        record = typed.load(UnitRecord, content)
        return record if record.key == key else None
    return None


def write_sealed(at: Location, content: bytes) -> None:
    """With its checksum below, for what is published without looking again at what it tells of."""
    at.write(content, b"\n" + _digest(content))


def unsealed(stored: bytes) -> bytes | None:
    """What stands above its checksum; None where that is another's, or there is none."""
    content, _, digest = stored.rpartition(b"\n")
    return content if digest == _digest(content) else None


def _digest(content: bytes) -> bytes:
    return xxhash.xxh128_hexdigest(content).encode()


def decompressed(stored: bytes | None) -> bytes | None:
    """What a frame with a checksum holds; None where there is none, or a damaged one, whatever size it claims to hold."""
    from zstandard import ZstdDecompressor, ZstdError

    if stored is None:
        return None
    frame = ZstdDecompressor().decompressobj()
    try:
        content = frame.decompress(stored)
    except ZstdError:
        return None
    return content if frame.eof and not frame.unused_data else None
