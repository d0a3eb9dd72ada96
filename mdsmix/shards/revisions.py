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
from dataclasses import dataclass

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.index import Index, parse_index
from mdsmix.shards.lease import Lease, await_others
from mdsmix.shards.manifest import parse_manifest
from mdsmix.storage import Location

SUPERSEDED = ".mdsmix/{hash}.index"
"Where an index that was replaced is kept."
REPLACED = ".mdsmix/{hash}.replaced"
"A file whose time stamp says when a version, named by the first 8 digits of its index's hash, ceased to be current."
TRIES = 10
"More writers than that at one moment there are not."


class Overtaken(Unreachable):
    """Another run has published since this one looked."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A file as it was read, with the stamp that a conditional write asks for; without stamp and content where there was none."""

    at: Location
    stamp: str | None
    content: bytes | None

    @classmethod
    def of(cls, at: Location) -> Revision:
        found = at.fetch()
        return cls(at, found[0].stamp, found[1]) if found else cls(at, None, None)


def publish_in_place(folder: Location, index: Index, manifest: bytes | None, held: Lease) -> None:
    """Makes this the index of the stream, and this its manifest, or none. The replaced index and its shards are kept for a
    while (`mdsmix gc`), since caches and running jobs may use them. Overtaken where another run published first."""
    old_manifest = Revision.of(folder / manifest_file.BASENAME)
    old_index = Revision.of(folder / index_file.BASENAME)
    held.confirm()
    new_manifest = swap(old_manifest, manifest) if manifest is not None else _deleted(old_manifest)
    try:
        if old_index.content not in (None, index.content):
            keep_index(folder, old_index.content or b"")
        refuse_crossed(swap(old_index, index.content), held)
    except Overtaken:
        _settle(folder, old_manifest.content, manifest)
        raise
    if _stamp(new_manifest.at) != new_manifest.stamp:
        _settle(folder, old_manifest.content, manifest)


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
    """Puts `content` where what was seen still lies; Overtaken where something else does."""
    if seen.content == content:
        return seen
    for _ in range(TRIES):
        put = (
            seen.at.create(content) if seen.stamp is None else seen.at.replace(seen.stamp, content)
        )
        if put:
            return Revision(seen.at, put.stamp, content)
        now = Revision.of(seen.at)
        if (
            now.content == content
        ):  # one's own, whose answer was lost; or another's, who made the same
            return now
        if now.stamp != seen.stamp:
            break
    raise _overtaken(seen.at)


def refuse_crossed(written: Revision, held: Lease) -> None:
    """Overtaken where, in a store that keeps no conditions, another write crossed this one and stands."""
    if not held.is_sure:
        await_others()
        if Revision.of(written.at).content != written.content:
            raise _overtaken(written.at)


def _overtaken(at: Location) -> Overtaken:
    return Overtaken(
        f"{at.parent} was published by another run while this one stood still, or {at.name} was changed by hand; what stands "
        "there stays, this run publishes nothing, finished work units are kept: run the same command again when no other "
        "is at work."
    )


def _deleted(seen: Revision) -> Revision:
    if seen.stamp is not None:
        seen.at.delete()
    return Revision(seen.at, None, None)


def _stamp(at: Location) -> str | None:
    found = at.stat()
    return found.stamp if found else None


def _settle(folder: Location, *known: bytes | None) -> None:
    """Restores the manifest of the published index, where another one lies there and this run knows the right one."""
    manifests = {index: content for each in known for index, content in _by_index(each).items()}
    for _ in range(TRIES):
        # Read before the index: if the two belong together, they did so at one moment.
        seen = Revision.of(folder / manifest_file.BASENAME)
        index = Revision.of(folder / index_file.BASENAME)
        found = _by_index(seen.content)
        standing = xxhash.xxh128_hexdigest(index.content or b"")
        if standing in found or standing not in manifests:
            return
        manifests |= found
        with suppress(Overtaken):
            swap(seen, manifests[standing])


def _by_index(manifest: bytes | None) -> dict[str, bytes]:
    """The manifest under the hash of its index; empty where there is none or it is damaged."""
    with suppress(Unreachable):
        return {parse_manifest(manifest, "").index_hash: manifest} if manifest else {}
    return {}
