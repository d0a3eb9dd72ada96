"""Whether the training nodes will find, cache and verify the shards. A lost shard ends an epoch early or hangs it.

All of it is looked at by one listing a stream; no shard is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from mdsmix.mix.streams import Loader, Mix, StreamInMix
from mdsmix.shards.index import BASENAME, Shard
from mdsmix.storage import locate
from mdsmix.training.findings import Finding, check_loaders, check_streams
from mdsmix.training.keys import BYTE_UNITS, in_units

SHARDS_CACHED = 4
"Streaming refuses a cache that holds fewer of the largest shard."


@check_streams("error", "Samples of this shard cannot be decoded.")
def shard_damaged(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    if not stream.trusted_manifest and stream.head.damage:
        yield Finding(
            f"{stream.head.damage.partition(';')[0]}.", f"{mix.makers([stream], 'publish again')}."
        )


@check_streams("error", "Streaming finds no such hash, and gives 0 samples without an error.")
def validate_hash(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    wanted = stream.settings.get("validate_hash") or loader.dataset.get("validate_hash")
    lacking = [s for s in stream.shards if wanted and str(wanted) not in s.stored.hashes]
    if lacking:
        known = sorted(lacking[0].stored.hashes)
        yield Finding(
            f"{{loader}} sets validate_hash: {wanted}, and the index of {stream.name} holds {', '.join(known) or 'no hash'}.",
            f"set validate_hash: {known[0] if known else 'null'}.",
        )


@check_streams(
    "error",
    "Streaming trusts a cached index for ever: the old stream would be read, or shards that are gone.",
)
def index_stale(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    folder = stream.cache_folder
    if not folder or not stream.settings.get("remote"):
        return
    cached = locate(folder) / BASENAME
    if cached.stat() and (found := xxhash.xxh128_hexdigest(cached.read())) != stream.index.hash:
        yield Finding(
            f"the index cached in {folder} is {found[:8]}, and the one at {stream.folder} is {stream.index.hash[:8]}.",
            "name a new local folder (`mdsmix render-yaml` names one after the index), or delete this one.",
        )


@check_loaders("error", "Streaming refuses the limit (ValueError).")
def cache_limit_small(mix: Mix, loader: Loader) -> Iterator[Finding]:
    given = loader.dataset.get("cache_limit")
    limit = in_units(given, BYTE_UNITS) if given else None
    largest = max((_cached_bytes(sh) for s in loader.streams for sh in s.shards), default=0)
    indexes = sum(len(stream.index.content) for stream in loader.streams)
    least = max(SHARDS_CACHED * largest, indexes + 1)
    if limit is not None and limit < least:
        yield Finding(
            f"cache_limit of {{loader}} is {given} ({limit} bytes), and four of the largest shard and all indexes need {least}.",
            f"set cache_limit to {least} or, better, much more.",
        )


def _cached_bytes(shard: Shard) -> int:
    return shard.raw_data.bytes + (shard.zip_data.bytes if shard.zip_data else 0)
