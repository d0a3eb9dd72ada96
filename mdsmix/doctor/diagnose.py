"""All that a recipe's run needs, diagnosed in the order in which it would fail."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix import sources
from mdsmix.doctor.diagnosis import Diagnosis, ok, problem
from mdsmix.doctor.machine import machine
from mdsmix.doctor.places import failures, source, target
from mdsmix.doctor.stores import stores
from mdsmix.encode.tokenizer import open_tokenizer
from mdsmix.errors import MdsmixError
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.storage import Location, locate


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
    if recipe.sourced and not (is_shut and root.is_s3):
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


def _published(what: str, place: Location) -> Iterator[Diagnosis]:
    """A stream that others made: its folder holds something that may be listed."""
    inside: list[str] = []
    looked = ("list", "s3:ListBucket", lambda: inside.extend(_names(place)))
    found = list(failures(what, (looked,)))
    if inside:
        yield ok(what, f"{place} can be listed")
    elif not found:
        yield problem(
            what, f"{place} is empty or not there", "correct remote or local, or publish it first"
        )
    yield from found


def _names(place: Location) -> list[str]:
    files, folders = place.entries()
    return [*files, *folders]
