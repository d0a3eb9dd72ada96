"""The cap on a run's memory: how much the run holds, and how many of its workers may go on. Also
the processors that it may use.

A worker's need depends on its records (one document of 20 MB costs 500 MB to tokenize, 8 MB of
short ones 60 MB), so its memory is measured while it works. Ten times a second the memory of the
run is added up. So many workers go on as would fit if each took as much as the greediest has taken
so far. Where the cap is tight, one worker alone does the first unit, because a worker grows by its
rows until its unit is finished.

Limits of memory and processors are also read from the control groups (version 2): a container that
may use four of 128 processors sees all
128. Its limits stand in its control group and in every group above, and the least one holds.
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

from mdsmix.errors import RecipeError
from mdsmix.processor.server import server_pids

LEAST_BYTES = 256 << 20
"The memory that one worker takes at least."
_GROUPS = Path("/sys/fs/cgroup")
_MEMBER = Path("/proc/self/cgroup")
WORKER_BYTES = 320 << 20
"The assumed need of a worker before any has worked: 250-440 MB were measured on short records."
AMPLE_BYTES = 1 << 30
"Where the cap holds so many bytes for each worker, all workers begin at once."
HEADROOM = 0.8
"""The part of the cap that workers may fill. The rest is for workers that grow between two looks,
and for larger documents to come.
"""
LIFE_BYTES = 336 << 20
"""A worker that has grown by so much since it started returns freed memory to the system after a
task, and ends if that is not enough: its tokenizer's cache of words grows. On 530 MB of documents
of 100 bytes, in blocks of 8 MB, two workers held 1,122 MB at most, with a limit of 288 MiB 961 MB,
with 384 MiB 1,267 MB. On 2 GB of text with 3.5 million different words 288 MiB cost a tenth of CPU
time, 336 none.
"""
PERIOD = 0.1
"Seconds between two looks."
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_memory_option(text: str) -> int:
    """The bytes that `--memory TEXT` means; RecipeError where the text is no size, or less than
    LEAST_BYTES.
    """
    size = parse_size(text)
    if size is None:
        raise RecipeError(f"--memory {text} is no size: write for example 2GiB or 800MiB.")
    if size < LEAST_BYTES:
        raise RecipeError(
            f"--memory {text} is less than one worker takes: give it at least {LEAST_BYTES >> 20}MiB."
        )
    return size


def parse_size(text: str) -> int | None:
    """The bytes that a text means; None where it is no size. `2GiB`, `2G` and `2147483648` are the
    same; `2GB` is 2 * 10^9.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        return None
    number, unit, suffix = float(found[1]), found[2].upper(), (found[3] or "iB").lower()
    return int(number * (1000 if suffix == "b" else 1024) ** _POWERS[unit])


