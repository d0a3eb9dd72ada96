"""A disk that really is full or read-only: a small tmpfs in a mount namespace of its own, if the
machine allows one.

Otherwise (no root, no user namespaces) it uses a limit on the size of files, and folders without
the permission to write.
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
    """Run `work` in a forked process, whose mounts and limits end with it. If it fails, stderr
    shows how.
    """
    process: Any = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(WAIT_SECONDS)
    assert process.exitcode == 0


class SmallDisk:
    """`folder` on a disk of `size` bytes. Only for a process of its own (`run_in_process`)."""

    def __init__(self, folder: Path, size: int, *, mounted: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.is_mounted = mounted and _enter_mount_namespace() and self._mount(0, size)
        if not self.is_mounted:
            _limit(size)

    def grow(self) -> None:
        """Give the disk enough space for everything."""
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
        folder = os.fsencode(self._folder)
        return bool(_LIBC.mount(b"tmpfs", folder, b"tmpfs", flags, settings) == 0)


def _enter_mount_namespace() -> bool:
    """Move this process to a mount namespace of its own. Return whether that is allowed."""
    user = os.getuid()
    group = os.getgid()
    is_root = user == 0
    if _LIBC.unshare(_NEWNS if is_root else _NEWNS | _NEWUSER):
        return False
    if not is_root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return bool(_LIBC.mount(b"none", b"/", None, _PRIVATE, None) == 0)


def _limit(size: int) -> None:
    limit = resource.RLIMIT_FSIZE
    resource.setrlimit(limit, (size, resource.getrlimit(limit)[1]))
