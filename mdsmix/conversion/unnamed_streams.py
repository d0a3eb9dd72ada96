"""Finds and deletes whole streams that are stored next to those of a recipe and that the recipe
does not name, such as a stream that was removed from the recipe or renamed.

A folder is a stream if it, or a folder in it, has an index that Streaming can read, a manifest, or
records of finished work units. Of a stream only files are deleted that mdsmix names, or that the
index names; any other file is kept and reported. Nothing is deleted unless the user names the
stream, since another recipe may publish there too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress

from mdsmix.conversion.gc import NAMES_OF_FILES
from mdsmix.conversion.unit_files import FOLDER
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import Say, find_nearest, join_names
from mdsmix.recipe import Recipe
from mdsmix.recipe.rules import is_pretrained_folder
from mdsmix.shards.index import INDEX, find_index
from mdsmix.shards.lease import LEASE_PATH, Lease, hold_lease
from mdsmix.shards.manifest import MANIFEST, read_manifest
from mdsmix.shards.published import QUARANTINE, find_working_folder
from mdsmix.shards.shard_files import refuse_links
from mdsmix.storage import Location, Stat, locate, map_threads

SECONDS_OF_DAY = 86_400
FIRST = (INDEX, MANIFEST)
"Files that are deleted before the others: without them no reader takes the stream for complete."


@frozen(kw_only=True)
class UnnamedStream:
    """A stream next to those of a recipe, with the files of it that may be deleted."""

    name: str
    folder: Location
    "The folder of all its splits, such as `s3://bucket/mix/web`."
    splits: tuple[str, ...]
    "The names of its split folders, with versions; `.` for the stream's folder itself."
    files: dict[str, Stat]
    "Path below `folder` -> size and time, of the files that mdsmix or the index names."
    other_files: tuple[str, ...]
    "Paths of other files, which are never deleted."

    @property
    def bytes(self) -> int:
        return sum(stat.size for stat in self.files.values())

    @property
    def age(self) -> float:
        """Seconds since its newest file was written."""
        return time.time() - max(stat.modified for stat in self.files.values())

    def to_json(self) -> dict[str, object]:
        """Return what `mdsmix gc --json` prints of the stream."""
        return {
            "name": self.name,
            "stream": self.folder.url,
            "splits": list(self.splits),
            "files": len(self.files),
            "bytes": self.bytes,
            "age": self.age,
            "kept": list(self.other_files),
        }


def find_unnamed_streams(recipe: Recipe) -> list[UnnamedStream]:
    """Return the streams at the recipe's remote, or in its local folder if it has no remote, that
    the recipe does not name.
    """
    root = locate(str(recipe.remote or recipe.local))
    named = {locate(recipe.published(spec)).url for spec in recipe.streams.values()}
    streams = list[UnnamedStream]()
    for name in root.folders():
        folder = root / name
        if folder.url in named or is_pretrained_folder(name) or name.startswith("."):
            continue
        stream = read_unnamed_stream(folder)
        if stream:
            streams.append(stream)
    return streams


def read_unnamed_stream(folder: Location) -> UnnamedStream | None:
    """Return the stream whose splits are in this folder; None if there is no stream."""
    splits = list[str]()
    ours = dict[str, Stat]()
    for split in (".", *folder.folders()):
        split_folder = folder if split == "." else folder / split
        if split in (FOLDER, QUARANTINE):  # of a stream without a split
            continue
        stats = dict(split_folder.list(recursive=split != "."))
        if split == ".":
            stats |= _list_inner(split_folder)
        names = _find_own_files(split_folder, stats)
        if names:
            splits.append(split)
            prefix = "" if split == "." else f"{split}/"
            ours |= {prefix + name: stats[name] for name in names}
    if not ours:
        return None
    other_files = [path for path, _ in folder.list(recursive=True) if path not in ours]
    return UnnamedStream(
        name=folder.name,
        folder=folder,
        splits=tuple(splits),
        files=ours,
        other_files=tuple(path for path in other_files if not path.endswith(LEASE_PATH)),
    )


def is_for_finetuning(stream: UnnamedStream, split: str) -> bool:
    """Check whether a split has prompts and responses, by its manifest."""
    with suppress(Unreachable):
        manifest = read_manifest(_split_folder(stream, split))
        return manifest is not None and manifest.encoding.kind == "finetuning"
    return False


def _list_inner(folder: Location) -> dict[str, Stat]:
    """Return the files in the inner folders of a stream without a split, by their paths in it."""
    stats = dict[str, Stat]()
    for inner in (FOLDER, QUARANTINE):
        stats |= {f"{inner}/{name}": stat for name, stat in (folder / inner).list(recursive=True)}
    return stats


def _find_own_files(folder: Location, stats: Collection[str]) -> set[str]:
    """Return the files of a split that mdsmix or the index names; none if it is not a stream.

    Args:
        folder: the folder of the split.
        stats: the paths of its files.
    """
    shards = set[str]()
    is_stream = any(path.startswith(f"{FOLDER}/") and _is_named(path) for path in stats)
    with suppress(Unreachable):  # damaged, or the index of something else
        index = find_index(folder) if INDEX in stats else None
        if index is not None:
            is_stream = True
            for shard in index.shards:
                shards.add(shard.raw_data.basename)
                if shard.zip_data:
                    shards.add(shard.zip_data.basename)
    if MANIFEST in stats:
        with suppress(Unreachable):
            is_stream = read_manifest(folder) is not None or is_stream
    if not is_stream:
        return set()
    unfinished = {path for path, _ in folder.unfinished()}
    own = set[str]()
    for path in stats:
        is_state = path.startswith(f"{FOLDER}/") and path != LEASE_PATH
        is_listed = path in FIRST or path in shards or path in unfinished
        if is_listed or is_state or _is_named(path):
            own.add(path)
    return own


def _is_named(path: str) -> bool:
    """Check whether only mdsmix gives such a name to a file of a stream."""
    return any(pattern.fullmatch(path) for pattern in NAMES_OF_FILES)


def delete_unnamed_stream(stream: UnnamedStream, older_than: float, say: Say) -> UnnamedStream:
    """Delete the stream under the leases of its splits, and return what was deleted.

    Raises RecipeError if a file of it is younger than `older_than`, or one of its folders is a
    link. Raises Unreachable if a conversion of it is running.

    Args:
        stream: a stream that the recipe does not name.
        older_than: an age in seconds.
        say: called with sentences for the user.
    """
    root = stream.folder.parent
    leases = list[Lease]()
    with ExitStack() as stack:
        # No run may write to any split while the stream goes.
        for folder in _list_working_folders(stream):
            names = folder.url.removeprefix(root.url).strip("/").split("/")
            refuse_links(root, *names)
            leases.append(stack.enter_context(hold_lease(folder, say)))
        # Look again: a run may have published in the meantime.
        current = read_unnamed_stream(stream.folder)
        if current is None:
            return stream
        if current.age < older_than:
            days = current.age / SECONDS_OF_DAY
            raise RecipeError(
                f"the stream {stream.name} at {stream.folder} was written {days:.1f} days ago, and "
                "gc keeps what is younger than --older-than "
                f"({older_than / SECONDS_OF_DAY:g} days), since running jobs may use it: wait, or "
                "name a shorter age."
            )

        def discard(path: str) -> None:
            """Delete a file, if this process still has the leases."""
            for lease in leases:
                if not lease.is_held_recently():
                    lease.confirm()
            (current.folder / path).delete()

        first = [path for path in current.files if path.rpartition("/")[2] in FIRST]
        for path in first:
            discard(path)
        for split in current.splits:
            _split_folder(current, split).flush()
        map_threads(discard, [path for path in current.files if path not in first])
    _remove_empty_folders(current)
    return current


def _list_working_folders(stream: UnnamedStream) -> Iterator[Location]:
    """Yield the folders whose leases a conversion of the stream's splits holds, each once."""
    folders = dict[str, Location]()
    for split in stream.splits:
        folder = _split_folder(stream, split)
        working = folder if split == "." else find_working_folder(folder)
        folders[working.url] = working
    yield from folders.values()


