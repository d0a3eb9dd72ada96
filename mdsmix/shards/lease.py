"""One writer of a stream at a time: the object `.mdsmix/lease` names the run that writes, and holds
while its counter rises.

No clock is compared with another. The holder raises a counter in the object every five seconds. A
run that finds a lease watches it, and takes it over only after the counter has stood still for four
beats of its own clock. Every write is conditional on what was read. So of two runs that take over,
one wins; and a holder that was stopped for a minute learns before it publishes that it lost.

A lease alone protects nothing: its holder may be stopped right after confirming it, and wake when
another run has taken it over and published. So a run first reads what lies there, then confirms the
lease, and then makes every write that publishes conditional on what it read (`swap`): the store
refuses a run that was overtaken, and the run says so.

A stream in place takes two writes, manifest and index, and no store writes two files as one. Where
the manifest was written and the index then refused, the manifest is taken back: the run that
overwrote the manifest of the published index restores it (`_settle`). Each run keeps every manifest
that it has overwritten and checks, after its own last write, that manifest and index belong
together; so when all runs have ended, they do. A run that was killed in between leaves an
interrupted publication like any other, and the next conversion completes it.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import orjson
import xxhash

from mdsmix import schema
from mdsmix.errors import Unreachable
from mdsmix.messages import Say
from mdsmix.shards.index import INDEX, Index, parse_index
from mdsmix.shards.manifest import MANIFEST, parse_manifest
from mdsmix.storage import Location

LEASE_PATH = ".mdsmix/lease"
BEAT_SECONDS = 5.0
STALE_BEATS = 4
LOOKS_A_BEAT = 5
TRIES = 100
"""Attempts to take a lease. Other runs do not take and leave it so often, so after them something
else lies in its place.
"""
CONFLICTS = 10
"Attempts at a conditional write: no more runs than that write at one moment."

# A fork in the middle of a beat would leave the child with the store client's locks held for ever.
_beating = threading.RLock()
os.register_at_fork(
    before=_beating.acquire, after_in_parent=_beating.release, after_in_child=_beating.release
)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The run that writes. People read host, pid and since; this module reads token and beat."""

    host: str
    pid: int
    since: str
    token: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@dataclass(frozen=True, slots=True)
class Revision:
    """A file as it was read, with the stamp that a conditional write asks for; stamp and content
    are None where there was no file.
    """

    at: Location
    stamp: str | None = None
    content: bytes | None = None

    @classmethod
    def of(cls, at: Location) -> Revision:
        found = at.fetch()
        return cls(at, found[0].stamp, found[1]) if found else cls(at)

    def put(self, content: bytes) -> Revision | None:
        """Replaces this revision; None where another revision, or no file, lies there by now. A
        write whose answer was lost is sent again and then finds its own content.
        """
        if self.content == content:
            return self
        for _ in range(CONFLICTS):
            if self.stamp is None:
                stat = self.at.create(content)
            else:
                stat = self.at.replace(self.stamp, content)
            if stat:
                return Revision(self.at, stat.stamp, content)
            now = Revision.of(self.at)
            if now.content == content:
                return now
            if now.stamp != self.stamp:
                break
        return None

    def stands(self) -> bool:
        """Whether the file still has this content."""
        return Revision.of(self.at).content == self.content


class Lease:
    """A lease that is held. A thread keeps it alive."""

    def __init__(self, holder: Holder, written: Revision, held_at: float) -> None:
        self._holder, self._at = holder, written.at
        self._written: Revision | None = written
        "The lease as last written; None once another run has taken it over."
        self._held_at = held_at
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._live, name="lease", daemon=True)
        self._heart.start()

    def confirm(self) -> None:
        """Raises Unreachable where another run took the lease over. Called before anything is
        published.
        """
        if not self.renew():
            raise Unreachable(
                f"{self._at.parent.parent} was taken over by another run, because this one ({self._holder}) stood "
                f"still for too long, or somebody deleted {self._at}; from here on it publishes and deletes nothing, "
                "finished work units are kept: run the same command again when no other is at work."
            )

    def renew(self) -> bool:
        """Whether this run holds the lease: writes the next beat, which only the holder can."""
        with _beating:
            if self._written:
                began, self._holder = _now(), replace(self._holder, beat=self._holder.beat + 1)
                self._written = self._written.put(orjson.dumps(self._holder))
                self._held_at = began if self._written else self._held_at
            return self._written is not None

    def is_held_recently(self) -> bool:
        """As `is_held`, but asks the store only when the last beat is older than 10 s: nobody takes
        a lease over before its counter has stood still for 20 s. For deletions, which cannot be
        conditional.
        """
        return _now() - self._held_at < STALE_BEATS * BEAT_SECONDS / 2 or self.renew()

    def delete(self, at: Location) -> None:
        """Deletes a file, unless the lease was lost: then the file may be another run's by now."""
        if self.is_held_recently():
            at.delete()

    def release(self) -> None:
        """Gives the lease up. Where the store does not answer, the lease is left there and grows
        stale.
        """
        self._ended.set()
        self._heart.join(1)
        if not self._heart.is_alive():
            with suppress(Unreachable):
                if self._written and self._written.stands():
                    self._at.delete()

    def _live(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(Unreachable):  # the next beat may pass, and confirm() asks in earnest
                self.renew()


@contextmanager
def hold_lease(folder: Location, say: Say) -> Iterator[Lease]:
    """Holds the lease of the stream in `folder`; Unreachable says who else does."""
    mine = _take(folder / LEASE_PATH, say)
    try:
        yield mine
    finally:
        mine.release()


def _take(at: Location, say: Say) -> Lease:
    me = Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        token=secrets.token_hex(8),
    )
    if not at.try_conditions():
        say(
            f"WARNING: the store of {at.parent.parent} keeps no conditions (If-Match, If-None-Match), so two runs that "
            "write one stream cannot be kept apart for certain: see that no two are started at once."
        )
    for _ in range(TRIES):
        seen = Revision.of(at)
        if seen.content is not None and not _is_over(seen, say):
            break
        began = _now()
        if written := seen.put(orjson.dumps(me)):
            return Lease(me, written, began)
    raise Unreachable(
        f"{at.parent.parent} is being written by {_holder_in(Revision.of(at)) or 'another run'}, and two at once would "
        "publish over each other; wait until it is done or end it, then run the same command again."
    )


