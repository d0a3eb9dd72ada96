"""What the objects of a source were found to hold, kept beside the stream: a machine that never saw them lists them and reads none.

A store says of each object a stamp (its ETag), a size and when it was written, to every machine the same, so what a run found in
objects that are known by these holds for any other run. The note, `.mdsmix/sources.zst`, names a work unit by the hash of its
objects' URLs and of all three, so the same ETag under another key says nothing. Of files on a disk there is none: their stamp
means something on one machine only. Nor is there of records that name images, whose own stamps each machine keeps. `--verify-source`
reads it as little as the cache of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import orjson
import xxhash

from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, decompressed
from mdsmix.convert.source_hashes import SourceHashCache, fingerprint, line
from mdsmix.errors import Unreachable
from mdsmix.sources import Content, Unit
from mdsmix.storage import Location

NOTE = "sources.zst"


def learn_objects(job: Job, units: Sequence[Unit], cache: SourceHashCache) -> None:
    """Takes in what the note says of objects that this machine does not know."""
    unknown = [unit for unit in units if _is_stored(unit) and not cache.content(unit)]
    if unknown:
        said = SourceHashCache(cache.path)
        said.learn_lines(_read(job.folder))
        found = {unit: said.contents.get(_identity(unit)) for unit in unknown}
        cache.learn({unit: content for unit, content in found.items() if content})


def note_objects(job: Job, units: Sequence[Unit], contents: Sequence[Content]) -> None:
    """Leaves a note of these units, in place of the one before."""
    from zstandard import ZstdCompressor

    lines = bytearray()
    for unit, content in zip(units, contents, strict=True):
        if _is_stored(unit) and not any(window.images for window in content.windows):
            lines += line(_identity(unit), content.windows, content.files)
    if lines:
        with suppress(Unreachable):  # the stream is published; all that is lost is a reading
            packed = ZstdCompressor(level=1, write_checksum=True).compress(lines)
            (job.folder / FOLDER / NOTE).write(packed)


def _is_stored(unit: Unit) -> bool:
    return all(file.location.is_store and file.stat.stamp for file in unit.files)


def _identity(unit: Unit) -> str:
    """Of the objects as the store lists them. Seconds, since a HEAD tells no more of the time that a listing has in milliseconds."""
    written = [int(file.stat.modified) for file in unit.files]
    return xxhash.xxh128_hexdigest(orjson.dumps([fingerprint(unit), written]))


def _read(folder: Location) -> bytes:
    """No lines where there is no note, or a damaged one."""
    found = (folder / FOLDER / NOTE).fetch()
    return decompressed(found[1] if found else None) or b""
