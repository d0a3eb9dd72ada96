"""The states of a disk after a run was killed or the power failed, derived from the run's system
calls.

A killed run leaves everything that it did so far. A power failure takes back everything that was
not flushed. POSIX promises only what was flushed. So a file that was not flushed has any beginning
of the bytes written to it. In a folder that was not flushed, each name on its own exists, is gone,
or refers to the file that it referred to before. Journals (ext4, XFS) keep more of the order than
this, network file systems and others less.
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
    """The contents that a file may have on the disk, since it was last flushed; the newest last."""

    contents: list[bytes]

    def pick_content(self, rng: random.Random) -> bytes:
        """Return one of the contents, whole or cut in half."""
        content = rng.choice(self.contents)
        is_flushed = len(self.contents) == 1
        return content if is_flushed or rng.random() < 0.5 else content[: len(content) // 2]


FOLDER = File([])
Entry = File | None


class Platter:
    """The files that each name may refer to, since its folder was last flushed; the newest last."""

    def __init__(self, before: State) -> None:
        self.entries: dict[str, list[Entry]] = {
            name: [File([content])] for name, content in before.items()
        }

    def apply(self, call: Call, content: bytes, later_content: bytes) -> None:
        """Apply a system call.

        Args:
            content: of the file at this call.
            later_content: that will be written to a file that is opened.
        """
        match call.what:
            case "open":
                file = self._set_entry(call.name, self._newest(call.name) or File([b""]))
                file.contents.append(later_content)
            case "sync" if call.content:
                file = self._set_entry(call.name, self._newest(call.name) or File([]))
                file.contents[:] = [content]
            case "sync":
                for name, entries in self.entries.items():
                    if name and name.rpartition("/")[0] == call.name:
                        del entries[:-1]
            case "rename" | "link":
                file = self._newest(call.name) or File([content])
                if file.contents[-1] != content:
                    file.contents.append(content)
                self._set_entry(call.to, file)
                if call.what == "rename":
                    self._set_entry(call.name, None)
            case "mkdir":
                self._set_entry(call.name, FOLDER)
            case _:
                self._set_entry(call.name, None)

    def after_kill(self) -> dict[str, bytes]:
        """Return the files after a kill: the newest of everything."""
        newest = {name: entries[-1] for name, entries in self.entries.items()}
        return {
            name: file.contents[-1] for name, file in newest.items() if file and file is not FOLDER
        }

    def after_power_failure(self, rng: random.Random) -> dict[str, bytes]:
        """Return the files in one of the states that a power failure may leave."""
        # Either everything that was not flushed is lost, which is likely, or each name for itself.
        loses_all = rng.random() < 0.3
        chosen = dict[str, Entry]()
        for name, entries in self.entries.items():
            chosen[name] = entries[0] if loses_all else rng.choice(entries)
        contents = {
            file: file.pick_content(rng) for file in chosen.values() if file and file is not FOLDER
        }
        missing = {name for name, file in chosen.items() if file is None}
        return {
            name: contents[file]
            for name, file in chosen.items()
            if file in contents and missing.isdisjoint(map(str, PurePosixPath(name).parents))
        }

    def _newest(self, name: str) -> Entry:
        return self.entries.get(name, [None])[-1]

    def _set_entry(self, name: str, file: Entry) -> File:
        entries = self.entries.setdefault(name, [None])
        if entries[-1] is not file:
            entries.append(file)
        return file or FOLDER


class End(NamedTuple):
    """The files after a run that ended after this call."""

    call: Call
    state: State


class Ends(NamedTuple):
    """The states after all the ends of a run; no state is in both lists, or twice in one."""

    killed: list[End]
    power_failed: list[End]


def list_ends(disk: Disk, before: State, seed: int, cuts_per_call: int) -> Ends:
    """Return the states after a run that is killed after any of its calls, and those after up to
    `cuts_per_call` power failures after every call. Most calls change nothing that has a name.
    """
    calls = disk.calls
    rng = random.Random(seed)
    platter = Platter(before)
    killed = dict[frozenset[object], End]()
    power_failed = dict[frozenset[object], End]()
    for number, call in enumerate(calls):
        content = disk.content(call) if call.content else b""
        platter.apply(call, content, _find_later_content(disk, calls[number + 1 :], call))
        state = platter.after_kill()
        killed.setdefault(frozenset(state.items()), End(call, state))
        for _ in range(cuts_per_call):
            state = platter.after_power_failure(rng)
            power_failed.setdefault(frozenset(state.items()), End(call, state))
    only_power_failed = [end for key, end in power_failed.items() if key not in killed]
    return Ends([*killed.values()], only_power_failed)


def _find_later_content(disk: Disk, later_calls: Sequence[Call], call: Call) -> bytes:
    """Return the content that the opened file has at its next flush, rename or link."""
    if call.what != "open":
        return b""
    for later_call in later_calls:
        if later_call.name == call.name and later_call.content:
            return disk.content(later_call)
    return b""
