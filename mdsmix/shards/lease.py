"""A lease that lets only one run write a stream at a time: the file `.mdsmix/lease` names the run
that writes. The lease is valid as long as a counter in it rises.

The clocks of two machines are never compared. The holder raises a counter in the object every five
seconds. A run that finds a lease watches it, and takes it over only if the counter has not changed
for four beats of its own clock. Every write is conditional on what was read. So if two runs take a
lease over, one of them wins, and a holder that was stopped for a minute learns before it publishes
that it lost the lease.

A lease alone is not enough: its holder may be stopped right after confirming it, and resume after
another run has taken the lease over and published. So a run first reads the published files, then
confirms the lease, and then makes every write that publishes conditional on what it read
(`replace_unchanged`). The store refuses the writes of a run that was overtaken, and the run reports
that.

Publishing a stream in place takes two writes, manifest and index, and no store writes two files as
one. If the manifest was written and the index then refused, the manifest must be restored: the run
that overwrote the manifest of the published index puts it back (`_restore_manifest`). Each run
keeps every manifest that it has overwritten, and checks after its own last write that manifest and
index belong together; so when all runs have ended, they do. A run that was killed in between leaves
an interrupted publication like any other, and the next conversion completes it.
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
"The lease's path below the stream's folder."
BEAT_SECONDS = 5.0
STALE_BEATS = 4
"A lease may be taken over if its counter has not changed for so many beats."
LOOKS_A_BEAT = 5
"How often per beat a waiting run reads the lease of the other run."
TRIES = 100
"""Attempts to take a lease. Other runs do not take and release it so often, so after that many
something else is at its path.
"""
CONFLICTS = 10
"""Attempts at a conditional write. A store answers 409 if others write at the same moment, and it
is rare that so many do.
"""

# A fork in the middle of a beat would leave the child with the store client's locks taken forever.
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
    """A file as it was read, for conditional writes. Its stamp changes with every write (a store's
    ETag). Stamp and content are None if there was no file.
    """

    file: Location
    stamp: str | None = None
    content: bytes | None = None

    @classmethod
    def read(cls, file: Location) -> Revision:
        answer = file.fetch()
        if answer is None:
            return cls(file)
        stat, content = answer
        return cls(file, stat.stamp, content)

    def put(self, content: bytes) -> Revision | None:
        """Replace this revision and return the new one, or None if the file has changed since.

        A failed write is tried again while the file is unchanged, since stores also answer 409 to
        writers at the same moment. If the answer to a write is lost, the store client sends the
        write again. It then finds its own content, and counts as done.
        """
        if self.content == content:
            return self
        for _ in range(CONFLICTS):
            if self.stamp is None:
                stat = self.file.create(content)
            else:
                stat = self.file.replace(self.stamp, content)
            if stat:
                return Revision(self.file, stat.stamp, content)
            current = Revision.read(self.file)
            if current.content == content:
                return current
            if current.stamp != self.stamp:
                break
        return None

    def is_current(self) -> bool:
        """Check whether the file still has this content."""
        return Revision.read(self.file).content == self.content


class Lease:
    """A lease that this run holds on a stream, as `hold_lease` gives it. A thread renews it every
    five seconds.
    """

    def __init__(self, holder: Holder, written: Revision, renewed_at: float) -> None:
        """Start the thread that renews the lease.

        Args:
            holder: this run.
            written: the lease's file, as this run wrote it.
            renewed_at: when it was written, by `_now`.
        """
        self._holder = holder
        self._file = written.file
        self._written: Revision | None = written
        "The lease as last written; None after another run has taken it over."
        self._renewed_at = renewed_at
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._renew_regularly, name="lease", daemon=True)
        self._heart.start()

    def confirm(self) -> None:
        """Raise Unreachable if another run took the lease over. Call it before anything is
        published.
        """
        if not self.renew():
            raise Unreachable(
                f"{self._file.parent.parent} was taken over by another run, because this one "
                f"({self._holder}) was stopped for too long, or somebody deleted {self._file}. "
                "This run publishes and deletes nothing more; finished work units are kept: run "
                "the same command again when no other run is writing."
            )

    def renew(self) -> bool:
        """Write the next heartbeat. Return False if another run took the lease over."""
        with _beating:
            if self._written:
                started_at = _now()
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                self._written = self._written.put(orjson.dumps(self._holder))
                if self._written:
                    self._renewed_at = started_at
            return self._written is not None

    def is_held_recently(self) -> bool:
        """Return whether this run certainly still holds the lease. A file is deleted only if it
        does, since a deletion cannot be conditional.

        The store is asked, by `renew`, only if the last beat is older than 10 s: another run takes
        the lease over only after its counter was unchanged for 20 s.
        """
        if _now() - self._renewed_at < STALE_BEATS * BEAT_SECONDS / 2:
            return True
        return self.renew()

    def delete(self, file: Location) -> None:
        """Delete a file, unless the lease was lost: then another run may need the file."""
        if self.is_held_recently():
            file.delete()

    def release(self) -> None:
        """Delete the lease. If the store does not answer, the lease stays, and other runs take it
        over after 20 s.
        """
        self._ended.set()
        self._heart.join(1)
        if not self._heart.is_alive():
            with suppress(Unreachable):
                if self._written and self._written.is_current():
                    self._file.delete()

    def _renew_regularly(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(Unreachable):  # the next beat may succeed, and confirm() does raise
                self.renew()


@contextmanager
def hold_lease(folder: Location, say: Say) -> Iterator[Lease]:
    """Hold the lease of the stream in `folder` during a `with` block.

    Raises Unreachable if another run holds it; the message names that run.
    """
    lease = _take_lease(folder / LEASE_PATH, say)
    try:
        yield lease
    finally:
        lease.release()


def _take_lease(file: Location, say: Say) -> Lease:
    """Write a lease of this run to `file`, once no other run holds one, and return it.

    Raises Unreachable if another run holds the lease; the message names that run.
    """
    me = Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        token=secrets.token_hex(8),
    )
    folder = file.parent.parent
    if not file.try_conditions():
        say(
            f"WARNING: the store of {folder} does not support conditional writes (If-Match, "
            "If-None-Match), so it cannot reliably keep two runs from writing one stream; never "
            "start two at once."
        )
    for _ in range(TRIES):
        current = Revision.read(file)
        if current.content is not None and not _wait_until_over(current, say):
            break
        started_at = _now()
        written = current.put(orjson.dumps(me))
        if written:
            return Lease(me, written, started_at)
    raise Unreachable(
        f"{folder} is being written by {_name_holder(Revision.read(file))}, and two runs at once "
        "would overwrite each other's publication; wait until that run is done or end it, then run "
        "the same command again."
    )


def _wait_until_over(lease: Revision, say: Say) -> bool:
    """Watch the lease of another run for up to 20 s. Return True if the run released it, or did not
    change its counter in this time; False if the run is alive.
    """
    say(
        f"{lease.file.parent.parent} is being written by {_name_holder(lease)}; waiting up to "
        f"{STALE_BEATS * BEAT_SECONDS:.0f} s to see whether that run is still alive"
    )
    # Looks are counted, not seconds: a store that is slow for us is slow for the holder too.
    for _ in range(STALE_BEATS * LOOKS_A_BEAT):
        time.sleep(BEAT_SECONDS / LOOKS_A_BEAT)
        current = Revision.read(lease.file)
        if current != lease:
            return current.content is None
    return True


def _name_holder(lease: Revision) -> str:
    """Name the lease's holder for a message; a lease that is being written may be unreadable."""
    holder = schema.parse_json_if_fit(Holder, lease.content or b"")
    return str(holder or "another run")


