"""The surroundings of a recipe's run, diagnosed in the order in which it would fail: the machine, the tokenizer, stores, sources, the target.

Each thing that the run will do at a place is done once, with a small file that is deleted again.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mdsmix import sources
from mdsmix.convert.job import make_job
from mdsmix.convert.pretrained_folders import refuse_unproved
from mdsmix.doctor.machine import Diagnosis, machine, ok, problem, warning
from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.errors import Denied, MdsmixError
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.sources import SourceFile
from mdsmix.storage import Location, locate
from mdsmix.table import size_of
from mdsmix.words import plural

TRIAL = b"A trial of mdsmix doctor, which deletes it again."
MOST_SKEW = 300
"Seconds. A store refuses requests that are signed by a clock 15 minutes off."
FIRST_BYTES = 1 << 10

Verb = tuple[str, str, Callable[[], Any]]
"What is done, the right that AWS calls it by, and the doing."


def diagnose(recipe: Recipe) -> Iterator[Diagnosis]:
    """One Diagnosis for each thing that is well, each that may go wrong and each that will. What is written is deleted again."""
    yield from machine()
    yield from tokenizer(recipe)
    buckets = list(stores(recipe))
    yield from buckets
    is_shut = any(diagnosis.state == "problem" for diagnosis in buckets)
    found: list[sources.SourceFile] = []
    for stream in recipe.streams.values():
        if not (is_shut and _lies_in_bucket(recipe, stream)):
            yield from _stream(recipe, stream, found)
    root = locate(str(recipe.remote or recipe.local))
    if recipe.sourced and not (is_shut and root.is_store):
        yield from target(root, sum(file.stat.size for file in found))


def _lies_in_bucket(recipe: Recipe, stream: StreamSpec) -> bool:
    places = stream.source.path if stream.source else [recipe.published(stream)]
    return any(str(place).startswith("s3://") for place in places)


def tokenizer(recipe: Recipe) -> Iterator[Diagnosis]:
    try:
        found = open_tokenizer(recipe.tokenizer)
    except MdsmixError as error:
        yield problem("tokenizer", str(error))
    else:
        yield ok("tokenizer", f"{found.name}: {found.class_name}, ids below {found.vocab_size:,}")


def _stream(
    recipe: Recipe, stream: StreamSpec, found: list[sources.SourceFile]
) -> Iterator[Diagnosis]:
    """A stream's source, or where it was published; `found` is given the source's files."""
    if stream.held_out_of:
        return
    if stream.source is None:
        yield from _published(f"stream {stream.name}", locate(recipe.published(stream)))
        return
    try:
        files = sources.find(stream.source.path, recipe.folder, sources.ReadAs.of(stream.source))
    except MdsmixError as error:
        yield problem(f"source of {stream.name}", str(error))
    else:
        found.extend(files)
        yield from source(stream.name, files)
        if stream.has_images and recipe.processor:
            yield _processor(recipe, stream, files)


def _processor(recipe: Recipe, stream: StreamSpec, files: list[sources.SourceFile]) -> Diagnosis:
    """Whether the recipe's processor is equal on the stream."""
    what = f"processor of {stream.name}"
    try:
        job = make_job(recipe, stream, open_tokenizer(recipe.tokenizer), None)
        refuse_unproved(job, files)
    except MdsmixError as error:
        return problem(what, str(error))
    return ok(
        what, f"{recipe.processor} makes of whole conversations what the loader makes of rows"
    )


def _published(what: str, place: Location) -> Iterator[Diagnosis]:
    """A stream that others made: its folder holds something that may be listed."""
    inside: list[str] = []
    looked = ("list", "s3:ListBucket", lambda: inside.extend(chain(*place.entries())))
    failed = list(failures(what, (looked,)))
    if inside:
        yield ok(what, f"{place} can be listed")
    elif not failed:
        yield problem(
            what, f"{place} is empty or not there", "correct remote or local, or publish it first"
        )
    yield from failed


def stores(recipe: Recipe) -> Iterator[Diagnosis]:
    """Endpoint and credentials, where the recipe names a bucket at all. Without credentials all that lies in one would fail of the
    same, so it is said once."""
    named = [recipe.remote or "", *(str(s.remote or "") for s in recipe.streams.values())]
    named += [path for s in recipe.sourced if s.source for path in s.source.path]
    if not any(name.startswith("s3://") for name in named):
        return
    from mdsmix.storage.s3_client import credentials_from
    from mdsmix.storage.s3_errors import shown_endpoint

    try:
        yield ok("store", f"endpoint {shown_endpoint()}, credentials from {credentials_from()}")
    except MdsmixError as error:
        yield problem("store", f"{error}; nothing that lies in a bucket was looked at")


