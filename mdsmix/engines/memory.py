"""Memory is a cap: how much a run holds, and how many of its workers may go on.

What a worker needs depends on its records (one document of 20 MB costs 500 MB to tokenize, 8 MB of short ones 60), so it is
measured while it works. Ten times a second the memory of the run is added up, and only so many workers go on as would fit if
each took as much as the greediest has taken so far. Where the cap is tight, the first unit is done by one worker alone, because
a worker grows by its rows until its unit is finished.

What the machine and its control groups (version 2) allow is asked too: a container that may use four of 128 processors sees all 128; what
it may use stands in its control group and in every group above it. The least one holds.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mdsmix.encode.processor_server import processes
from mdsmix.errors import RecipeError

LEAST_BYTES = 256 << 20
"What one worker takes at least."
_GROUPS = Path("/sys/fs/cgroup")
_MEMBER = Path("/proc/self/cgroup")
WORKER_BYTES = 320 << 20
"What a worker is taken to need before any has worked: 250-440 MB were measured on short records."
AMPLE_BYTES = 1 << 30
"Where the cap has so much for each worker, all begin at once."
HEADROOM = 0.8
"The part of the cap that is given out: the rest is for workers that grow between two looks, and for larger documents to come."
LIFE_BYTES = 384 << 20
"""A worker that has grown by so much between two tasks gives back what it has freed, and ends if that is not enough. It takes its tokenizer's
memory of words with it: on 2 GB of text with 3.5 million different words two workers take 25 s of CPU and hold 1,092 MB at most; with 256 MiB
they take 27 s, 1,077 MB; with 512 MiB 24.5 s, 1,218 MB."""
PERIOD = 0.1
"Seconds between two looks."
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_of(text: str) -> int:
    """The size that `--memory` asks for; RecipeError where it is none, or too little."""
    size = size_of(text)
    if size is None:
        raise RecipeError(f"--memory {text} is no size: write for example 2GiB or 800MiB.")
    if size < LEAST_BYTES:
        raise RecipeError(
            f"--memory {text} is less than one worker takes: give it at least {LEAST_BYTES >> 20}MiB."
        )
    return size


def size_of(text: str) -> int | None:
    """`2GiB`, `2G` and `2147483648` are the same, 2GB is 2 * 10^9; None where it is none of these."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        return None
    number, unit, suffix = float(found[1]), found[2].upper(), (found[3] or "iB").lower()
    return int(number * (1000 if suffix == "b" else 1024) ** _POWERS[unit])


@dataclass(slots=True)
class MemoryBudget:
    """How much of `cap` is held, and how many workers may be at work within it; all in bytes."""

    cap: int
    aside: int = 0
    "What is kept free for processes that count the tokens of images, which are no workers."
    peak: int = 0
    "The most that all processes held together at a look (PSS: memory that several share counts once)."
    _worst: int = WORKER_BYTES
    "The most that one worker has taken."
    _is_known: bool = False
    "A unit is finished, so the need of a worker is known."
    _held: int = 0
    _next: float = field(default_factory=lambda: time.monotonic() + PERIOD)

    def look(self, pids: Sequence[int], at_once: bool = False) -> None:
        """Adds up the memory of these workers and of this process, at most ten times a second unless `at_once`: before a worker ends.
        It may take no more than a fiftieth of the time, since adding up a GB in small pages takes 40 ms."""
        began = time.monotonic()
        if began < self._next and not at_once:
            return
        others = sum(map(held, processes()))
        self.aside = max(self.aside, others)
        self._held = others + sum(map(held, [os.getpid(), *pids]))
        self.peak = max(self.peak, self._held)
        self._worst = max([self._worst, *map(most_own, pids)])
        now = time.monotonic()
        self._next = now + max(PERIOD, 50 * (now - began))

    def on_finished_unit(self, pids: Sequence[int], is_worn: bool) -> None:
        """The first finished unit shows what a worker takes: its rows have grown to their end. A worn worker is about to end."""
        self.look(pids, at_once=is_worn or not self._is_known)
        self._is_known = True

    def allowed_workers(self, workers: int) -> int:
        """How many of so many workers may be at work now, at least one."""
        if not self._is_known and self.cap - self.aside < workers * AMPLE_BYTES:
            return 1
        most = int(self.cap * HEADROOM)
        if self._held > most:
            return 1
        return max(1, min(workers, (most - self.aside - resident(os.getpid())) // self._worst))

    @property
    def holding(self) -> int:
        """A cap that this run would have kept, in whole MiB: a tenth more than its peak, as much as runs of one source differ."""
        return math.ceil(self.peak * 1.1 / (10 << 20)) * (10 << 20)

    def share(self, workers: int) -> int:
        """What each of so many workers may hold."""
        given = int(self.cap * HEADROOM)
        return max(given // 2, given - self.aside) // workers


def is_told() -> bool:
    """Whether this system tells what a process holds: macOS and some sandboxes do not."""
    return held(os.getpid()) > 0


def held(pid: int) -> int:
    """Proportional set size of a process, 0 where it cannot be told."""
    return _field(f"/proc/{pid}/smaps_rollup", "Pss:")


def resident(pid: int) -> int:
    """Resident set size of a process."""
    return _field(f"/proc/{pid}/status", "VmRSS:")


def most_own(pid: int) -> int:
    """The most that a process has held without mapped files, since all workers share the libraries."""
    return _field(f"/proc/{pid}/status", "VmHWM:") - _field(f"/proc/{pid}/status", "RssFile:")


def _field(path: str, name: str) -> int:
    """A field in kB of a file of /proc, in bytes."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:  # the process has ended, or this is no Linux
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)


def give_back() -> None:
    """Returns to the system what this process has freed; glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def keep_blocks() -> None:
    """Lets glibc keep blocks that are freed, until `give_back`: buffers of 8 MB, mapped and zeroed anew each time, cost 7 % of a conversion."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        mallopt(-3, 1 << 30) or mallopt(
            -3, 32 << 20
        )  # M_MMAP_THRESHOLD; glibc before 2.35 takes no more


def default_cap() -> int:
    """Half of what the control group or the machine has, in bytes."""
    limits = [_machine(), *(int(text) for text in _limits("memory.max") if text.isdigit())]
    return max(LEAST_BYTES, min(limits) // 2)


def cpu_count() -> int:
    """The processors that this process may keep busy: those it may run on, limited by its group's processor time."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [text.split() for text in _limits("cpu.max") if text[0].isdigit()]
    return max(1, min([own, *(math.ceil(int(quota) / int(period)) for quota, period in quotas)]))


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(name: str) -> list[str]:
    """What stands in the files of this name of the control group and of all above it. In a container the group's path may not be
    there; the root is."""
    group = _GROUPS / _group().lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(_GROUPS)]
    return [file.read_text().strip() for file in files if file.is_file()]


def _group() -> str:
    """The path of the group that this process is in; blank where nothing says it."""
    lines = _MEMBER.read_text().splitlines() if _MEMBER.is_file() else []
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
