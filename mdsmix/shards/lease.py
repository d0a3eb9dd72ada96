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


Found = tuple[str, Holder | None]
"The stamp of the lease as it lay there, and its holder; none where it is not readable, which a write in progress may be."


class Lease:
    """A lease that is held. A thread keeps it alive."""

    def __init__(
        self, at: Location, holder: Holder, stamp: str, is_sure: bool, held_at: float
    ) -> None:
        self._at, self._holder, self._stamp = at, holder, stamp
        self.is_sure = is_sure
        "Whether the store keeps conditions, so that no other write can have crossed this one."
        self._is_lost = False
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
        is_held = self._beat()
        if is_held and not self.is_sure:
            await_others()
            return _is_by(self._holder, _look(self._at))
        return is_held

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
                if _is_by(self._holder, _look(self._at)):
                    self._at.delete()

    def _live(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(Unreachable):  # the next beat may pass, and confirm() asks in earnest
                self._beat()

    def _beat(self) -> bool:
        with _beating:
            if not self._is_lost:
                began, self._holder = _now(), replace(self._holder, beat=self._holder.beat + 1)
                if stamp := _put(self._at, self._holder, self._stamp):
                    self._stamp, self._held_at = stamp, began
                self._is_lost = not stamp
            return not self._is_lost


def await_others() -> None:
    """Where the store keeps no conditions: waits until a write that crossed one's own has come."""
    time.sleep(PAUSE_SECONDS)


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
        seen = _look(at)
        if seen and not _is_over(at, seen, say):
            raise _taken(at, seen)
        began = _now()
        stamp = _put(at, me, seen[0] if seen else None)
        if stamp:
            if not is_sure:
                _refuse_crossed(at, me, _now() - began)
            return Lease(at, me, stamp, is_sure, began)
    raise _taken(at, None)


def _taken(at: Location, seen: Found | None) -> Unreachable:
    return Unreachable(
        f"{at.parent.parent} is being written by {(seen and seen[1]) or 'another run'}, and two at once would "
        "publish over each other; wait until it is done or end it, then run the same command again."
    )


def _refuse_crossed(at: Location, me: Holder, took: float) -> None:
    """Without conditions the last that wrote holds the lease, if all that may have crossed have written."""
    if took > SLOW_SECONDS:
        raise Unreachable(
            f"the store took {took:.1f} s to write {at}, and it keeps no conditions: a writer that slow cannot be kept "
            "apart from another; run the same command again when the store is faster."
        )
    await_others()
    seen = _look(at)
    if not _is_by(me, seen):
        raise _taken(at, seen)


def _is_over(at: Location, seen: Found, say: Callable[[str], None]) -> bool:
    """Whether the holder is gone: by its pid where that means something here, else by watching its heart."""
    _, holder = seen
    if holder and holder.machine == _machine():
        return not _runs(holder)
    seconds = STALE_BEATS * BEAT_SECONDS
    say(
        f"{at.parent.parent} is held by {holder or 'another run'}; watching for up to {seconds:.0f} s whether it lives"
    )
    for _ in range(STALE_BEATS * LOOKS_A_BEAT):  # looks: a store slow for us is slow for it too
        time.sleep(BEAT_SECONDS / LOOKS_A_BEAT)
        if (now := _look(at)) != seen:
            return now is None
    return True


def _look(at: Location) -> Found | None:
    found = at.fetch()
    if found is None:
        return None
    stat, content = found
    with suppress(typed.Misfit):
        return stat.stamp, typed.load(Holder, content)
    return stat.stamp, None


def _put(at: Location, holder: Holder, stamp: str | None) -> str | None:
    """Writes the lease over the version with this stamp, or where none is; its new stamp, None where that is not so."""
    content = orjson.dumps(holder)
    stat = at.create(content) if stamp is None else at.replace(stamp, content)
    if stat:
        return stat.stamp
    # A request whose answer was lost is sent again, and then finds its own write.
    seen = _look(at)
    return seen[0] if seen and _is_by(holder, seen) else None


def _is_by(holder: Holder, seen: Found | None) -> bool:
    return bool(seen and seen[1] and seen[1].token == holder.token)


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
