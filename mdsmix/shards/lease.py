"""One writer of a stream at a time: the object `.mdsmix/lease` says who is at it, and lives while its heart beats.

No clock is compared with another. A holder raises a counter in the object every five seconds; who finds a lease watches
it, and takes it over only after it has stood still for four beats of his own. Where the holder's process can be looked
at (same machine, same pid namespace) nobody waits: it runs or it does not. Every write is conditional on what was read,
so of two that take over one wins, and a holder that was stopped for a minute learns before it publishes that it lost. What
it publishes is conditional too (publication.py), since it may be stopped again right after it has asked.

Where the store keeps no conditions, a writer waits after its write and holds the lease only if its write still stands:
anyone who looked before that write has written by then.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import orjson

from mdsmix import typed
from mdsmix.errors import Unreachable
from mdsmix.storage import Location

PLACE = ".mdsmix/lease"
BEAT_SECONDS = 5.0
STALE_BEATS = 4
LOOKS_A_BEAT = 5
TRIES = 100
"So often no other run takes and leaves a lease: something else lies in its place."
CONFLICTS = 10
"More writers than that at one moment there are not."
PAUSE_SECONDS = 2.0
"How long a writer waits, where conditions are not kept, for a write of the lease that may have crossed its own."
SLOW_SECONDS = 1.0
"The longest that such a write may take, so that it has arrived when another writer's pause is over."

# A fork in the middle of a beat would leave the child with the store client's locks held for ever.
_beating = threading.RLock()
os.register_at_fork(
    before=_beating.acquire, after_in_parent=_beating.release, after_in_child=_beating.release
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who writes: for people host, pid and since; for this module the rest."""

    host: str
    pid: int
    since: str
    machine: str
    "Where pids mean the same: the boot of a machine and a pid namespace."
    started: int
    "Start of the process in ticks: with the pid it names one process."
    token: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@dataclass(frozen=True, slots=True)
class Revision:
    """A file as it was read, with the stamp that a conditional write asks for; without stamp and content where there was none."""

    at: Location
    stamp: str | None = None
    content: bytes | None = None

    @classmethod
    def of(cls, at: Location) -> Revision:
        found = at.fetch()
        return cls(at, found[0].stamp, found[1]) if found else cls(at)

    def put(self, content: bytes, is_sure: bool = True) -> Revision | None:
        """Writes over this revision; None where another one, or none, lies there by now. `is_sure`: the store keeps conditions; else the
        write counts if it still stands when those that may have crossed it have come."""
        began = _now()
        written = self if self.content == content else self._put(content)
        if is_sure or not written:
            return written
        if (took := _now() - began) > SLOW_SECONDS:
            raise Unreachable(
                f"the store took {took:.1f} s to write {self.at}, and it keeps no conditions: a writer that slow cannot be kept "
                "apart from another; run the same command again when the store is faster."
            )
        await_others()
        return written if written.stands() else None

    def _put(self, content: bytes) -> Revision | None:
        """A write whose answer was lost is sent again, and then finds itself."""
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
        """Whether it lies there still."""
        return Revision.of(self.at).content == self.content


def await_others() -> None:
    """Waits until a write that crossed one's own has come."""
    time.sleep(PAUSE_SECONDS)


