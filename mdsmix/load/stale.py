"""Shared memory that a killed run left behind, removed where it could stand in the way.

Streaming notes the cache folders in use in shared memory, which survives SIGKILL, and may then refuse the next run with
"Reused local directory" (it does not where lock files of the dead run still mark that memory as taken). Its own remedy, clean_stale_shared_memory, removes the memory of every run on the machine,
living ones included. Here only memory goes that names one of our folders and that no process maps any more. That can be
told on Linux alone, and only for processes that share this machine's /proc.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from streaming.base.constant import LOCALS, SHM_TO_CLEAN
from streaming.base.shared.prefix import _unpack_locals

MEMORY = Path("/dev/shm")


def drop_stale_memory(folders: Iterable[str]) -> int:
    """Removes what dead runs hold of these (absolute) cache folders; returns how many runs that were."""
    ours = set(folders)
    stale = [m for m in MEMORY.glob(f"*_{LOCALS}") if ours & _noted(m) and not _is_mapped(m)]
    for memory in stale:
        prefix = memory.name.removesuffix(LOCALS)
        # The note goes last: other ranks look for it to see whether the way is free.
        for name in sorted(SHM_TO_CLEAN, key=lambda name: name == LOCALS):
            (MEMORY / f"{prefix}{name}").unlink(missing_ok=True)
    return len(stale)


def _noted(memory: Path) -> set[str]:
    """The folders that a run noted."""
    try:
        return set(_unpack_locals(memory.read_bytes())[0])
    except (OSError, ValueError, IndexError):
        return set()


def _is_mapped(memory: Path) -> bool:
    """Whether a process has it in its address space. Those of other users cannot be read, nor can they map ours."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(memory) in maps.read_text(errors="replace"):
                return True
        except OSError:
            continue
    return False
