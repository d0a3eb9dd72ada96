"""What a disk may hold after a run was killed, or the power failed, given its system calls: by the
book.

Who is killed leaves what it did so far. A power cut takes back what was not flushed.

POSIX promises what was flushed and nothing else. So a file that was not flushed holds any beginning
of what was written; and of a folder that was not, each name on its own is there, is gone, or means
what it meant before. Journals (ext4, XFS) keep more order than this, network file systems and
others less than them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from tests.recording import Call, Disk, State


@dataclass(eq=False)
class File:
    """What the platter may hold of a file since it was last flushed; the newest last."""

    held: list[bytes]

    def after(self, rng: random.Random) -> bytes:
        content = rng.choice(self.held)
        is_flushed = len(self.held) == 1
        return content if is_flushed or rng.random() < 0.5 else content[: len(content) // 2]


FOLDER = File([])
Entry = File | None


class Platter:
    """Each name with what it may mean since its folder was last flushed, the newest last."""

    def __init__(self, before: State) -> None:
        self.entries: dict[str, list[Entry]] = {n: [File([c])] for n, c in before.items()}

    def do(self, call: Call, content: bytes, coming: bytes) -> None:
        """`coming`: what will be written to a file that is opened."""
        match call.what:
            case "open":
                self._mean(call.name, self._newest(call.name) or File([b""])).held.append(coming)
            case "sync" if call.content:
                self._mean(call.name, self._newest(call.name) or File([])).held[:] = [content]
            case "sync":
                for name, entries in self.entries.items():
                    if name and name.rpartition("/")[0] == call.name:
                        del entries[:-1]
            case "rename" | "link":
                file = self._newest(call.name) or File([content])
                if file.held[-1] != content:
                    file.held.append(content)
                self._mean(call.to, file)
                if call.what == "rename":
                    self._mean(call.name, None)
            case "mkdir":
                self._mean(call.name, FOLDER)
            case _:
                self._mean(call.name, None)

    def now(self) -> dict[str, bytes]:
        """What whoever is not hit by a power cut finds."""
        found = ((name, entries[-1]) for name, entries in self.entries.items())
        return {name: file.held[-1] for name, file in found if file and file is not FOLDER}

    def after(self, rng: random.Random) -> dict[str, bytes]:
        """One of the states that a power cut may leave, now."""
        # All lost or each for itself: the first is the likely one.
        is_all = rng.random() < 0.3
        chosen = {n: e[0] if is_all else rng.choice(e) for n, e in self.entries.items()}
        contents = {f: f.after(rng) for f in chosen.values() if f and f is not FOLDER}
        lost = {name for name, file in chosen.items() if file is None}
        return {
            name: contents[file]
            for name, file in chosen.items()
            if file in contents and lost.isdisjoint(map(str, PurePosixPath(name).parents))
        }

    def _newest(self, name: str) -> Entry:
        return self.entries.get(name, [None])[-1]

    def _mean(self, name: str, file: Entry) -> File:
        entries = self.entries.setdefault(name, [None])
        if entries[-1] is not file:
            entries.append(file)
        return file or FOLDER


class Cut(NamedTuple):
    """What is left where a run ends behind this call."""

    call: Call
    state: State


def ends(disk: Disk, before: State, seed: int, each: int) -> tuple[list[Cut], list[Cut]]:
    """What is left of a run that is killed behind any of its calls, and, for up to `each` power
    cuts behind every call, what these leave. No state comes twice, since most calls change nothing
    that has a name.
    """
    calls, rng, platter = disk.calls, random.Random(seed), Platter(before)
    killed, cut = dict[frozenset[object], Cut](), dict[frozenset[object], Cut]()
    for number, call in enumerate(calls):
        content = disk.content(call) if call.content else b""
        platter.do(call, content, _coming(disk, calls[number + 1 :], call))
        left = platter.now()
        killed.setdefault(frozenset(left.items()), Cut(call, left))
        for left in [platter.after(rng) for _ in range(each)]:
            cut.setdefault(frozenset(left.items()), Cut(call, left))
    return [*killed.values()], [c for state, c in cut.items() if state not in killed]


def _coming(disk: Disk, calls: Sequence[Call], opened: Call) -> bytes:
    """What will be in the file that was opened, as far as the calls tell."""
    if opened.what != "open":
        return b""
    held = (call for call in calls if call.name == opened.name and call.content)
    return next((disk.content(call) for call in held), b"")