class Lease:
    """A lease that is held. A thread keeps it alive."""

    def __init__(self, holder: Holder, written: Revision, is_sure: bool, held_at: float) -> None:
        self._holder, self._at = holder, written.at
        self._written: Revision | None = written
        "None since another run took it over."
        self.is_sure = is_sure
        "Whether the store keeps conditions, so that no other write can have crossed this one."
        self._held_at = held_at
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._live, name="lease", daemon=True)
        self._heart.start()

    def confirm(self) -> None:
        """Unreachable where another run took the lease over: asked before anything is published."""
        if not self.is_held():
            raise Unreachable(
                f"{self._at.parent.parent} was taken over by another run, because this one ({self._holder}) stood "
                f"still for too long, or somebody deleted {self._at}; from here on it publishes and deletes nothing, "
                "finished work units are kept: run the same command again when no other is at work."
            )

    def is_held(self) -> bool:
        return self._beat(self.is_sure)

    def is_held_still(self) -> bool:
        """As `is_held`, but asks the store only where the lease may be lost by now: nobody can have taken it over within half
        the time that its counter must stand still. For deletions, which cannot be conditional."""
        return _now() - self._held_at < STALE_BEATS * BEAT_SECONDS / 2 or self.is_held()

    def delete(self, at: Location) -> None:
        """Deletes a file, unless the lease was lost: then it may be somebody else's by now."""
        if self.is_held_still():
            at.delete()

    def release(self) -> None:
        """Lets go. A store that does not answer is not waited for again: the lease grows stale there."""
        self._ended.set()
        self._heart.join(1)
        if not self._heart.is_alive():
            with suppress(Unreachable):
                if self._written and self._written.stands():
                    self._at.delete()

    def _live(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(Unreachable):  # the next beat may pass, and confirm() asks in earnest
                self._beat()

    def _beat(self, is_sure: bool = True) -> bool:
        with _beating:
            if self._written:
                began, self._holder = _now(), replace(self._holder, beat=self._holder.beat + 1)
                self._written = self._written.put(orjson.dumps(self._holder), is_sure)
                self._held_at = began if self._written else self._held_at
            return self._written is not None


_held: ContextVar[Mapping[str, Lease]] = ContextVar("held")


@contextmanager
def lease(folder: Location, say: Callable[[str], None]) -> Iterator[Lease]:
    """Holds the lease of the stream in `folder`; Unreachable says who else does. Who holds it may take it again."""
    held = _held.get({})
    if folder.url in held:
        yield held[folder.url]
        return
    mine = _take(folder / PLACE, say)
    before = _held.set({**held, folder.url: mine})
    try:
        yield mine
    finally:
        _held.reset(before)
        mine.release()


def _take(at: Location, say: Callable[[str], None]) -> Lease:
    me, is_sure = _myself(), at.keeps_conditions()
    if not is_sure:
        say(
            f"WARNING: the store of {at.parent.parent} keeps no conditions (If-Match, If-None-Match), so two runs that "
            "write one stream cannot be kept apart for certain; mdsmix waits and looks again before and after it publishes. "
            "See that no two are started at once."
        )
    for _ in range(TRIES):
        seen = Revision.of(at)
        if seen.content is not None and not _is_over(seen, say):
            break
        began = _now()
        if written := seen.put(orjson.dumps(me), is_sure):
            return Lease(me, written, is_sure, began)
        if not is_sure:
            break
    raise Unreachable(
        f"{at.parent.parent} is being written by {_holder_in(Revision.of(at)) or 'another run'}, and two at once would "
        "publish over each other; wait until it is done or end it, then run the same command again."
    )


def _is_over(seen: Revision, say: Callable[[str], None]) -> bool:
    """Whether the holder is gone: by its pid where that means something here, else by watching its heart."""
    holder = _holder_in(seen)
    if holder and holder.machine == _machine():
        return not _runs(holder)
    seconds = STALE_BEATS * BEAT_SECONDS
    say(
        f"{seen.at.parent.parent} is held by {holder or 'another run'}; watching for up to {seconds:.0f} s whether it lives"
    )
    for _ in range(STALE_BEATS * LOOKS_A_BEAT):  # looks: a store slow for us is slow for it too
        time.sleep(BEAT_SECONDS / LOOKS_A_BEAT)
        if (now := Revision.of(seen.at)) != seen:
            return now.content is None
    return True


def _holder_in(found: Revision) -> Holder | None:
    """None where it is not readable, which a write in progress may be."""
    with suppress(typed.Misfit):
        return typed.load(Holder, found.content or b"")
    return None


def _myself() -> Holder:
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        machine=_machine(),
        started=_start_of(os.getpid()) or 0,
        token=secrets.token_hex(8),
    )


def _now() -> float:
    """Seconds by a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _runs(holder: Holder) -> bool:
    try:
        with suppress(PermissionError):  # another user's
            os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return _start_of(holder.pid) in (holder.started, None)


def _start_of(pid: int) -> int | None:
    """When the process started, in ticks; -1 of one that ended and was not waited for; None where nothing tells."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if state in "ZX" else int(fields[18])
