"""What the machine and the control groups of this process allow: memory and processors.

A container that may use four of 128 processors sees all 128; what it may use stands in its control group, of version 2
(one folder) or of version 1 (a folder for each controller), and in every group above it. The least one holds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

LEAST_BYTES = 256 << 20
"What one worker takes at least."
SUPPOSED_BYTES = 8 << 30
"Assumed where a machine does not say how much memory it has."
_GROUPS = Path("/sys/fs/cgroup")
_MEMBER = Path("/proc/self/cgroup")


def default_cap() -> int:
    """Half of what the control group or the machine has, in bytes."""
    texts = [*_limits("", "memory.max"), *_limits("memory", "memory.limit_in_bytes")]
    limits = [_machine(), *(int(text) for text in texts if text.isdigit())]
    return max(LEAST_BYTES, min(limits) // 2)


def cpu_count() -> int:
    """The processors that this process may keep busy: those it may run on, limited by its group's processor time."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *map(math.ceil, _quotas())]))


def _quotas() -> Iterator[float]:
    """Each group's processor time over the time in which it may use it."""
    quotas, periods = _limits("cpu", "cpu.cfs_quota_us"), _limits("cpu", "cpu.cfs_period_us")
    for text in [*_limits("", "cpu.max"), *map("{} {}".format, quotas, periods)]:
        quota, _, period = text.partition(" ")
        if quota.isdigit():
            yield int(quota) / int(period)


def _machine() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return SUPPOSED_BYTES


def _limits(controller: str, name: str) -> list[str]:
    """What stands in the files of this name of the group and of all above it; `controller`: blank for version 2.

    In a container the group's path may not be there; the root is.
    """
    root = _GROUPS / controller
    group = root / _group(controller).lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return [file.read_text().strip() for file in files if file.is_file()]


def _group(controller: str) -> str:
    """The path of the group that this process is in; "/" where nothing says it."""
    try:
        lines = [line.split(":", 2) for line in _MEMBER.read_text().splitlines()]
    except OSError:
        return "/"
    return next((path for _, names, path in lines if controller in names.split(",")), "/")
