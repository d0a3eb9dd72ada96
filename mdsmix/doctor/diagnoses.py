"""Diagnoses the environment of a recipe's run: machine, tokenizer, stores, sources, target. A run
would fail on them in this order.

Everything that a run does at the target (list, write, read, copy, delete) is tried once, with a
small file that is deleted again.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mdsmix import __version__, sources
from mdsmix.conversion.job import make_job
from mdsmix.conversion.publish_pretrained import refuse_unproved_processor
from mdsmix.engines.memory import WORKER_BYTES, choose_memory_cap, count_cpus
from mdsmix.errors import Denied, MdsmixError
from mdsmix.frozen import frozen
from mdsmix.messages import plural
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.storage import Location, find_store, import_stores, locate
from mdsmix.table import format_size
from mdsmix.tokenizer.card import open_tokenizer
from mdsmix.tokenizer.opening import WITHOUT_FRAMEWORKS

PACKAGES = ("mosaicml-streaming", "torch", "transformers", "tokenizers", "boto3")
"Packages whose versions are shown."
IMPORT_TRANSFORMERS = """
try:
    import transformers
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
"A program that prints why transformers cannot be imported; nothing if it can."
TRIAL = b"A trial of mdsmix doctor, which deletes it again."
MOST_SKEW = 300
"""The most seconds between this machine's clock and the target's. A store refuses requests that
were signed by a clock 15 minutes off.
"""
FIRST_BYTES = 1 << 10
"Bytes of a source that are read."


@frozen
class Diagnosis:
    """The state of one thing that a run needs."""

    what: str
    "The thing: `versions`, `memory`, `source of web`, `target s3://bucket/mix`, ..."
    state: Literal["ok", "warning", "problem"]
    "With a problem a run fails; with a warning it may fail."
    message: str
    "A sentence on the state. If the state is not ok, it says what to do."

    def __str__(self) -> str:
        return f"{self.state:<8} {self.what}: {self.message}"

    def to_json(self) -> dict[str, str]:
        """Return the diagnosis as `--json` prints it."""
        return {"what": self.what, "state": self.state, "said": self.message}


Diagnoses = Generator[Diagnosis, None, None]


class Operation(NamedTuple):
    """Something that a run does at a location, such as reading a file."""

    name: str
    "A key of `Location.permissions`, such as `read`."
    run: Callable[[], Any]
    "Tries the operation. Raises MdsmixError if it fails."


def diagnose(recipe: Recipe) -> Diagnoses:
    """Yield a Diagnosis for each thing that a run needs, as soon as it is known. Files that are
    written are deleted again.
    """
    # The machine, then the tokenizer.
    yield diagnose_versions()
    yield diagnose_memory()
    yield from _diagnose_tokenizer(recipe)

    # The stores that need credentials.
    streams = [stream for stream in recipe.streams.values() if not stream.held_out_of]
    # The addresses that the run uses: the target, and each stream's source, or the stream itself.
    addresses = [recipe.remote]
    for stream in streams:
        addresses += stream.source.path if stream.source else [stream.remote]
    used_stores = {find_store(str(address)) for address in addresses}
    for store in import_stores():
        if store in used_stores and store.needs_credentials:
            yield try_to_describe("store", store.describe_access)

    # Each stream's source, or the stream itself if it has none; then the target.
    source_bytes = 0
    for stream in streams:
        if stream.source:
            # This yields the diagnoses, and returns the bytes of the source's files.
            source_bytes += yield from _diagnose_source(recipe, stream)
        else:
            folder = locate(recipe.published(stream))
            yield try_to_describe(f"stream {stream.name}", partial(_describe_folder, folder))
    if recipe.sourced:
        yield from _diagnose_target(locate(str(recipe.remote or recipe.local)), source_bytes)


def try_to_describe(what: str, describe: Callable[[], str]) -> Diagnosis:
    """Return a Diagnosis with the sentence that `describe` returns: ok. If it raises MdsmixError,
    return a problem with the error's message.
    """
    try:
        return Diagnosis(what, "ok", describe())
    except MdsmixError as error:
        return Diagnosis(what, "problem", str(error))


