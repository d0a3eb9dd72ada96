"""Diagnoses the surroundings of a recipe's run in the order in which the run would fail: machine,
tokenizer, stores, sources, target.

Each operation of the run at the target is tried once, with a small file that is deleted again.
"""

from __future__ import annotations

import platform
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from mdsmix import __version__, sources
from mdsmix.conversion.job import make_job
from mdsmix.conversion.publish_pretrained import refuse_unproved_processor
from mdsmix.engines.memory import WORKER_BYTES, choose_memory_cap, count_cpus
from mdsmix.errors import Denied, MdsmixError
from mdsmix.messages import plural
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.storage import STORES, Location, find_store, locate
from mdsmix.table import format_size
from mdsmix.tokenizer.card import open_tokenizer

SHOWN = ("mosaicml-streaming", "torch", "transformers", "tokenizers", "boto3")
TRIAL = b"A trial of mdsmix doctor, which deletes it again."
MOST_SKEW = 300
"""Seconds that clocks may differ. A store refuses requests that are signed by a clock 15 minutes
off.
"""
FIRST_BYTES = 1 << 10

Verb = tuple[str, Callable[[], Any]]
"A verb that is a key of `Location.permissions`, such as `read`, and the operation."
Diagnoses = Generator["Diagnosis", None, None]


@dataclass(frozen=True)
class Diagnosis:
    """The state of one thing that a run needs."""

    what: str
    "`versions`, `memory`, `source of web`, `target s3://bucket/mix`, ..."
    state: Literal["ok", "warning", "problem"]
    "A problem ends a run; a warning may."
    said: str
    "A sentence on the state; where it is not ok, with a remedy."

    def __str__(self) -> str:
        return f"{self.state:<8} {self.what}: {self.said}"


def diagnose(recipe: Recipe) -> Diagnoses:
    """A Diagnosis for each thing that a run needs, as soon as it is known. Files that are written
    are deleted again.
    """
    yield versions()
    yield memory()
    yield from _tokenizer(recipe)
    streams = [stream for stream in recipe.streams.values() if not stream.held_out_of]
    paths = [path for s in streams for path in (s.source.path if s.source else [s.remote])]
    used = {find_store(str(place)) for place in (recipe.remote, *paths)}
    for store in STORES:
        if store in used and store.needs_credentials:
            yield attempt("store", store.describe_access)
    source_bytes = 0
    for stream in streams:
        if stream.source:
            source_bytes += yield from _source(recipe, stream)
        else:
            place = locate(recipe.published(stream))
            yield attempt(f"stream {stream.name}", partial(_entries, place))
    if recipe.sourced:
        yield from _target(locate(str(recipe.remote or recipe.local)), source_bytes)


def attempt(what: str, look: Callable[[], str]) -> Diagnosis:
    """A Diagnosis with the words of `look`; a MdsmixError from `look` is a problem."""
    try:
        return Diagnosis(what, "ok", look())
    except MdsmixError as error:
        return Diagnosis(what, "problem", str(error))


def judged(what: str, said: str, has_flaw: bool, flaw: str) -> Diagnosis:
    """A warning with `flaw`, which ends with a remedy, where `has_flaw`; else ok."""
    return Diagnosis(what, "warning", f"{said}; {flaw}") if has_flaw else Diagnosis(what, "ok", said)  # fmt: skip


def tried(what: str, said: str, place: Location, *verbs: Verb) -> Diagnoses:
    """A problem for each verb that fails; ok with `said` where none does. A failure other than a
    missing right ends the trials, since later verbs would fail for the same reason.
    """
    is_well = True
    for verb, do in verbs:
        try:
            do()
        except Denied as error:
            is_well = False
            permission = place.permissions.get(verb, verb)
            yield Diagnosis(what, "problem", f"may not {verb} ({permission}): {error}")
        except MdsmixError as error:
            yield Diagnosis(what, "problem", f"cannot {verb}: {error}")
            return
    if is_well:
        yield Diagnosis(what, "ok", said)


def versions() -> Diagnosis:
    """The versions that are installed. `pip check` says which do not fit together."""
    shown = ", ".join(f"{name} {_installed(name) or 'missing'}" for name in SHOWN)
    return Diagnosis(
        "versions", "ok", f"mdsmix {__version__}, Python {platform.python_version()}, {shown}"
    )


