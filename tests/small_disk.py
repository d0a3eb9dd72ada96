"""A disk that is full or read-only, for real: a small tmpfs in a mount namespace of its own, where
the machine allows one.

Where it does not (no root, no user namespaces) the kernel's other means stand in: a limit on the
size of files, and folders without the right to write.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.alarm import WAIT_SECONDS

_NEWNS, _NEWUSER = 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _PRIVATE = 1, 32, (1 << 18) | 16384
_LIBC: Any = ctypes.CDLL(None, use_errno=True)


def run_in_process(work: Callable[[], None]) -> None:
    """Runs `work` in a forked process, which takes its mounts and its limits with it. Where it
    fails, stderr says how.
    """
    process: Any = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(WAIT_SECONDS)
    assert process.exitcode == 0


class SmallDisk:
    """`folder` on a disk of so many bytes. Only for a process of its own."""

    def __init__(self, folder: Path, size: int, *, mounted: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.is_mounted = mounted and _has_own_mounts() and self._mount(0, size)
        if not self.is_mounted:
            _limit(size)

    def grow(self) -> None:
        """Room for all."""
        if self.is_mounted:
            assert self._mount(_REMOUNT, 64 << 20)
        else:
            _limit(64 << 20)

    def refuse_writes(self) -> None:
        if self.is_mounted:
            assert self._mount(_REMOUNT | _READ_ONLY, 64 << 20)
            return
        for folder, _, _ in os.walk(self._folder):
            os.chmod(folder, 0o500)

    def _mount(self, flags: int, size: int) -> bool:
        settings = f"size={size}".encode()
        where = os.fsencode(self._folder)
        return bool(_LIBC.mount(b"tmpfs", where, b"tmpfs", flags, settings) == 0)


def _has_own_mounts() -> bool:
    ids = os.getuid(), os.getgid()
    if _LIBC.unshare(_NEWNS | (_NEWUSER if ids[0] else 0)):
        return False
    if ids[0]:
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), ids, strict=True):
            Path(f"/proc/self/{name}").write_text(f"0 {number} 1")
    return bool(_LIBC.mount(b"none", b"/", None, _PRIVATE, None) == 0)


def _limit(size: int) -> None:
    limit = resource.RLIMIT_FSIZE
    resource.setrlimit(limit, (size, resource.getrlimit(limit)[1]))