def warn_if(has_flaw: bool, what: str, message: str, flaw: str) -> Diagnosis:
    """Return a warning with `message` and `flaw` if `has_flaw` is true. Otherwise return an ok with
    `message` alone.

    Args:
        flaw: what is wrong, and what to do.
    """
    if has_flaw:
        return Diagnosis(what, "warning", f"{message}; {flaw}")
    return Diagnosis(what, "ok", message)


def try_operations(
    what: str, message: str, location: Location, *operations: Operation
) -> Diagnoses:
    """Try operations one after the other. Yield a problem for each operation that fails, or an ok
    with `message` if all succeed.

    A failure other than a missing permission ends the trials, since later operations would fail for
    the same reason.

    Args:
        what: the subject of the diagnoses.
        location: where the operations are tried. It knows which permission an operation needs.
    """
    is_ok = True
    for operation in operations:
        name = operation.name
        try:
            operation.run()
        except Denied as error:
            is_ok = False
            permission = location.permissions.get(name, name)
            yield Diagnosis(what, "problem", f"may not {name} ({permission}): {error}")
        except MdsmixError as error:
            # A disk's messages begin with `cannot write ...`, those of stores with the URL.
            message = str(error)
            if not message.startswith("cannot "):
                message = f"cannot {name}: {message}"
            yield Diagnosis(what, "problem", message)
            return
    if is_ok:
        yield Diagnosis(what, "ok", message)


