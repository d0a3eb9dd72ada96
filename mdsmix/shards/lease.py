"""One writer of a stream at a time: the object `.mdsmix/lease` names the run that writes, and holds while its counter rises.

No clock is compared with another. The holder raises a counter in the object every five seconds. A run that finds a lease watches
it, and takes it over only after the counter has stood still for four beats of its own clock. Every write is conditional on what was
read. So of two runs that take over, one wins; and a holder that was stopped for a minute learns before it publishes that it lost.
The writes that publish are conditional too (revisions.py), since the holder may be stopped again right after it has asked.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import orjson

from mdsmix import typed
from mdsmix.errors import Unreachable
from mdsmix.storage import Location

PLACE = ".mdsmix/lease"
BEAT_SECONDS = 5.0
STALE_BEATS = 4
LOOKS_A_BEAT = 5
TRIES = 100
"Attempts to take a lease. Other runs do not take and leave it so often, so after them something else lies in its place."
CONFLICTS = 10
"Attempts at a conditional write: no more runs than that write at one moment."

# A fork in the middle of a beat would leave the child with the store client's locks held for ever.
_beating = threading.RLock()
os.register_at_fork(
    before=_beating.acquire, after_in_parent=_beating.release, after_in_child=_beating.release
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """A file as it was read, with the stamp that a conditional write asks for; stamp and content are None where there was no file."""

    at: Location
    stamp: str | None = None
    content: bytes | None = None

    @classmethod
    def of(cls, at: Location) -> Revision:
        found = at.fetch()
        return cls(at, found[0].stamp, found[1]) if found else cls(at)

    def put(self, content: bytes) -> Revision | None:
        """Replaces this revision; None where another revision, or no file, lies there by now. A write whose answer was lost is sent again
        and then finds its own content."""
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
        """Raises Unreachable where another run took the lease over. Called before anything is published."""
        if not self.is_held():
            raise Unreachable(
                f"{self._at.parent.parent} was taken over by another run, because this one ({self._holder}) stood "
                f"still for too long, or somebody deleted {self._at}; from here on it publishes and deletes nothing, "
                "finished work units are kept: run the same command again when no other is at work."
            )

    def is_held(self) -> bool:
        """Whether this run holds the lease: writes the next beat, which only the holder can."""
        with _beating:
            if self._written:
                began, self._holder = _now(), replace(self._holder, beat=self._holder.beat + 1)
                self._written = self._written.put(orjson.dumps(self._holder))
                self._held_at = began if self._written else self._held_at
            return self._written is not None

    def is_held_still(self) -> bool:
        """As `is_held`, but asks the store only when the last beat is older than 10 s: nobody takes a lease over before its counter
        has stood still for 20 s. For deletions, which cannot be conditional."""
        return _now() - self._held_at < STALE_BEATS * BEAT_SECONDS / 2 or self.is_held()

    def delete(self, at: Location) -> None:
        """Deletes a file, unless the lease was lost: then the file may be another run's by now."""
        if self.is_held_still():
            at.delete()

    def release(self) -> None:
        """Gives the lease up. Where the store does not answer, the lease is left there and grows stale."""
        self._ended.set()
        self._heart.join(1)
        if not self._heart.is_alive():
            with suppress(Unreachable):
                if self._written and self._written.stands():
                    self._at.delete()

    def _live(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(Unreachable):  # the next beat may pass, and confirm() asks in earnest
                self.is_held()


@contextmanager
def lease(folder: Location, say: Callable[[str], None]) -> Iterator[Lease]:
    """Holds the lease of the stream in `folder`; Unreachable says who else does."""
    mine = _take(folder / PLACE, say)
    try:
        yield mine
    finally:
        mine.release()


def _take(at: Location, say: Callable[[str], None]) -> Lease:
    me = _myself()
    if not at.keeps_conditions():
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


def _is_over(seen: Revision, say: Callable[[str], None]) -> bool:
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
    """The holder that the lease names; None where it cannot be read, as in the middle of a write."""
    with suppress(typed.Misfit):
        return typed.load(Holder, found.content or b"")
    return None


def _myself() -> Holder:
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        token=secrets.token_hex(8),
    )


def _now() -> float:
    """Seconds by a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
