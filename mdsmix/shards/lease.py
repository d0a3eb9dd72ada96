"""A lease that lets only one run write a stream at a time: the file `.mdsmix/lease` names the run
that writes. The lease is valid as long as a counter in it rises.

The clocks of two machines are never compared. The holder of the lease raises the counter every five
seconds, which is one beat. A run that finds a lease of another run watches the counter, and takes
the lease over only if the counter has not changed for four beats (20 s) by the watching run's own
clock. Every write of the lease is conditional: it succeeds only if the file is still as it was
read. So if two runs take a lease over, one of them wins, and a holder that was stopped for a minute
learns before it publishes that it lost the lease.

A lease alone is not enough: its holder may be stopped right after confirming it, and resume after
another run has taken the lease over and published. So a run first reads the published files, then
confirms the lease, and then makes every write that publishes conditional on what it read
(`replace_unchanged`). The store refuses the writes of a run that was overtaken, and the run reports
that.

Publishing a stream in place takes two writes, first the manifest and then the index, and no store
writes two files at once. If the store accepts a run's manifest but refuses its index, the manifest
does not fit the published index. Then the run that overwrote the right manifest writes it again
(`_restore_manifest`). For this, each run keeps every manifest that it has overwritten, and checks
after its own last write that manifest and index belong together. So when all runs have ended,
manifest and index belong together. A run that was killed between its two writes leaves an
interrupted publication, and the next conversion completes it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone

import orjson
import xxhash

from mdsmix import schema
from mdsmix.errors import Unreachable
from mdsmix.frozen import frozen
from mdsmix.interrupts import delay_signals
from mdsmix.messages import Say
from mdsmix.shards.index import INDEX, Index, parse_index
from mdsmix.shards.manifest import MANIFEST, parse_manifest
from mdsmix.storage import Location, map_files
from mdsmix.storage.threads import await_system_threads

LEASE_PATH = ".mdsmix/lease"
"The lease's path below the stream's folder."
BEAT_SECONDS = 5.0
"A beat: the time after which the holder of a lease raises the lease's counter again."
STALE_BEATS = 4
"Number of beats without a change of the counter after which another run may take the lease over."
LOOKS_A_BEAT = 5
"How often per beat a waiting run reads the lease of the other run."
TRIES = 100
"""Attempts to take a lease. Other runs do not take and release a lease so often: after 100 failed
attempts, the file at the lease's path is probably not a lease.
"""
CONFLICTS = 10
"""Attempts at a conditional write. A store answers 409 if several runs write at the same moment;
ten such answers in a row are rare.
"""


@frozen(kw_only=True)
class Holder:
    """The run that has the lease (write lock) of a stream, as the lease's file describes it. Host,
    pid and since are for people.
    """

    host: str
    pid: int
    since: str
    "When the run took the lease, for example `2026-01-31 12:00:00 UTC`."
    token: str
    "Random hex digits that no other run has."
    beat: int = 0
    "The counter that the run raises while it is alive."

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@frozen(slots=True)
class Revision:
    """The content of a file at one moment, and its stamp (a string that changes with every write).
    `put` replaces the file only if nobody has changed it since then.
    """

    file: Location
    stamp: str | None = None
    "A string that changes with every write, such as a store's ETag; None if there was no file."
    content: bytes | None = None
    "None if there was no file."

    @classmethod
    def read(cls, file: Location) -> Revision:
        """Read a file, which may be missing."""
        answer = file.fetch()
        if answer is None:
            return cls(file)
        stat, content = answer
        return cls(file, stat.stamp, content)

    def put(self, content: bytes) -> Revision | None:
        """Write `content` if the file is still this revision. Return the new revision, or None if
        the file has changed.

        A refused write is tried again while the file is unchanged, since a store also answers 409
        if two runs write at the same moment. If the store's answer to a write is lost, the store
        client sends the write again, and the store refuses it. So a refused write counts as done
        if the file has the new content.
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
        """Return whether the file still has this revision's content."""
        return Revision.read(self.file).content == self.content


