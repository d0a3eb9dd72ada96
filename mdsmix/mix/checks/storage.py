"""Whether the training nodes will find, cache and verify the shards. A lost shard ends an epoch early or hangs it.

All of it is looked at by one listing a stream; no shard is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import xxhash

from mdsmix.mix.findings import Hit, check, does
from mdsmix.mix.foundry import BYTE_UNITS, in_units
from mdsmix.mix.streams import Loader, Mix, Stream, cache_folder, plural, them, whole
from mdsmix.shards.index import BASENAME, Shard
from mdsmix.storage import locate

SHOWN = 3
"File names that one message shows."
SHARDS_CACHED = 4
"Streaming refuses a cache that holds fewer of the largest shard."


def _per_loader(mix: Mix) -> Iterator[tuple[Loader, Stream]]:
    for loader in mix.loaders:
        for stream in loader.streams:
            yield loader, stream


def _shown(shards: list[Shard]) -> str:
    listed = ", ".join(shard.stored.basename for shard in shards[:SHOWN])
    return listed + (f" and {len(shards) - SHOWN} more" if len(shards) > SHOWN else "")


@check(
    "shard-missing",
    "error",
    "Streaming raises nothing: without workers the epoch ends early, with workers training hangs.",
)
def shard_missing(mix: Mix) -> Iterator[Hit]:
    for stream in mix.streams:
        lost = [s for s in stream.shards if s.stored.basename not in stream.files]
        if lost:
            yield Hit(
                [stream.name],
                f"{len(lost)} of {plural(len(stream.shards), 'shard')} of {stream.name} {does(lost, 'is', 'are')} not at "
                f"{stream.folder}: {_shown(lost)}.",
                f"{mix.makers([stream], 'publish again')}; or copy {them(lost)} there.",
            )


@check(
    "shard-size",
    "error",
    "A shard that was cut off or replaced gives wrong samples, or fails its checksum and ends the epoch without a word.",
)
def shard_size(mix: Mix) -> Iterator[Hit]:
    for stream in mix.streams:
        other = [
            s for s in stream.shards if s.stored.basename in stream.files and not stream.holds(s)
        ]
        if other:
            first = other[0].stored
            yield Hit(
                [stream.name],
                f"{plural(len(other), 'shard')} of {stream.name} {does(other, 'has', 'have')} another size than the index says ({_shown(other)}): "
                f"{first.basename} has {stream.files[first.basename].size} bytes, the index says {first.bytes}.",
                f"{mix.makers([stream], 'publish again')}; or copy {them(other)} again.",
            )


@check("shard-damaged", "error", "Samples of this shard cannot be decoded.")
def shard_damaged(mix: Mix) -> Iterator[Hit]:
    for stream in mix.streams:
        if not stream.is_trusted and stream.head.damage:
            yield Hit(
                [stream.name],
                f"{stream.head.damage.partition(';')[0]}.",
                f"{mix.makers([stream], 'publish again')}.",
            )


@check(
    "validate-hash",
    "error",
    "Streaming finds no such hash, and gives 0 samples without an error.",
)
def validate_hash(mix: Mix) -> Iterator[Hit]:
    for loader, stream in _per_loader(mix):
        wanted = stream.settings.get("validate_hash") or loader.dataset.get("validate_hash")
        lacking = [s for s in stream.shards if wanted and str(wanted) not in s.stored.hashes]
        if lacking:
            known = sorted(lacking[0].stored.hashes)
            yield Hit(
                [stream.name],
                f"{loader.label} sets validate_hash: {wanted}, and the index of {stream.name} holds {', '.join(known) or 'no hash'}.",
                f"set validate_hash: {known[0] if known else 'null'}.",
            )


@check(
    "local-duplicate",
    "error",
    "Streaming refuses the folder (Reused local directory), or, through a symlink, mixes up two streams.",
)
def local_duplicate(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        seen: dict[str, str] = {}
        for stream in loader.streams:
            folder = cache_folder(stream.settings)
            if folder and folder in seen:
                yield Hit(
                    [seen[folder], stream.name],
                    f"{seen[folder]} and {stream.name} both have the local folder {folder}.",
                    "give each stream a local folder of its own.",
                )
            seen.setdefault(folder or "", stream.name)


@check(
    "local-unset",
    "warning",
    "Streaming caches it in the temporary folder and refuses that folder when the run starts again (FileExistsError).",
)
def local_unset(mix: Mix) -> Iterator[Hit]:
    for stream in () if mix.is_bare else mix.streams:
        if not stream.settings.get("local"):
            yield Hit(
                [stream.name],
                f"{stream.name} has no local folder.",
                "set local, in the recipe or for the stream.",
            )


@check(
    "index-stale",
    "error",
    "Streaming trusts a cached index for ever: the old stream would be read, or shards that are gone.",
)
def index_stale(mix: Mix) -> Iterator[Hit]:
    for stream in mix.streams:
        folder = cache_folder(stream.settings)
        if not folder or not stream.settings.get("remote"):
            continue
        cached = locate(folder) / BASENAME
        if cached.stat() and (found := xxhash.xxh128_hexdigest(cached.read())) != stream.index.hash:
            yield Hit(
                [stream.name],
                f"the index cached in {folder} is {found[:8]}, and the one at {stream.folder} is {stream.index.hash[:8]}.",
                "name a new local folder (`mdsmix render-yaml` names one after the index), or delete this one.",
            )


@check(
    "cache-limit-local",
    "error",
    "To stay under the limit Streaming deletes shards, and of this stream they are the only copy.",
)
def cache_limit_local(mix: Mix) -> Iterator[Hit]:
    for loader, stream in _per_loader(mix):
        is_only_copy = os.path.realpath(str(stream.folder)) == cache_folder(stream.settings)
        if loader.dataset.get("cache_limit") and is_only_copy:
            yield Hit(
                [stream.name],
                f"{loader.label} sets cache_limit: {loader.dataset['cache_limit']}, and {stream.name} has no remote but its local folder.",
                "publish the stream to a remote, or leave cache_limit out.",
            )


@check("cache-limit-small", "error", "Streaming refuses the limit (ValueError).")
def cache_limit_small(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        given = loader.dataset.get("cache_limit")
        limit = in_units(given, BYTE_UNITS) if given else None
        largest = max((_cached_bytes(sh) for s in loader.streams for sh in s.shards), default=0)
        indexes = sum(len(stream.index.content) for stream in loader.streams)
        least = max(SHARDS_CACHED * largest, indexes + 1)
        if given and limit is None:
            yield Hit(
                [],
                f"cache_limit of {{loader}} is {given!r}.",
                "write bytes, or a size such as 500gb.",
                loader.label,
            )
        elif limit is not None and limit < least:
            yield Hit(
                [],
                f"cache_limit of {loader.label} is {given} ({limit} bytes), and four of the largest shard and all indexes need {least}.",
                f"set cache_limit to {least} or, better, much more.",
            )


def _cached_bytes(shard: Shard) -> int:
    return shard.raw_data.bytes + (shard.zip_data.bytes if shard.zip_data else 0)


@check(
    "download-retry",
    "error",
    "It counts attempts, not retries: with 0 nothing is ever downloaded (ValueError).",
)
def download_retry(mix: Mix) -> Iterator[Hit]:
    for loader, stream in _per_loader(mix):
        own = stream.settings.get("download_retry", loader.dataset.get("download_retry"))
        if (attempts := whole(own)) is not None and attempts < 1:
            yield Hit(
                [stream.name],
                f"download_retry of {stream.name} is {attempts}.",
                "set it to at least 1.",
            )
