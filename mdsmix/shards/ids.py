"""The names of records (a source's `id`), for each row of a shard in a side file of it: so `mdsmix inspect` says which record a
sample is of. The columns are those of LLM-Foundry's loaders, which know no such thing.

A line is the JSON of one row's name: a text, a whole number, or null where the record has none; of a packed row it is a list of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, islice

import numpy as np
import orjson
import xxhash

from mdsmix.errors import Damaged
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.shards.published import Stream
from mdsmix.shards.shard_files import write_once
from mdsmix.shards.shard_samples import decompressed
from mdsmix.shards.side_files import SideFile
from mdsmix.storage import Location

KIND = "ids"
LONGEST = 500
"Characters of a name that are kept."
Name = str | int | None


class RowIds:
    """The names of a work unit's rows, as they are made: 15 bytes each, where a list of them took 60."""

    def __init__(self) -> None:
        self._lines = bytearray()

    def add(self, names: Iterable[Name]) -> None:
        for name in names:
            kept = name[:LONGEST] if isinstance(name, str) else name
            self._lines += orjson.dumps(kept, option=orjson.OPT_APPEND_NEWLINE)

    def pack(self, documents: Ragged) -> None:
        """Makes the names those of packed rows: of each row a list, of the documents whose numbers it holds."""
        each, lines = bytes(self._lines).splitlines(), bytearray()
        for row in range(len(documents)):
            names = map(each.__getitem__, documents[row].tolist())
            lines += b"[" + b",".join(names) + b"]\n"
        self._lines = lines

    def store(self, folder: Location, shards: Sequence[Shard]) -> list[SideFile]:
        """Writes a file for each of the shards, which hold the rows in order."""
        ends = np.flatnonzero(np.frombuffer(self._lines, np.uint8) == ord("\n")) + 1
        rows = list(accumulate((shard.samples for shard in shards), initial=0))
        assert len(ends) == rows[-1], "a row has a name, or null"
        cuts = [0, *(int(ends[row - 1]) for row in rows[1:])]
        return [
            _store(folder, shard, bytes(self._lines[start:stop]))
            for shard, start, stop in zip(shards, cuts, cuts[1:], strict=False)
        ]


def _store(folder: Location, shard: Shard, lines: bytes) -> SideFile:
    from zstandard import ZstdCompressor

    content = ZstdCompressor(level=1).compress(lines)
    digest = xxhash.xxh128_hexdigest(content)
    side = SideFile(
        name=f"{digest}.{KIND}.side",
        bytes=len(content),
        hash=digest,
        kind=KIND,
        shard=shard.stored.basename,
    )
    write_once(folder / side.name, [memoryview(content)])
    return side


def named_anew(sides: Sequence[SideFile], shards: Sequence[Shard]) -> list[SideFile]:
    """The side files of these shards, in their order, by the names that the index gives the shards."""
    if not sides:
        return []
    return [
        replace(side, shard=shard.stored.basename)
        for side, shard in zip(sides, shards, strict=True)
    ]


def id_of(stream: Stream, sample: int) -> Name | list[Name]:
    """The name of the record that a sample is of, or those of a packed row; None where there is none, Damaged where its file cannot
    be read."""
    manifest, (shard, row) = stream.trusted_manifest, stream.shard_with(sample)
    sides = manifest.side_files if manifest else ()
    names = (s.name for s in sides if (s.kind, s.shard) == (KIND, shard.stored.basename))
    at = next((stream.folder / name for name in names), None)
    if at is None:
        return None
    try:
        with at.open() as stored:
            lines = islice(decompressed(io.BytesIO(stored.read()), "zstd"), row, None)
            name = orjson.loads(next(iter(lines)))
            return name if isinstance(name, (str, int, list)) else None
    except Exception as error:  # whatever a decompressor makes of what is none
        said = str(error).rstrip(".") or "it ends too early"
        raise Damaged(
            f"{at}, which holds the ids of a shard's records, is damaged: {said}; "
            "mdsmix repair makes it anew."
        ) from None
