"""Whether the training nodes will find, cache and verify the shards. A lost shard ends an epoch early or hangs it.

All of it is looked at by one listing a stream; no shard is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from mdsmix.mix.findings import check_loaders, check_streams
from mdsmix.mix.streams import Loader, Mix, Stream
from mdsmix.shards.index import BASENAME, Shard
from mdsmix.storage import locate
from mdsmix.training.keys import BYTE_UNITS, in_units
from mdsmix.training.rules import Hit
from mdsmix.words import does, listed, plural

SHARDS_CACHED = 4
"Streaming refuses a cache that holds fewer of the largest shard."


def _shown(shards: list[Shard]) -> str:
    return listed([shard.stored.basename for shard in shards])


@check_streams(
    "shard-missing",
    "error",
    "Streaming raises nothing: without workers the epoch ends early, with workers training hangs.",
)
def shard_missing(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    lost = [s for s in stream.shards if s.stored.basename not in stream.files]
    if lost:
        yield Hit(
            f"{len(lost)} of {plural(len(stream.shards), 'shard')} of {stream.name} {does(lost, 'is', 'are')} not at "
            f"{stream.folder}: {_shown(lost)}.",
            f"{mix.makers([stream], 'publish again')}; or copy {does(lost, 'it', 'them')} there.",
        )


@check_streams(
    "shard-size",
    "error",
    "A shard that was cut off or replaced gives wrong samples, or fails its checksum and ends the epoch without a word.",
)
def shard_size(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    other = [s for s in stream.shards if s.stored.basename in stream.files and not stream.holds(s)]
    if other:
        first = other[0].stored
        yield Hit(
            f"{plural(len(other), 'shard')} of {stream.name} {does(other, 'has', 'have')} another size than the index says ({_shown(other)}): "
            f"{first.basename} has {stream.files[first.basename].size} bytes, the index says {first.bytes}.",
            f"{mix.makers([stream], 'publish again')}; or copy {does(other, 'it', 'them')} again.",
        )


@check_streams("shard-damaged", "error", "Samples of this shard cannot be decoded.")
def shard_damaged(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    if not stream.trusted_manifest and stream.head.damage:
        yield Hit(
            f"{stream.head.damage.partition(';')[0]}.", f"{mix.makers([stream], 'publish again')}."
        )


@check_streams(
    "shard-contents",
    "error",
    "A shard that was changed in place gives wrong samples, or fails its checksum and ends the epoch without a word.",
)
def shard_contents(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    told = {shard.stored.basename for shard in stream.shards if not stream.holds(shard)}
    report = mix.verified.get(stream.folder.url)
    for fault in report.faults if report else ():
        if fault.file not in told:
            fix = fault.fix.replace("RECIPE", str(mix.recipe)) if mix.recipe else fault.fix
            yield Hit(f"{fault.file} of {stream.name}: {fault.problem.rstrip('.')}.", f"{fix}.")


@check_streams(
    "validate-hash", "error", "Streaming finds no such hash, and gives 0 samples without an error."
)
def validate_hash(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    wanted = stream.settings.get("validate_hash") or loader.dataset.get("validate_hash")
    lacking = [s for s in stream.shards if wanted and str(wanted) not in s.stored.hashes]
    if lacking:
        known = sorted(lacking[0].stored.hashes)
        yield Hit(
            f"{{loader}} sets validate_hash: {wanted}, and the index of {stream.name} holds {', '.join(known) or 'no hash'}.",
            f"set validate_hash: {known[0] if known else 'null'}.",
        )


@check_streams(
    "index-stale",
    "error",
    "Streaming trusts a cached index for ever: the old stream would be read, or shards that are gone.",
)
def index_stale(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    folder = stream.cache_folder
    if not folder or not stream.settings.get("remote"):
        return
    cached = locate(folder) / BASENAME
    if cached.stat() and (found := xxhash.xxh128_hexdigest(cached.read())) != stream.index.hash:
        yield Hit(
            f"the index cached in {folder} is {found[:8]}, and the one at {stream.folder} is {stream.index.hash[:8]}.",
            "name a new local folder (`mdsmix render-yaml` names one after the index), or delete this one.",
        )


@check_loaders("cache-limit-small", "error", "Streaming refuses the limit (ValueError).")
def cache_limit_small(mix: Mix, loader: Loader) -> Iterator[Hit]:
    given = loader.dataset.get("cache_limit")
    limit = in_units(given, BYTE_UNITS) if given else None
    largest = max((_cached_bytes(sh) for s in loader.streams for sh in s.shards), default=0)
    indexes = sum(len(stream.index.content) for stream in loader.streams)
    least = max(SHARDS_CACHED * largest, indexes + 1)
    if limit is not None and limit < least:
        yield Hit(
            f"cache_limit of {{loader}} is {given} ({limit} bytes), and four of the largest shard and all indexes need {least}.",
            f"set cache_limit to {least} or, better, much more.",
        )


def _cached_bytes(shard: Shard) -> int:
    return shard.raw_data.bytes + (shard.zip_data.bytes if shard.zip_data else 0)