def diagnose_versions() -> Diagnosis:
    """Return the versions of mdsmix, Python and PACKAGES: a problem if transformers refuses one of
    the installed packages. Other versions that do not fit together are found by `pip check`.
    """
    packages = ", ".join(f"{name} {_find_version(name) or 'missing'}" for name in PACKAGES)
    python = platform.python_version()
    message = f"mdsmix {__version__}, Python {python}, {packages}"
    # A tokenizer that was described before opens without transformers, so import it here. Another
    # process does that, since transformers would stay in this one.
    imported = subprocess.run(
        [sys.executable, "-c", IMPORT_TRANSFORMERS],
        env=os.environ | WITHOUT_FRAMEWORKS,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    reason = imported.stdout.strip().partition("\n")[0]
    if not imported.returncode and not reason:
        return Diagnosis("versions", "ok", message)
    if not reason:
        reason = f"its import ended with the exit code {imported.returncode}"
    return Diagnosis(
        "versions",
        "problem",
        f"{message}; transformers does not run with the installed packages "
        f"({reason.rstrip('.')}): install the package or version that it requires",
    )


def _find_version(name: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def diagnose_memory() -> Diagnosis:
    """Compare the memory that a run may use, if --memory is not set, with the memory that all its
    workers need.
    """
    cap = choose_memory_cap()
    workers = count_cpus()
    message = (
        f"{cap / (1 << 30):.1f} GiB for {plural(workers, 'worker')} (half of what the machine or "
        "its control group has)"
    )
    flaw = (
        f"this is enough for only {max(1, cap // WORKER_BYTES)} at a time: give the machine or "
        "container more memory, or set fewer --workers"
    )
    return warn_if(cap < workers * WORKER_BYTES, "memory", message, flaw)


def _diagnose_tokenizer(recipe: Recipe) -> Diagnoses:
    """Yield whether the tokenizer can be opened, and its warnings."""
    try:
        tokenizer = open_tokenizer(recipe.tokenizer)
    except MdsmixError as error:
        yield Diagnosis("tokenizer", "problem", str(error))
        return
    message = f"{tokenizer.name}: {tokenizer.class_name}, ids below {tokenizer.vocab_size:,}"
    yield Diagnosis("tokenizer", "ok", message)
    for warning in tokenizer.warnings:
        yield Diagnosis("tokenizer", "warning", warning)


def _describe_folder(folder: Location) -> str:
    """Describe the folder of a stream without a source. Raises MdsmixError if it is empty or
    missing.
    """
    if not any(chain(*folder.entries())):
        raise MdsmixError(
            f"{folder} is empty or does not exist; correct remote or local in the recipe, or "
            "publish the stream first"
        )
    return f"{folder} can be listed"


def _diagnose_source(recipe: Recipe, stream: StreamSpec) -> Generator[Diagnosis, None, int]:
    """Yield whether a stream's source has files, and whether the first file can be read. For a
    stream of images, also yield whether the processor gives the same rows as the loader.

    Return the bytes of all files; 0 if there are none.
    """
    what = f"source of {stream.name}"
    source = stream.source
    assert source
    try:
        files = sources.find_files(source.path, recipe.folder, sources.ReadAs.of(source))
    except MdsmixError as error:
        yield Diagnosis(what, "problem", str(error))
        return 0
    first_file = files[0]
    size = sum(file.stat.size for file in files)
    message = (
        f"{plural(len(files), 'file')}, {plural(size, 'byte')}; the first, {first_file.name}, can "
        "be read"
    )
    read = Operation("read", partial(first_file.location.read, 0, FIRST_BYTES))
    yield from try_operations(what, message, first_file.location, read)
    if stream.has_images and recipe.processor:
        compare = partial(_compare_processor, recipe, stream, files)
        yield try_to_describe(f"processor of {stream.name}", compare)
    return size


def _compare_processor(recipe: Recipe, stream: StreamSpec, files: list[sources.SourceFile]) -> str:
    """Compare the processor's rows with the loader's. Return a sentence if they are equal.

    Raises MdsmixError if they differ.
    """
    job = make_job(recipe, stream, open_tokenizer(recipe.tokenizer), None)
    refuse_unproved_processor(job, files)
    return f"whole conversations, put through {recipe.processor}, give the same rows as the loader"


def _diagnose_target(target: Location, source_bytes: int) -> Diagnoses:
    """Yield whether a run can publish at the target (list, write, read, copy, delete, conditional
    write), whether the clocks agree, and whether a disk has space.

    Args:
        source_bytes: bytes of all sources, to be compared with the free space.
    """
    what = f"target {target}"
    # On a disk the target may not exist yet. Then the nearest outer folder that exists is tried.
    folder = target
    while not target.is_store and not Path(folder.url).exists() and folder.parent != folder:
        folder = folder.parent
    trial = folder / f".mdsmix-doctor-{secrets.token_hex(8)}"
    copy = folder / f"{trial.name}-copied"
    skews = list[float]()

    def read() -> None:
        """Read the trial, and compare its time of writing with this machine's clock."""
        read_at = time.time()
        answer = trial.fetch()
        if answer:
            stat, _ = answer
            skews.append(read_at - stat.modified)

    def delete() -> None:
        copy.delete()
        trial.delete()

    # Try the operations. Conditional writes are only tried if all others work.
    diagnoses = list(
        try_operations(
            what,
            "listing, writing, reading, copying and deleting work",
            target,
            Operation("list", lambda: list(islice(folder.list(), 1))),
            Operation("write", lambda: trial.write(TRIAL)),
            Operation("read", read),
            Operation("copy", lambda: trial.copy_to(copy)),
            Operation("delete", delete),
        )
    )
    yield from diagnoses
    if diagnoses[-1].state == "problem":
        with suppress(MdsmixError):
            delete()
    elif target.is_store and not trial.try_conditions():
        yield Diagnosis(
            what,
            "warning",
            "the store does not support conditional writes, so it cannot reliably keep two runs "
            "from writing the same stream: never start two runs at once, or set publish: versioned "
            "in the recipe",
        )

    for skew in skews:
        yield _diagnose_clock(target, skew)
    if not target.is_store:
        yield _diagnose_space(target, folder, source_bytes)


def _diagnose_clock(target: Location, skew: float) -> Diagnosis:
    """Return whether this machine's clock and the target's agree.

    Args:
        skew: how many seconds this machine's clock is ahead of the target's.
    """
    return warn_if(
        abs(skew) > MOST_SKEW,
        "clock",
        f"this machine's clock differs from the clock of {target} by {skew:+.0f} s",
        "a store refuses requests signed by a clock 15 minutes off, and leases depend on the "
        "clock: set this machine's clock by NTP",
    )


def _diagnose_space(target: Location, folder: Location, source_bytes: int) -> Diagnosis:
    """Return whether the disk of the target has space for as many bytes as the sources have.

    Args:
        folder: a folder on the disk.
        source_bytes: bytes of all sources.
    """
    free = shutil.disk_usage(folder.url).free
    return warn_if(
        free < source_bytes,
        "disk",
        f"{format_size(free)} are free for {target}; the sources have {format_size(source_bytes)}",
        "the shards may not fit: free some space, or set another remote or local in the recipe",
    )
