"""Shards at a target that are not what their names say: found by `convert --verify-target`, taken away, and made anew.

A run trusts a shard that lies at the target in its full size. Here every shard that it might reuse, those of older versions
too, is read and hashed first; that needs no index, since a shard is named by the hash of its stored bytes. Once a damaged
shard is deleted, the record of its work unit names a missing shard, so the unit counts as unfinished and is converted again.
A shard that only an older index or version names is not made again: its reader then misses a shard, where it would have
trained on damage. Segments of units and fingerprints are looked at likewise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import xxhash

from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, HASHES, SEGMENT, UNIT, decompressed, parse
from mdsmix.shards.lease import Lease
from mdsmix.shards.side_files import is_named_file
from mdsmix.storage import Location, together
from mdsmix.words import plural

SHARD = re.compile(r"([0-9a-f]{32})(-\d+)?\.mds(\.zstd)?")
"The name of a shard that mdsmix wrote; shards of equal bytes are numbered."
BLOCK = 1 << 20


def delete_damaged(job: Job, held: Lease, say: Callable[[str], None]) -> str:
    """Deletes the damaged shards at the target, and the damaged files beside its manifest, and calls `say` for each. Returns a
    sentence on what was checked and found.

    Unreachable where one cannot be read.
    """
    lying = [folder / name for folder in job.shard_folders for name, _ in folder.list()]
    shards = [at for at in lying if SHARD.fullmatch(at.name)]
    beside = [at for at in lying if is_named_file(at.name)]
    names = [name for name, _ in (job.folder / FOLDER).list()]
    segments = [job.folder / FOLDER / name for name in filter(SEGMENT.fullmatch, names)]
    hashed = [*shards, *beside, *segments]
    hashes = zip(hashed, together(stored_hash, hashed), strict=True)
    damaged = [(at, found) for at, found in hashes if not at.name.startswith(found)]
    for at, found in damaged:
        what, again = _said_of(at.name)
        say(
            f"{job.name}: the {what} {at} is damaged, its xxh128 is {found}: it is deleted, and {again} done again if "
            "it is still part of the stream"
        )
        held.delete(at)
    _delete_damaged_units(job, names, held, say)
    more = f" and {plural(len(beside), 'file')} beside the manifest" if beside else ""
    result = f"{len(damaged):,} damaged, made anew" if damaged else "all whole"
    return f"{plural(len(shards), 'shard')}{more} at the target read and hashed: {result}"


def _said_of(name: str) -> tuple[str, str]:
    """What a file of this name is, and what is done again where it is damaged."""
    if SEGMENT.fullmatch(name):
        return "segment", "its work units are"
    return ("file", "it is") if is_named_file(name) else ("shard", "its work unit is")


def _delete_damaged_units(
    job: Job, names: Sequence[str], held: Lease, say: Callable[[str], None]
) -> None:
    """The same of files of single units, which hold checksums."""
    lone = [name for name in names if UNIT.fullmatch(name) or HASHES.fullmatch(name)]
    whole = together(lambda name: _is_whole(name, (job.folder / FOLDER / name).read()), lone)
    for name in (name for name, is_whole in zip(lone, whole, strict=True) if not is_whole):
        at = job.folder / FOLDER / name
        say(f"{job.name}: {at} is damaged: it is deleted, and its work unit done again")
        held.delete(at)


def _is_whole(name: str, stored: bytes) -> bool:
    found = parse(name, stored)
    blobs = found.blobs.values() if found else ()
    return bool(found) and all(decompressed(stored[at.start : at.end]) is not None for at in blobs)


def stored_hash(shard: Location) -> str:
    """The xxh128 that the name of a shard, of a file beside the manifest or of a pack begins with where it is whole."""
    digest = xxhash.xxh128()
    with shard.open() as stored:
        while block := stored.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