def _now() -> float:
    """Return seconds by a clock that keeps running while the machine sleeps, if there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


REPLACED_INDEX = ".mdsmix/{hash}.index"
"The file that keeps a replaced index."
REPLACED_MARK = ".mdsmix/{hash}.replaced"
"""A file whose modification time is when a version stopped being the current one. `hash`: the first
8 digits of the hash of the version's index.
"""


class Overtaken(Unreachable):
    """Another run has published since this one read the published files."""


def publish_in_place(folder: Location, index: Index, manifest: bytes | None, lease: Lease) -> None:
    """Publish `index` and `manifest` in `folder`.

    The replaced index and its shards are kept for a while (until `mdsmix gc`), since caches and
    running jobs may use them.
    Raises Overtaken if another run published first.

    Args:
        manifest: its bytes; None if the stream has no manifest.
    """
    old_manifest = Revision.read(folder / MANIFEST)
    old_index = Revision.read(folder / INDEX)
    lease.confirm()
    if manifest is None:
        old_manifest.file.delete()
        new_manifest = Revision(old_manifest.file)
    else:
        new_manifest = replace_unchanged(old_manifest, manifest)
    try:
        if old_index.content not in (None, index.content):
            keep_index(folder, old_index.content or b"")
        replace_unchanged(old_index, index.content)
    except Overtaken:
        _restore_manifest(folder, old_manifest.content, manifest)
        raise
    if not new_manifest.is_current():
        _restore_manifest(folder, old_manifest.content, manifest)


def keep_index(folder: Location, index: bytes) -> None:
    """Keep a copy of an index that is about to be replaced."""
    (folder / REPLACED_INDEX.format(hash=xxhash.xxh128_hexdigest(index))).write(index)


def read_replaced_indexes(folder: Location) -> Iterator[Index]:
    """Yield the replaced indexes that are kept in this folder, except damaged ones, which no reader
    can be using.
    """
    kept_folder = folder / REPLACED_INDEX.partition("/")[0]
    for name, _ in kept_folder.list():
        if name.endswith(".index"):
            with suppress(Unreachable):
                yield parse_index((kept_folder / name).read(), name)


def replace_unchanged(revision: Revision, content: bytes) -> Revision:
    """Replace a file that has not changed since `revision` was read.

    Raises Overtaken if it has changed.
    """
    written = revision.put(content)
    if written is None:
        raise Overtaken(
            f"{revision.file.parent} was published by another run while this one was stopped, or "
            f"{revision.file.name} was changed by hand. That publication is kept, and this run "
            "publishes nothing. Its finished work units are kept: run the same command again when "
            "no other run is writing."
        )
    return written


def _restore_manifest(folder: Location, *known_manifests: bytes | None) -> None:
    """Restore the manifest that belongs to the published index, if `folder` has another manifest
    and this run knows the right one.

    Args:
        known_manifests: the manifests that this run has read or written; None for a missing one.
    """
    manifests = dict[str, bytes]()
    for known_manifest in known_manifests:
        manifests |= _by_index_hash(known_manifest)
    for _ in range(CONFLICTS):
        # Read the manifest first: if the two belong together, they did so at one moment.
        manifest = Revision.read(folder / MANIFEST)
        index = Revision.read(folder / INDEX)
        current = _by_index_hash(manifest.content)
        index_hash = xxhash.xxh128_hexdigest(index.content or b"")
        if index_hash in current or index_hash not in manifests:
            return
        manifests |= current
        manifest.put(manifests[index_hash])


def _by_index_hash(manifest: bytes | None) -> dict[str, bytes]:
    """Return {hash of the index that the manifest names: the manifest}; empty if the manifest is
    missing or damaged.
    """
    if manifest:
        with suppress(Unreachable):
            return {parse_manifest(manifest, "").index_hash: manifest}
    return {}