def target(place: Location, source_bytes: int) -> Iterator[Diagnosis]:
    """What publishing does: list, write, read, copy, delete, write on a condition; the clock, and room on a disk."""
    folder = place if place.is_store else _existing(place)
    trial = folder / f".mdsmix-doctor-{secrets.token_hex(8)}"
    copied = folder / f"{trial.name}-copied"
    skew: list[float] = []
    found = list(
        failures(
            f"target {place}",
            (
                ("list", "s3:ListBucket", lambda: list(islice(folder.list(), 1))),
                ("write", "s3:PutObject", lambda: trial.write(TRIAL)),
                ("read", "s3:GetObject", lambda: skew.extend(_skew(trial))),
                ("copy", "s3:GetObject and s3:PutObject", lambda: trial.copy_to(copied)),
                ("delete", "s3:DeleteObject", lambda: (copied.delete(), trial.delete())),
            ),
        )
    )
    if not found:
        yield ok(f"target {place}", "listing, writing, reading, copying and deleting work")
        yield from conditions(place, trial)
    yield from found
    yield from clock(place, skew)
    yield from room(place, folder, source_bytes)


def failures(what: str, verbs: tuple[Verb, ...]) -> Iterator[Diagnosis]:
    """A problem for each verb that fails. What is no matter of rights ends the row: the others would fail of the same."""
    for verb, right, do in verbs:
        try:
            do()
        except Denied as denied:
            yield problem(what, f"may not {verb} ({right}): {denied}")
        except MdsmixError as error:
            yield problem(what, f"cannot {verb}: {error}")
            with suppress(MdsmixError):
                verbs[-1][2]()
            return


def _existing(place: Location) -> Location:
    """What is there, of a path whose last parts publishing would make: a folder, or a file in its way."""
    while not Path(place.url).exists() and place.parent != place:
        place = place.parent
    return place


def _skew(trial: Location) -> Iterator[float]:
    """Seconds by which this machine's clock is before that of the store, to which a file was just written."""
    found = trial.fetch()
    if found:
        yield time.time() - found[0].modified


def conditions(place: Location, trial: Location) -> Iterator[Diagnosis]:
    """Whether of two runs that publish one stream at a moment only one does."""
    if place.is_store and not trial.keeps_conditions():
        yield warning(
            f"target {place}",
            "the store keeps no conditions (If-Match, If-None-Match), so two runs that write one stream cannot be kept apart for certain",
            "start no two at once, or publish as versions",
        )


def clock(place: Location, skew: list[float]) -> Iterator[Diagnosis]:
    """This machine's beside the store's."""
    for seconds in skew:
        said = f"this machine is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} {place}"
        if abs(seconds) > MOST_SKEW:
            why = "a store refuses what a clock 15 minutes off signs, and leases are judged by it"
            yield warning("clock", f"{said}; {why}", "let it be set by NTP")
        elif place.is_store:
            yield ok("clock", said)


def room(place: Location, folder: Location, source_bytes: int) -> Iterator[Diagnosis]:
    """Free bytes of the target's disk beside the bytes of the sources; a store does not tell."""
    if place.is_store:
        return
    free = shutil.disk_usage(folder.url).free
    said = f"{size_of(free)} are free for {place}; the sources hold {size_of(source_bytes)}"
    if free < source_bytes:
        fix = "free some, or publish elsewhere: shards of text take about half of its bytes, conversations more than theirs"
        yield warning("disk", said, fix)
    else:
        yield ok("disk", said)


def source(stream: str, files: list[SourceFile]) -> Iterator[Diagnosis]:
    """Whether the files that a stream's source names can be read: the first bytes of the first one are."""
    what, first = f"source of {stream}", files[0]
    read = ("read", "s3:GetObject", lambda: first.location.read(0, FIRST_BYTES))
    found = list(failures(what, (read,)))
    size = sum(file.stat.size for file in files)
    said = f"{plural(len(files), 'file')}, {plural(size, 'byte')}; the first, {first.name}, can be read"
    yield from found or [ok(what, said)]
