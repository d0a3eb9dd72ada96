"""Tells the C library glibc what to do with memory that this process has freed."""

from __future__ import annotations

import ctypes


def release_freed_memory() -> None:
    """Return the freed memory of this process to the system; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def keep_freed_blocks() -> None:
    """Let glibc keep freed blocks until `release_freed_memory`. Otherwise buffers of 8 MB are
    mapped and zeroed each time: 7 % of a conversion.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        # M_MMAP_THRESHOLD: glibc before 2.35 refuses more than 32 MiB, and returns 0.
        if not mallopt(-3, 1 << 30):
            mallopt(-3, 32 << 20)
