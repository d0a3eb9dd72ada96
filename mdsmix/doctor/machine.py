"""This machine: the packages that are installed, memory and processors, the folders that are written on every run; and how a diagnosis reads."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement

from mdsmix import __version__
from mdsmix.encode.pretrained import cache_folder, keep_in_cache
from mdsmix.engines.memory import WORKER_BYTES, cpu_count, default_cap, is_told
from mdsmix.errors import MdsmixError
from mdsmix.words import plural

SHOWN = ("mosaicml-streaming", "torch", "transformers", "tokenizers", "boto3")
SHARED_MEMORY = "/dev/shm"
LEAST_SHARED = 256 << 20
"A container has 64 MB where nothing is said: DataLoader workers hand their batches over there, and die of a bus error."
State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing that a run needs."""

    what: str
    "`versions`, `memory`, `source web`, `target`, ..."
    state: State
    "A problem ends a run; a warning may."
    said: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"{self.state:<8} {self.what}: {self.said}{fix}"


def ok(what: str, said: str) -> Diagnosis:
    return Diagnosis(what=what, state="ok", said=said)


def warning(what: str, said: str, fix: str) -> Diagnosis:
    return Diagnosis(what=what, state="warning", said=said, fix=fix)


def problem(what: str, said: str, fix: str = "") -> Diagnosis:
    """`fix` is blank where the sentence already says what to do, as those of errors do."""
    return Diagnosis(what=what, state="problem", said=said, fix=fix)


def machine() -> Iterator[Diagnosis]:
    """Versions, memory, shared memory, the cache."""
    yield from versions()
    yield memory()
    yield from shared_memory()
    yield cache()


def versions() -> Iterator[Diagnosis]:
    """What is installed, and each package that mdsmix would not have been installed with."""
    shown = ", ".join(f"{name} {_installed(name) or 'missing'}" for name in SHOWN)
    yield ok("versions", f"mdsmix {__version__}, Python {platform.python_version()}, {shown}")
    for text in metadata.requires("mdsmix") or ():
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _installed(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            there = f"{found} is installed" if found else "it is missing"
            said = f"mdsmix wants {wanted.name}{wanted.specifier}, and {there}"
            yield problem("versions", said, f"pip install '{wanted.name}{wanted.specifier}'")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def memory() -> Diagnosis:
    """What a run takes where no --memory is given, and whether all its workers fit into that."""
    cap, workers = default_cap(), cpu_count()
    said = f"{cap / (1 << 30):.1f} GiB for {plural(workers, 'worker')} (half of what the machine or its control group has)"
    if not is_told():
        why = "this system does not tell what a process holds, so --memory cannot be kept"
        return warning("memory", f"{said}; {why}", "run fewer --workers, or on Linux")
    fit = max(1, cap // WORKER_BYTES)
    if fit < workers:
        return warning(
            "memory",
            f"{said}, of which {fit} at a time fit",
            "give the machine or container more, or name fewer --workers",
        )
    return ok("memory", said)


def shared_memory() -> Iterator[Diagnosis]:
    """Loading with workers wants it; converting does not."""
    if not os.path.isdir(SHARED_MEMORY):
        return
    size = shutil.disk_usage(SHARED_MEMORY).total
    said = f"{SHARED_MEMORY} has {size / (1 << 20):,.0f} MiB"
    if size < LEAST_SHARED:
        yield warning(
            "shared memory",
            f"{said}, where DataLoader workers hand over their batches: loading may die of a bus error",
            "start the container with --shm-size=8g, or --ipc=host",
        )
    else:
        yield ok("shared memory", said)


def cache() -> Diagnosis:
    """The folder of tokenizer snapshots and of source hashes. Without it each run is slower, and loses nothing."""
    trial = cache_folder() / f"doctor-{secrets.token_hex(8)}"
    try:
        keep_in_cache(trial, b"")
        trial.unlink()
    except (MdsmixError, OSError) as error:
        said = f"it cannot be written, so each run looks at sources anew ({error})"
        return warning("cache", said, "set MDSMIX_CACHE to a folder of yours")
    return ok("cache", str(cache_folder()))