class Lease:
    """The right to write to a stream, which only one run has at a time: a file in the stream's
    folder. `hold_lease` gives it to a run. A thread renews it every five seconds; another run takes
    it over if it was not renewed for 20 s.
    """

    def __init__(self, holder: Holder, written: Revision, renewed_at: float) -> None:
        """Make the thread that renews the lease. `start` starts it.

        Args:
            holder: this run.
            written: the lease's file, as this run wrote it.
            renewed_at: when the file was written, in seconds of `_read_clock`.
        """
        # 3 ms, and a run that finds nothing to do takes no lease.
        from mdsmix.storage.fork_locks import lease_lock

        self._lock = lease_lock
        self._holder = holder
        self._file = written.file
        self._written: Revision | None = written
        "The lease as last written; None after another run has taken it over."
        self._renewed_at = renewed_at
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._renew_regularly, name="lease", daemon=True)

    def start(self) -> None:
        """Begin to renew the lease regularly."""
        self._heart.start()

    def confirm(self) -> None:
        """Raise Unreachable if another run has taken over the lease (write lock). To be called
        before every publication.
        """
        if not self.renew():
            raise Unreachable(
                f"{self._file.parent.parent} was taken over by another run, since this run "
                f"({self._holder}) was stopped for too long, or somebody deleted {self._file}. "
                "This run publishes and deletes nothing more, but its finished work units are "
                "kept. Run the same command again when no other run is writing."
            )

    def renew(self) -> bool:
        """Raise the counter in the lease's file. Return False if another run took the lease
        over.
        """
        # A child that is forked meanwhile would wait for ever for the locks that the store's client
        # has taken. So a fork waits for this lock.
        with self._lock:
            if self._written:
                started_at = _read_clock()
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                self._written = self._written.put(orjson.dumps(self._holder))
                if self._written:
                    self._renewed_at = started_at
            return self._written is not None

    def is_held_recently(self) -> bool:
        """Return whether this run certainly still holds the lease. This is asked before a deletion,
        since a deletion cannot be conditional on what was read.

        If this run raised the counter within the last 10 s, the store is not asked: another run
        takes the lease over only after the counter was unchanged for 20 s.
        """
        if _read_clock() - self._renewed_at < STALE_BEATS * BEAT_SECONDS / 2:
            return True
        return self.renew()

    def delete(self, file: Location) -> None:
        """Delete a file if this run still has the lease (write lock) on the stream. Otherwise
        nothing is deleted, since another run may need the file.
        """
        if self.is_held_recently():
            file.delete()

    def release(self) -> None:
        """Delete the lease's file. If the store does not answer, the file stays, and another run
        takes the lease over after 20 s. A second call does nothing.
        """
        with delay_signals():
            self._ended.set()
            if self._heart.is_alive():
                self._heart.join(1)
            if self._heart.native_id and not self._heart.is_alive():
                await_system_threads([self._heart.native_id])
            # A thread that still waits for the store could write the lease again after its
            # deletion.
            if self._written and not self._heart.is_alive():
                with suppress(Unreachable):
                    if self._written.is_current():
                        self._file.delete()
                self._written = None

    def _renew_regularly(self) -> None:
        """Renew the lease (write lock) every BEAT_SECONDS until it is released. The lease's thread
        runs this.
        """
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(Unreachable):  # the next beat may succeed, and confirm() does raise
                self.renew()


@contextmanager
def hold_lease(folder: Location, say: Say) -> Iterator[Lease]:
    """Hold the lease (write lock) of the stream in `folder` during a `with` block, so that no other
    run writes to the stream.

    Raises Unreachable if another run has the lease; the message names that run.

    Args:
        folder: the folder of the stream.
        say: called with sentences for the user, such as that this run waits for another.
    """
    lease = _take_lease(folder / LEASE_PATH, say)
    with ExitStack() as at_end:
        # Twice, since Ctrl-C may come before the first line of the first call is done.
        for _ in range(2):
            at_end.callback(lease.release)
        # Started only here: a run that was interrupted before this line renews no lease.
        lease.start()
        yield lease


