"""Finds the files that a recipe's `source.path` names.

A pattern that matches no file is an error, never an empty stream. The usual causes are a typing
mistake or the wrong folder, so the message names the place that was searched.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import orjson

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.messages import choose_verb, find_nearest, join_names, plural
from mdsmix.record import is_encodable
from mdsmix.shards.index import INDEX
from mdsmix.sources.formats import FORMATS, format_of
from mdsmix.sources.inflate import PACKINGS
from mdsmix.sources.units import BY_NAME, ReadAs, SourceFile
from mdsmix.storage import (
    FoundFiles,
    Location,
    SkippedLink,
    has_pattern,
    is_url,
    locate,
    map_threads,
)

STATE = "state.json"
SPLITS = "dataset_dict.json"


def list_data_files(folder: Location) -> FoundFiles:
    """Return the data files of a folder that `save_to_disk` (of `datasets`) or a writer of MDS
    shards has made, in the order of the data set. [] for any other folder, or a missing one.

    For a folder of MDS shards, the one data file is its index.

    Raises RecipeError if the folder contains several splits of a data set (`train`, `test`), and
    Unreachable if files are missing.
    """
    splits = _read_tree(folder / SPLITS)
    if splits is not None:
        first = _get_list(splits, "splits", folder / SPLITS)[0]
        raise RecipeError(
            f"{folder} contains several splits of a data set: "
            f"name one of them in source.path, for example {folder}/{first}"
        )

    # Read the folder as an MDS stream if there is no state of `save_to_disk`.
    state = _read_tree(folder / STATE)
    if state is None:
        stat = (folder / INDEX).stat()
        return [(folder / INDEX, stat)] if stat else []

    entries = _get_list(state, "_data_files", folder / STATE)
    _refuse_indices(state, folder / STATE)
    # List the files that the state names.
    files: FoundFiles = []
    missing = list[str]()
    for entry in entries:
        file = folder / str(entry["filename"])
        stat = file.stat()
        if stat:
            files.append((file, stat))
        else:
            missing.append(str(file))
    if missing:
        be = choose_verb(missing, "is", "are")
        raise Unreachable(
            f"{folder / STATE} lists {plural(len(missing), 'file')} that {be} missing: "
            f"{join_names(missing)}. Copy the folder again"
        )
    return files


def _refuse_indices(state: Mapping[str, Any], file: Location) -> None:
    """Raise RecipeError if a folder has a file of indices next to its data, as `datasets` before
    2.0 wrote for a data set that was shuffled or filtered. The data files then have all rows, also
    those that the data set had not, in another order.

    Args:
        state: the content of the folder's state.
        file: the file of the state, for the message.
    """
    if state.get("_indices_data_files"):
        raise RecipeError(
            f"{file} names a file of indices, so the data files also have rows that are not in "
            "the data set: open it with datasets (load_from_disk), and save it again "
            "(save_to_disk), which writes only its rows"
        )


def _read_tree(file: Location) -> Mapping[str, Any] | None:
    """Return the object in a JSON file, {} if the file contains something else, and None if the
    file is missing.
    """
    fetched = file.fetch()
    if fetched is None:
        return None
    _, content = fetched
    tree: Any = None
    with suppress(ValueError):
        tree = orjson.loads(content)
    return tree if isinstance(tree, dict) else {}


def _get_list(tree: Mapping[str, Any], key: str, file: Location) -> list[Any]:
    """Return the list under `key`.

    Raises Unreachable if there is none, or an empty one.

    Args:
        tree: the content of a JSON file.
        key: the key of the list.
        file: the file, for the message.
    """
    values = list[Any]()
    with suppress(TypeError, KeyError):
        values = list(tree[key])
    if not values:
        raise Unreachable(
            f"{file} lists no {key}, so the data files of its folder are unknown: "
            "name the files themselves in source.path"
        )
    return values


def find_files(
    paths: list[str], base: str | os.PathLike[str], read_as: ReadAs = BY_NAME
) -> list[SourceFile]:
    """Return the files of the paths, globs and URLs, each file once.

    Args:
        paths: paths, globs or URLs, as in the recipe.
        base: the folder from which relative paths begin.
        read_as: the recipe's settings for reading them.
    """
    find = partial(_find_one, base=base, read_as=read_as)
    files: dict[str, SourceFile] = {}
    for matches in map_threads(find, paths):
        for file in matches:
            files.setdefault(file.location.url, file)
    return list(files.values())


def _find_one(path: str, base: str | os.PathLike[str], read_as: ReadAs) -> list[SourceFile]:
    """Return the files of one path, glob or URL.

    Args:
        path: a path, glob or URL, as in the recipe.
        base: the folder from which relative paths begin.
        read_as: the recipe's settings for reading files.

    Raises RecipeError if there are no files, or if one of them cannot be used.
    """
    # List the files. A path without a pattern may also be the folder of a data set.
    location = _locate_from(path, base)
    matches = location.expand()
    in_folder: FoundFiles = []
    if not matches and not has_pattern(path):
        in_folder = list_data_files(location)
    if not matches and not in_folder:
        raise _make_no_match_error(path, location)

    if has_pattern(path):
        _refuse_unlisted(path, matches)

    # Check that each file can be used.
    folder = name_of(location, base)
    files = list[SourceFile]()
    for number, (match, stat) in enumerate(matches or in_folder):
        name = name_of(match, base)
        file = SourceFile(
            location=match,
            stat=stat,
            name=name,
            read_as=read_as,
            # The files of a data set's folder keep the order in which the folder lists them.
            order=f"{folder}/{number:09}" if in_folder else "",
        )
        format_of(file).check(file)
        if not is_encodable(name):
            raise RecipeError(
                f"the name of the source file {match.url!r} is not valid UTF-8, "
                "so it cannot be written into a manifest: rename the file"
            )
        files.append(file)
    _refuse_empty(files)
    return files


def _refuse_empty(files: Iterable[SourceFile]) -> None:
    """Raise Unreachable if files of 0 bytes have a format whose files are never empty, such as
    parquet, or are compressed: a copy or a download of them was interrupted.

    Files such as Spark's `_SUCCESS`, which only mark a folder as complete, are not refused.
    """
    cut = list[SourceFile]()
    for file in files:
        format = format_of(file)
        is_marker = file.location.name.startswith("_")
        is_never_empty = format.is_never_empty or format.packing
        if not file.stat.size and is_never_empty and not is_marker:
            cut.append(file)
    if cut:
        names = join_names([file.location.url for file in cut])
        pronoun = choose_verb(cut, "it", "them")
        raise Unreachable(
            f"the source has {plural(len(cut), 'file')} of 0 bytes ({names}): even without "
            "records, a file of this format has some bytes, so a copy was interrupted and records "
            f"would be lost; copy {pronoun} again, or delete {pronoun}"
        )


def describe_repeated_paths(paths: Sequence[str]) -> str:
    """Return a sentence on paths that a recipe names more than once; "" if there are none."""
    repeated = [path for path, count in Counter(paths).items() if count > 1]
    if not repeated:
        return ""
    return (
        f"source.path names {join_names(repeated)} more than once, but each file is read once; "
        "to draw the samples of a stream twice, set its repeat: 2 under mix"
    )


def describe_empty_files(files: Sequence[SourceFile]) -> str:
    """Return a sentence on the files of 0 bytes, which have no records; "" if there are none."""
    empty = [file.name for file in files if not file.stat.size]
    if not empty:
        return ""
    have = choose_verb(empty, "has", "have")
    return (
        f"{len(empty):,} of {plural(len(files), 'source file')} {have} 0 bytes, so no records: "
        f"{join_names(empty)}"
    )


def describe_skipped_links(
    paths: Iterable[str], base: str | os.PathLike[str], files: Sequence[SourceFile]
) -> str:
    """Return a warning of the links that the paths of a source do not follow, so that files are not
    read; "" if there are none.

    Args:
        paths: paths, globs or URLs, as in the recipe.
        base: the folder from which relative paths begin.
        files: the files that the paths match.
    """
    skipped = dict[str, SkippedLink]()
    for path in paths:
        skipped |= {link.path: link for link in _locate_from(path, base).skipped_links()}
    if not skipped:
        return ""
    # Another path of the source may name the link to a folder, or the folder itself.
    read = {os.path.realpath(file.location.url) for file in files}
    unread = [
        link for link in skipped.values() if link.is_broken or not read.issuperset(link.files)
    ]
    sentences = [*describe_links(unread, base, "in source.path")]
    return f"WARNING: {'; '.join(sentences)}" if sentences else ""


def describe_links(
    links: Iterable[SkippedLink], base: str | os.PathLike[str], where: str
) -> Iterator[str]:
    """Yield a sentence on links to folders, and one on broken links.

    Args:
        base: the folder from which links are named.
        where: the place in which the user names files, such as `in source.path`.
    """
    unread, broken = list[str](), list[str]()
    for link in links:
        shown = f"{os.path.relpath(link.path, base)} (to {link.target})"
        (broken if link.is_broken else unread).append(shown)
    if unread:
        yield (
            f"links to folders are not followed, so the files in {join_names(unread)} are not "
            f"read: to read them, name the {choose_verb(unread, 'link', 'links')} {where} too"
        )
    if broken:
        yield (
            f"{join_names(broken)} {choose_verb(broken, 'is a link', 'are links')} to a place "
            "where there is nothing, so nothing is read there: restore the place, or delete the "
            f"{choose_verb(broken, 'link', 'links')}"
        )


def _refuse_unlisted(path: str, matches: FoundFiles) -> None:
    """Raise RecipeError if a pattern matches an Arrow file in a folder of `save_to_disk` that does
    not belong to the data set. `datasets` leaves the files of an earlier data set there, and writes
    the results of `map` and `filter` next to the data, so the records would be read twice.

    Args:
        path: the pattern, as in the recipe.
        matches: the files that it matches.
    """
    by_folder = dict[str, list[Location]]()
    for match, _ in matches:
        if match.name.endswith(".arrow"):
            by_folder.setdefault(match.parent.url, []).append(match)
    folders = [files[0].parent for files in by_folder.values()]
    states = map_threads(lambda folder: (folder / STATE).fetch(), folders)
    for folder, files, fetched in zip(folders, by_folder.values(), states, strict=True):
        if fetched is None:
            continue
        listed = set[str]()
        with suppress(ValueError, TypeError, KeyError):
            listed = {entry["filename"] for entry in orjson.loads(fetched[1])["_data_files"]}
        unlisted = [file.name for file in files if listed and file.name not in listed]
        if unlisted:
            raise RecipeError(
                f"the source {path} matches {join_names(unlisted)}, which the data set in {folder} "
                f"does not have ({STATE}): datasets left it there, as an earlier version or a "
                f"cache. Name the folder, {folder}, in source.path"
            )


def name_of(location: Location, base: str | os.PathLike[str]) -> str:
    """Return the name that units and manifests have for a file: its URL if it is in a store,
    otherwise its path relative to `base`.

    A name depends on no other file, so adding files changes no names. Names also stay the same if
    the recipe and its data are moved together.

    Args:
        base: the recipe's folder.
    """
    return location.url if location.is_store else os.path.relpath(location.url, base)


def drop_empty_files(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Return the files without those of 0 bytes, which contribute nothing to a stream."""
    return [file for file in files if file.stat.size]