def _split_folder(stream: UnnamedStream, split: str) -> Location:
    return stream.folder if split == "." else stream.folder / split


def _remove_empty_folders(stream: UnnamedStream) -> None:
    """Remove the folders of the stream that are empty now; a store has no folders."""
    for split in stream.splits:
        folder = _split_folder(stream, split)
        for inner in (FOLDER, QUARANTINE):
            (folder / inner).delete()
        folder.delete()
    stream.folder.delete()


def choose_streams(
    unnamed: Collection[UnnamedStream], named: Collection[str], names: Collection[str], recipe: str
) -> list[UnnamedStream]:
    """Return the unnamed streams that the user asks for by name.

    Raises RecipeError if a name is neither in the recipe nor next to its streams.

    Args:
        unnamed: the streams next to the recipe's.
        named: the names of the recipe's streams.
        names: the names that the user gives.
        recipe: the recipe's path, for the message.
    """
    streams = {stream.name: stream for stream in unnamed}
    for name in names:
        if name not in streams and name not in named:
            of_recipe = join_names(list(named), 10) or "none"
            there = join_names(list(streams), 10) or "none"
            nearest = find_nearest(name, [*named, *streams])
            suggestion = f"; did you mean {nearest}?" if nearest else "."
            raise RecipeError(
                f"--stream {name} is neither a stream of {recipe} ({of_recipe}) nor one stored "
                f"next to its streams ({there}){suggestion}"
            )
    return [streams[name] for name in dict.fromkeys(names) if name in streams]
