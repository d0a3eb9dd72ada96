"""Shards at a target that are not what their names say: found by `convert --verify-target`, taken away, and made anew.

A run trusts a shard that lies at the target in its full size. Here every shard that it might reuse, those of older versions
too, is read and hashed first; that needs no index, since a shard is named by the hash of its stored bytes. Once a damaged
shard is deleted, the record of its work unit names a missing shard, so the unit counts as unfinished and is converted again.
A shard that only an older index or version names is not made again: its reader then misses a shard, where it would have
trained on damage.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import xxhash

from mdsmix.convert.job import Job
from mdsmix.shards.beside import is_beside
from mdsmix.shards.lease import Lease
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
    beside = [at for at in lying if is_beside(at.name)]
    hashed = [*shards, *beside]
    hashes = zip(hashed, together(stored_hash, hashed), strict=True)
    damaged = [(at, found) for at, found in hashes if not at.name.startswith(found)]
    for at, found in damaged:
        what, again = ("file", "it") if is_beside(at.name) else ("shard", "its work unit")
        say(
            f"{job.name}: the {what} {at} is damaged, its xxh128 is {found}: it is deleted, and {again} done again if "
            "it is still part of the stream"
        )
        held.delete(at)
    more = f" and {plural(len(beside), 'file')} beside the manifest" if beside else ""
    result = f"{len(damaged):,} damaged, made anew" if damaged else "all whole"
    return f"{plural(len(shards), 'shard')}{more} at the target read and hashed: {result}"


def stored_hash(shard: Location) -> str:
    """The xxh128 that the name of a shard, or of a file beside the manifest, begins with where it is whole."""
    digest = xxhash.xxh128()
    with shard.open() as stored:
        while block := stored.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