def list_source_keys(
    paths: Iterable[str], base: str | os.PathLike[str], read_as: ReadAs
) -> dict[str, Any]:
    """Return recipe key -> value for the keys that decide which files are read, and how. Example:
    `{"source.path": ["data/*.csv"], "source.header": ["text"]}`. They are stored in the manifest,
    so that a later change of the recipe is recognised.

    Paths are relative to `base`, so that recipe and files may be moved together.

    Args:
        paths: absolute paths, globs or URLs.
        base: the recipe's folder.
        read_as: the recipe's settings for reading files.
    """
    home = glob.escape(os.fspath(base))
    relative = list[str]()
    for path in paths:
        is_local = "://" not in path
        relative.append(os.path.relpath(path, home) if is_local else path)
    keys: dict[str, Any] = {"source.path": sorted(relative)}
    for name, value in asdict(read_as).items():
        if value:
            keys[f"source.{name}"] = list(value) if isinstance(value, tuple) else value
    return keys


def _locate_from(path: str, base: str | os.PathLike[str]) -> Location:
    """Return the location of a path, glob or URL of the recipe.

    Args:
        base: the folder from which relative paths begin. Signs of a pattern in its name, such as
            `*`, match only themselves.
    """
    if is_url(path):
        return locate(path)
    folder = os.fspath(base)
    if has_pattern(path):
        folder = glob.escape(folder)
    return locate(os.path.join(folder, path))


def _make_no_match_error(path: str, location: Location) -> RecipeError:
    """Return the error for the user about a path that matches no file, with the likely cause.

    Args:
        path: the path as in the recipe.
        location: the place that was searched for it.
    """
    has_files = next(location.list(), None) is not None
    if has_files:
        suffix = next(iter(FORMATS))  # the first suffix that mdsmix reads: .jsonl
        return RecipeError(
            f"the source {path} is a folder: "
            f"name the files in it, for example {path.rstrip('/')}/*{suffix}"
        )
    for packing in PACKINGS:
        if locate(location.url + packing).expand():
            return RecipeError(
                f"the source {path} matches no file, but {path}{packing} does: "
                f"write {path}{packing} in the recipe"
            )
    remedy = "correct source.path, which is relative to the recipe's folder"
    similar = "" if location.is_store else _find_similar_file(location.url)
    if similar:
        remedy = f"did you mean {similar}?"
    return RecipeError(f"the source {path} matches no file; {remedy}")


def _find_similar_file(path: str) -> str:
    """Return the name of a file in the path's folder that is nearly the path's name; "" if there is
    no such file.
    """
    folder, name = os.path.split(path)
    with suppress(OSError):
        return find_nearest(name, os.listdir(folder)) or ""
    return ""
