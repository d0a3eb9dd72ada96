"""The files that a recipe's `source.path` names.

A pattern that finds nothing is an error, never an empty stream: the usual causes are a typing
mistake or another folder, so the message says where it looked.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import orjson

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.messages import join_names
from mdsmix.record import is_encodable
from mdsmix.shards.index import INDEX
from mdsmix.sources.formats import FORMATS, format_of
from mdsmix.sources.inflate import PACKINGS
from mdsmix.sources.units import BY_NAME, ReadAs, SourceFile
from mdsmix.storage import FoundFiles, Location, has_pattern, is_url, locate, map_threads

STATE = "state.json"
SPLITS = "dataset_dict.json"


def list_data_files(folder: Location) -> FoundFiles:
    """The files of a folder of `save_to_disk` or of a stream, in their order; empty for any other
    folder, or a missing one.
    """
    if names := _said(folder / SPLITS, "splits"):
        raise RecipeError(
            f"{folder} holds several splits of a data set: name one of them, as in {folder}/{names[0]}"
        )
    if (entries := _said(folder / STATE, "_data_files")) is None:
        stat = (folder / INDEX).stat()
        return [(folder / INDEX, stat)] if stat else []
    files = [folder / str(entry["filename"]) for entry in entries]
    found = [(file, stat) for file in files if (stat := file.stat())]
    if missing := [str(file) for file in files if file not in dict(found)]:
        raise Unreachable(
            f"{join_names(missing)} is missing, and {STATE} beside it names it: copy the folder again"
        )
    return found


def _said(at: Location, key: str) -> list[Any] | None:
    """A list in a JSON file; None where there is no such file."""
    found = at.fetch()
    if found is None:
        return None
    with suppress(ValueError, TypeError, KeyError):
        if said := [*orjson.loads(found[1])[key]]:
            return said
    raise Unreachable(
        f"{at} does not say its {key}, so what lies beside it is not known: name the files themselves"
    )


def find_files(
    paths: list[str], base: str | os.PathLike[str], read_as: ReadAs = BY_NAME
) -> list[SourceFile]:
    """The files of the paths, globs and URLs, each file once. Relative paths begin at `base`."""
    found: dict[str, SourceFile] = {}
    for files in map_threads(lambda path: _find_one(path, base, read_as), paths):
        for file in files:
            found.setdefault(file.location.url, file)
    return list(found.values())


def _find_one(path: str, base: str | os.PathLike[str], read_as: ReadAs) -> list[SourceFile]:
    place = _absolute(path, base)
    matches = place.expand()
    of_folder = [] if matches or has_pattern(path) else list_data_files(place)
    if not matches and not of_folder:
        raise _nothing(path, place)
    files, folder = list[SourceFile](), name_of(place, base)
    for number, (location, stat) in enumerate(matches or of_folder):
        name = name_of(location, base)
        file = SourceFile(
            location=location,
            stat=stat,
            name=name,
            read_as=read_as,
            order=f"{folder}/{number:09}" if of_folder else "",
        )
        format_of(file).check(file)
        if not is_encodable(name):
            raise RecipeError(
                f"the name of the source file {location.url!r} is not valid UTF-8, so it cannot be written into a manifest: rename it"
            )
        files.append(file)
    return files


def name_of(location: Location, base: str | os.PathLike[str]) -> str:
    """The file's name: its URL in a store, else its path from `base`. Other files and entries play
    no part, so that a new one changes no name, and folder and recipe may be moved together.
    """
    return location.url if location.is_store else os.path.relpath(location.url, base)


def drop_empty_files(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Return the files that hold anything: empty ones are in no stream."""
    return [file for file in files if file.stat.size]


def source_keys(
    paths: Iterable[str], base: str | os.PathLike[str], read_as: ReadAs
) -> dict[str, Any]:
    """Return the keys of a recipe that say which files are read, and how. Paths begin at `base`, so
    that recipe and files may be moved together.
    """
    home = glob.escape(os.fspath(base))
    shown = (path if "://" in path else os.path.relpath(path, home) for path in paths)
    keys: dict[str, Any] = {"source.path": sorted(shown)}
    how = {name: value for name, value in asdict(read_as).items() if value}
    return keys | {
        f"source.{name}": [*value] if isinstance(value, tuple) else value
        for name, value in how.items()
    }


def _absolute(path: str, base: str | os.PathLike[str]) -> Location:
    if is_url(path):
        return locate(path)
    folder = os.fspath(base)
    return locate(os.path.join(glob.escape(folder) if has_pattern(path) else folder, path))


def _nothing(path: str, place: Location) -> RecipeError:
    if next(place.list(), None):
        return RecipeError(
            f"the source {path} is a folder: name the files in it, as in {path.rstrip('/')}/*{next(iter(FORMATS))}"
        )
    for packing in PACKINGS:
        if locate(place.url + packing).expand():
            return RecipeError(
                f"the source {path} matches no file, but {path}{packing} does: name that"
            )
    return RecipeError(
        f"the source {path} matches no file: there is none at {place.url}; correct the path, which is relative to the recipe's folder"
    )