def _installed(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def memory() -> Diagnosis:
    """The memory of a run without --memory, and whether all its workers fit into it."""
    cap, workers = choose_memory_cap(), count_cpus()
    said = f"{cap / (1 << 30):.1f} GiB for {plural(workers, 'worker')} (half of what the machine or its control group has)"
    flaw = f"{max(1, cap // WORKER_BYTES)} at a time fit: give the machine or container more, or name fewer --workers"
    return judged("memory", said, cap < workers * WORKER_BYTES, flaw)


def _tokenizer(recipe: Recipe) -> Diagnoses:
    """Diagnose the tokenizer, and whether its class changes ids."""
    try:
        tokenizer = open_tokenizer(recipe.tokenizer)
    except MdsmixError as error:
        yield Diagnosis("tokenizer", "problem", str(error))
        return
    name, size = tokenizer.name, tokenizer.vocab_size
    yield Diagnosis("tokenizer", "ok", f"{name}: {tokenizer.class_name}, ids below {size:,}")
    if tokenizer.warning:
        yield Diagnosis("tokenizer", "warning", tokenizer.warning)


def _entries(place: Location) -> str:
    """A sentence on a stream without a source; MdsmixError where its folder is empty or missing."""
    if not any(chain(*place.entries())):
        raise MdsmixError(
            f"{place} is empty or not there; correct remote or local, or publish it first"
        )
    return f"{place} can be listed"


def _source(recipe: Recipe, stream: StreamSpec) -> Generator[Diagnosis, None, int]:
    """Diagnoses a stream's source: it names files, the first can be read, the processor gives equal
    rows. Returns the files' bytes.
    """
    what, spec = f"source of {stream.name}", stream.source
    assert spec
    try:
        files = sources.find_files(spec.path, recipe.folder, sources.ReadAs.of(spec))
    except MdsmixError as error:
        yield Diagnosis(what, "problem", str(error))
        return 0
    first, size = files[0], sum(file.stat.size for file in files)
    said = f"{plural(len(files), 'file')}, {plural(size, 'byte')}; the first, {first.name}, can be read"
    read = partial(first.location.read, 0, FIRST_BYTES)
    yield from tried(what, said, first.location, ("read", read))
    if stream.has_images and recipe.processor:
        yield attempt(f"processor of {stream.name}", lambda: _processor(recipe, stream, files))
    return size


def _processor(recipe: Recipe, stream: StreamSpec, files: list[sources.SourceFile]) -> str:
    refuse_unproved_processor(
        make_job(recipe, stream, open_tokenizer(recipe.tokenizer), None), files
    )
    return f"{recipe.processor} makes of whole conversations what the loader makes of rows"


def _target(place: Location, source_bytes: int) -> Diagnoses:
    """Diagnoses the operations of publishing (list, write, read, copy, delete, conditional write),
    the clock, and the room on a disk.
    """
    what, folder, skews = f"target {place}", place, list[float]()
    while not place.is_store and not Path(folder.url).exists() and folder.parent != folder:
        folder = folder.parent
    trial = folder / f".mdsmix-doctor-{secrets.token_hex(8)}"
    copied = folder / f"{trial.name}-copied"

    def read() -> None:
        now, answer = time.time(), trial.fetch()
        skews.extend([now - answer[0].modified] if answer else ())

    def delete() -> None:
        copied.delete()
        trial.delete()

    diagnoses = list(
        tried(
            what,
            "listing, writing, reading, copying and deleting work",
            place,
            ("list", lambda: list(islice(folder.list(), 1))),
            ("write", lambda: trial.write(TRIAL)),
            ("read", read),
            ("copy", lambda: trial.copy_to(copied)),
            ("delete", delete),
        )
    )
    yield from diagnoses
    if diagnoses[-1].state == "problem":
        with suppress(MdsmixError):
            delete()
    elif place.is_store and not trial.try_conditions():
        yield Diagnosis(
            what,
            "warning",
            "the store keeps no conditions (If-Match, If-None-Match), so two runs that write one stream cannot be kept apart for "
            "certain: start no two at once, or publish as versions",
        )
    for skew in skews:
        yield judged(
            "clock",
            f"this machine's differs from that of {place} by {skew:+.0f} s",
            abs(skew) > MOST_SKEW,
            "a store refuses what a clock 15 minutes off signs, and leases are judged by it: let it be set by NTP",
        )
    if not place.is_store:
        free = shutil.disk_usage(folder.url).free
        yield judged(
            "disk",
            f"{format_size(free)} are free for {place}; the sources hold {format_size(source_bytes)}",
            free < source_bytes,
            "the shards may not fit: free some, or publish elsewhere",
        )
