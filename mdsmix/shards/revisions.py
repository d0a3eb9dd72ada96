"""The writes that publish a stream: each replaces only what lay there when the lease was last confirmed.

A lease alone protects nothing: its holder may be stopped right after confirming it, and wake when another run has taken it
over and published. So a run first reads what lies there, then confirms the lease, and then makes every write conditional on
what it read: the store refuses a run that was overtaken, and the run says so.

A stream in place takes two writes, manifest and index, and no store writes two files as one. Where the manifest was written
and the index then refused, the manifest is taken back: the run that overwrote the manifest of the published index restores
it (`_settle`). Each run keeps every manifest that it has overwritten and checks, after its own last write, that manifest and
index belong together; so when all runs have ended, they do. A run that was killed in between leaves an interrupted
publication like any other, and the next conversion completes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.index import Index, parse_index
from mdsmix.shards.lease import CONFLICTS, Lease, Revision
from mdsmix.shards.manifest import parse_manifest
from mdsmix.storage import Location

SUPERSEDED = ".mdsmix/{hash}.index"
"The file that keeps a replaced index."
REPLACED = ".mdsmix/{hash}.replaced"
"A file whose time stamp says when a version, named by the first 8 digits of its index's hash, ceased to be current."


class Overtaken(Unreachable):
    """Another run has published since this one looked."""


def publish_in_place(folder: Location, index: Index, manifest: bytes | None, held: Lease) -> None:
    """Publishes `index` and `manifest` in `folder`; None: the stream has no manifest. The replaced index and its shards are kept for
    a while (`mdsmix gc`), since caches and running jobs may use them. Overtaken where another run published first."""
    before = Revision.of(folder / manifest_file.BASENAME)
    old_index = Revision.of(folder / index_file.BASENAME)
    held.confirm()
    if manifest is None:
        before.at.delete()
    mine = Revision(before.at) if manifest is None else swap(before, manifest)
    try:
        if old_index.content not in (None, index.content):
            keep_index(folder, old_index.content or b"")
        swap(old_index, index.content)
    except Overtaken:
        _settle(folder, before.content, manifest)
        raise
    if not mine.stands():
        _settle(folder, before.content, manifest)


def keep_index(folder: Location, index: bytes) -> None:
    """Keeps an index that is about to be replaced."""
    (folder / SUPERSEDED.format(hash=xxhash.xxh128_hexdigest(index))).write(index)


def superseded(folder: Location) -> Iterator[Index]:
    """The replaced indexes that are kept in this folder, except damaged ones, which no reader can be using."""
    kept = folder / SUPERSEDED.partition("/")[0]
    for name, _ in kept.list():
        if name.endswith(".index"):
            with suppress(Unreachable):
                yield parse_index((kept / name).read(), name)


def swap(seen: Revision, content: bytes) -> Revision:
    """Replaces a file that is still as it was seen by `content`; Overtaken where it is not."""
    if put := seen.put(content):
        return put
    raise Overtaken(
        f"{seen.at.parent} was published by another run while this one stood still, or {seen.at.name} was changed by hand; what "
        "stands there stays, this run publishes nothing, finished work units are kept: run the same command again when no "
        "other is at work."
    )


def _settle(folder: Location, *known: bytes | None) -> None:
    """Restores the manifest of the published index, where another one lies there and this run knows the right one."""
    manifests = {index: content for each in known for index, content in _by_index(each).items()}
    for _ in range(CONFLICTS):
        # Read before the index: if the two belong together, they did so at one moment.
        seen = Revision.of(folder / manifest_file.BASENAME)
        index = Revision.of(folder / index_file.BASENAME)
        found = _by_index(seen.content)
        standing = xxhash.xxh128_hexdigest(index.content or b"")
        if standing in found or standing not in manifests:
            return
        manifests |= found
        seen.put(manifests[standing])


def _by_index(manifest: bytes | None) -> dict[str, bytes]:
    """{hash of its index: manifest}; empty where there is no manifest or it is damaged."""
    with suppress(Unreachable):
        return {parse_manifest(manifest, "").index_hash: manifest} if manifest else {}
    return {}
