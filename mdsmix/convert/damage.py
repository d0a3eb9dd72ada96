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
from mdsmix.shards.lease import Lease
from mdsmix.storage import Location, together
from mdsmix.words import plural

SHARD = re.compile(r"([0-9a-f]{32})(-\d+)?\.mds(\.zstd)?")
"The name of a shard that mdsmix wrote; shards of equal bytes are numbered."
BLOCK = 1 << 20


def delete_damaged(job: Job, held: Lease, say: Callable[[str], None]) -> str:
    """Deletes the damaged shards at the target and calls `say` for each. Returns a sentence on what was checked and found.

    Unreachable where a shard cannot be read.
    """
    names = {folder: [n for n, _ in folder.list()] for folder in job.shard_folders}
    shards = [folder / n for folder, found in names.items() for n in found if SHARD.fullmatch(n)]
    hashes = together(_hash, shards)
    damaged = [(at, h) for at, h in zip(shards, hashes, strict=True) if not at.name.startswith(h)]
    for at, found in damaged:
        say(
            f"{job.name}: the shard {at} is damaged, its xxh128 is {found}: it is deleted, and its work unit done again if "
            "it is still part of the stream"
        )
        held.delete(at)
    result = f"{len(damaged):,} damaged, made anew" if damaged else "all whole"
    return f"{plural(len(shards), 'shard')} at the target read and hashed: {result}"


def _hash(shard: Location) -> str:
    digest = xxhash.xxh128()
    with shard.open() as stored:
        while block := stored.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