def _take_lease(file: Location, say: Say) -> Lease:
    """Write the lease (write lock) of a stream for this run, once no other run has it, and return
    it.

    Raises Unreachable if another run has the lease; the message names that run.

    Args:
        file: the lease's file.
        say: called with sentences for the user, such as that this run waits for another.
    """
    me = Holder(
        host=os.uname().nodename,
        pid=os.getpid(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        token=os.urandom(8).hex(),
    )
    folder = file.parent.parent
    if not file.try_conditions():
        say(
            f"WARNING: the store of {folder} does not support conditional writes, so it cannot "
            "reliably keep two runs from writing the same stream; never start two runs on this "
            "stream at once."
        )
    current = Revision(file)  # usually there is no lease: try this first, which saves a request
    for _ in range(TRIES):
        started_at = _read_clock()
        written = current.put(orjson.dumps(me))
        if written:
            return Lease(me, written, started_at)
        current = Revision.read(file)
        if current.content is not None and not _wait_until_over(current, say):
            break
    raise Unreachable(
        f"{folder} is being written by {_name_holder(Revision.read(file))}, and two runs at once "
        "would overwrite each other's publication. Wait until that run is done, or end that run; "
        "then run the same command again."
    )


def _wait_until_over(lease: Revision, say: Say) -> bool:
    """Watch the lease of another run for up to 20 s.

    Return True if this run may take the lease: the other run released it, or did not change the
    counter in this time. Return False if the counter changed, since the other run is alive.
    """
    say(
        f"{lease.file.parent.parent} is being written by {_name_holder(lease)}; waiting up to "
        f"{STALE_BEATS * BEAT_SECONDS:.0f} s to see whether that run is still alive"
    )
    # Reads are counted, not seconds: a store that is slow for this run is slow for the holder too.
    for _ in range(STALE_BEATS * LOOKS_A_BEAT):
        time.sleep(BEAT_SECONDS / LOOKS_A_BEAT)
        current = Revision.read(lease.file)
        if current != lease:
            return current.content is None
    return True


def _name_holder(lease: Revision) -> str:
    """Return the lease's holder for a message: `process 7 on host since ...`, or `another run` if
    the lease cannot be read, for example while it is being written.
    """
    if lease.content is None:
        return "another run"
    holder = schema.parse_json_if_fit(Holder, lease.content)
    return "another run" if holder is None else str(holder)


def _read_clock() -> float:
    """Return seconds by a clock that keeps running while the machine sleeps, if there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


REPLACED_INDEX = ".mdsmix/{hash}.index"
"The file that keeps an index that was replaced. `hash`: the xxh128 of that index."
REPLACED_MARK = ".mdsmix/{hash}.replaced"
"""A file that marks a version of the stream as replaced; its modification time says since when.
`hash`: the first 8 digits of the hash of the version's index.
"""


class Overtaken(Unreachable):
    """Another run has published since this one read the published files."""


def publish_in_place(folder: Location, index: Index, manifest: bytes | None, lease: Lease) -> None:
    """Publish `index` and `manifest` in `folder`.

    The replaced index and its shards are kept for a while (until `mdsmix gc`), since caches and
    running jobs may use them.
    Raises Overtaken if another run published first.

    Args:
        folder: the folder of the stream.
        index: the new index.
        manifest: the bytes of the new manifest; None if the stream has no manifest.
        lease: this run's lease on the stream.
    """
    old_manifest, old_index = map_files(Revision.read, [folder / MANIFEST, folder / INDEX])
    lease.confirm()
    if manifest is None:
        old_manifest.file.delete()
        new_manifest = Revision(old_manifest.file)  # of a missing file
    else:
        new_manifest = replace_unchanged(old_manifest, manifest)
    try:
        if old_index.content is not None and old_index.content != index.content:
            keep_index(folder, old_index.content)
        replace_unchanged(old_index, index.content)
    except Overtaken:
        _restore_manifest(folder, old_manifest.content, manifest)
        raise
    # This run's index is published. Another run may have overwritten the manifest between the two
    # writes, so put the manifest of the published index back.
    if not new_manifest.is_current():
        _restore_manifest(folder, old_manifest.content, manifest)


def keep_index(folder: Location, index: bytes) -> None:
    """Keep a copy of an index that is about to be replaced. Running jobs may use it still: as long
    as there is a copy, the shards that it names are not deleted.

    Args:
        folder: the folder of the stream.
        index: the bytes of the index.
    """
    (folder / REPLACED_INDEX.format(hash=xxhash.xxh128_hexdigest(index))).write(index)


def read_replaced_indexes(folder: Location) -> Iterator[Index]:
    """Yield the replaced indexes that are kept in the folder of a stream. Damaged indexes are left
    out, since no reader can be using them.
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
            f"{revision.file.parent} was published by another run while this run was stopped, or "
            f"somebody changed {revision.file.name} by hand. The other publication stays, and this "
            "run publishes nothing, but its finished work units are kept. Run the same command "
            "again when no other run is writing."
        )
    return written


def _restore_manifest(folder: Location, *known_manifests: bytes | None) -> None:
    """Restore the manifest that belongs to the published index, if `folder` has another manifest
    and this run knows the right one.

    Args:
        folder: the folder of the stream.
        known_manifests: the bytes of the manifests that this run has read or written; None for a
            missing manifest.
    """
    manifests = dict[str, bytes]()
    for known_manifest in known_manifests:
        manifests |= _map_by_index_hash(known_manifest)
    for _ in range(CONFLICTS):
        # Read the manifest before the index: if both belong together, nothing is to be restored,
        # whatever another run has written since. If `put` below fails, look again.
        manifest = Revision.read(folder / MANIFEST)
        index = Revision.read(folder / INDEX)
        current = _map_by_index_hash(manifest.content)
        index_hash = xxhash.xxh128_hexdigest(index.content or b"")
        if index_hash in current or index_hash not in manifests:
            return
        manifests |= current
        manifest.put(manifests[index_hash])


def _map_by_index_hash(manifest: bytes | None) -> dict[str, bytes]:
    """Return the manifest in a mapping with one key, the hash of the index that the manifest names.
    The mapping is empty if the manifest is missing or damaged.
    """
    if manifest:
        with suppress(Unreachable):
            return {parse_manifest(manifest, "").index_hash: manifest}
    return {}