def _is_over(seen: Revision, say: Say) -> bool:
    """Whether the lease was given up, or its counter stood still for 20 s."""
    said = f"{seen.at.parent.parent} is held by {_holder_in(seen) or 'another run'}"
    say(f"{said}; watching for up to {STALE_BEATS * BEAT_SECONDS:.0f} s whether it lives")
    # Looks are counted, not seconds: a store slow for us is slow for the holder.
    for _ in range(STALE_BEATS * LOOKS_A_BEAT):
        time.sleep(BEAT_SECONDS / LOOKS_A_BEAT)
        if (now := Revision.of(seen.at)) != seen:
            return now.content is None
    return True


def _holder_in(found: Revision) -> Holder | None:
    """The holder that the lease names; None where it cannot be read, as in the middle of a
    write.
    """
    return schema.parse_json_if_fit(Holder, found.content or b"")


def _now() -> float:
    """Seconds by a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


REPLACED_INDEX = ".mdsmix/{hash}.index"
"The file that keeps a replaced index."
REPLACED_MARK = ".mdsmix/{hash}.replaced"
"""A file whose time stamp says when a version, named by the first 8 digits of its index's hash,
ceased to be current.
"""


class Overtaken(Unreachable):
    """Another run has published since this one looked."""


def publish_in_place(folder: Location, index: Index, manifest: bytes | None, held: Lease) -> None:
    """Publishes `index` and `manifest` in `folder`; None: the stream has no manifest. The replaced
    index and its shards are kept for a while (`mdsmix gc`), since caches and running jobs may use
    them. Overtaken where another run published first.
    """
    before = Revision.of(folder / MANIFEST)
    old_index = Revision.of(folder / INDEX)
    held.confirm()
    if manifest is None:
        before.at.delete()
    mine = Revision(before.at) if manifest is None else replace_unchanged(before, manifest)
    try:
        if old_index.content not in (None, index.content):
            keep_index(folder, old_index.content or b"")
        replace_unchanged(old_index, index.content)
    except Overtaken:
        _settle(folder, before.content, manifest)
        raise
    if not mine.stands():
        _settle(folder, before.content, manifest)


def keep_index(folder: Location, index: bytes) -> None:
    """Keeps an index that is about to be replaced."""
    (folder / REPLACED_INDEX.format(hash=xxhash.xxh128_hexdigest(index))).write(index)


def read_replaced_indexes(folder: Location) -> Iterator[Index]:
    """The replaced indexes that are kept in this folder, except damaged ones, which no reader can
    be using.
    """
    kept = folder / REPLACED_INDEX.partition("/")[0]
    for name, _ in kept.list():
        if name.endswith(".index"):
            with suppress(Unreachable):
                yield parse_index((kept / name).read(), name)


def replace_unchanged(seen: Revision, content: bytes) -> Revision:
    """Replaces a file that is still as it was seen by `content`; Overtaken where it is not."""
    if put := seen.put(content):
        return put
    raise Overtaken(
        f"{seen.at.parent} was published by another run while this one stood still, or {seen.at.name} was changed by hand; what "
        "stands there stays, this run publishes nothing, finished work units are kept: run the same command again when no "
        "other is at work."
    )


def _settle(folder: Location, *known: bytes | None) -> None:
    """Restores the manifest of the published index, where another one lies there and this run knows
    the right one.
    """
    manifests = {index: content for each in known for index, content in _by_index(each).items()}
    for _ in range(CONFLICTS):
        # Read before the index: if the two belong together, they did so at one moment.
        seen = Revision.of(folder / MANIFEST)
        index = Revision.of(folder / INDEX)
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