@dataclass(slots=True)
class MemoryBudget:
    """How much of `cap` a run holds, and how many workers may be at work within it; all in
    bytes.
    """

    cap: int
    aside: int = 0
    "Bytes that are kept free for processes that count the tokens of images, which are no workers."
    peak: int = 0
    """The most that all processes held together at a look (PSS: memory that several share counts
    once).
    """
    _worst: int = WORKER_BYTES
    "The most that one worker has held, WORKER_BYTES at least."
    _is_known: bool = False
    "A unit is finished, so the need of a worker is known."
    _held: int = 0
    "The bytes that all processes held together at the last look (PSS)."
    _next: float = field(default_factory=lambda: time.monotonic() + PERIOD)

    def look(self, pids: Sequence[int], at_once: bool = False) -> None:
        """Adds up the memory of the workers `pids`, of this process and of those that count tokens
        of images.

        At most ten times a second, and less often where a look is slow (40 ms for a GB in small
        pages): looks take at most a fiftieth of the time. `at_once`: looks in any case, as before a
        worker ends.
        """
        began = time.monotonic()
        if began < self._next and not at_once:
            return
        others = sum(map(measure_pss, server_pids()))
        self.aside = max(self.aside, others)
        self._held = others + sum(map(measure_pss, [os.getpid(), *pids]))
        self.peak = max(self.peak, self._held)
        self._worst = max([self._worst, *map(measure_peak_private, pids)])
        now = time.monotonic()
        self._next = now + max(PERIOD, 50 * (now - began))

    def on_finished_unit(self, pids: Sequence[int], is_worn: bool) -> None:
        """Notes that a unit is finished. The first one shows how much a worker takes, since its
        rows have grown to their end. `is_worn`: the worker is about to end, so its memory is added
        up now.
        """
        self.look(pids, at_once=is_worn or not self._is_known)
        self._is_known = True

    def allowed_workers(self, workers: int) -> int:
        """How many of `workers` workers may be at work now; at least one."""
        if not self._is_known and self.cap - self.aside < workers * AMPLE_BYTES:
            return 1
        most = int(self.cap * HEADROOM)
        if self._held > most:
            return 1
        return max(1, min(workers, (most - self.aside - measure_rss(os.getpid())) // self._worst))

    @property
    def holding(self) -> int:
        """A cap in bytes, a multiple of 10 MiB, that this run would keep: its peak and a tenth, by
        which runs of one source differ.
        """
        return math.ceil(self.peak * 1.1 / (10 << 20)) * (10 << 20)

    def share(self, workers: int) -> int:
        """The bytes that each of `workers` workers may hold."""
        given = int(self.cap * HEADROOM)
        return max(given // 2, given - self.aside) // workers


def can_measure_memory() -> bool:
    """Whether this system tells how much memory a process holds; macOS and some sandboxes
    do not.
    """
    return measure_pss(os.getpid()) > 0


def measure_pss(pid: int) -> int:
    """The proportional set size (PSS) of a process in bytes; 0 where /proc does not tell."""
    return _field(f"/proc/{pid}/smaps_rollup", "Pss:")


def measure_rss(pid: int) -> int:
    """The resident set size of a process in bytes; 0 where /proc does not tell."""
    return _field(f"/proc/{pid}/status", "VmRSS:")


def measure_peak_private(pid: int) -> int:
    """The most bytes that a process has held, less its mapped files: those are libraries, which all
    workers share.
    """
    return _field(f"/proc/{pid}/status", "VmHWM:") - _field(f"/proc/{pid}/status", "RssFile:")


def _field(path: str, name: str) -> int:
    """The bytes of a field, such as `Pss:`, that a file of /proc gives in kB; 0 where it is not
    there.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:  # the process has ended, or this is no Linux
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)


def release_freed_memory() -> None:
    """Returns the freed memory of this process to the system; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def keep_freed_blocks() -> None:
    """Lets glibc keep freed blocks until `give_back`. Otherwise buffers of 8 MB are mapped and
    zeroed each time: 7 % of a conversion.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        # M_MMAP_THRESHOLD; glibc before 2.35 takes no more than 32 MiB.
        mallopt(-3, 1 << 30) or mallopt(-3, 32 << 20)


def choose_memory_cap() -> int:
    """Half of the memory of the control group or the machine, whichever is less, in bytes;
    LEAST_BYTES at least.
    """
    return max(
        LEAST_BYTES,
        min([_machine(), *(int(text) for text in _limits("memory.max") if text.isdigit())]) // 2,
    )


def count_cpus() -> int:
    """How many processors this process may keep busy: as many as it may run on, or fewer by the
    processor time of its control groups.
    """
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [text.split() for text in _limits("cpu.max") if text[0].isdigit()]
    return max(1, min([own, *(math.ceil(int(quota) / int(period)) for quota, period in quotas)]))


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(name: str) -> list[str]:
    """The contents of the file `name` in the control group of this process and in all groups above.
    In a container the group's folder may be missing; that of the root is there.
    """
    group = _GROUPS / _group().lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(_GROUPS)]
    return [file.read_text().strip() for file in files if file.is_file()]


def _group() -> str:
    """The path of this process's control group (version 2); "" where there is none."""
    lines = _MEMBER.read_text().splitlines() if _MEMBER.is_file() else []
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
