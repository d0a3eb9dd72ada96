"""Finds and deletes files of a published stream that nothing needs: shards, unit records,
quarantine files, interrupted writes, older versions, and the tokenizers and processors next to the
streams.

A file is deleted if mdsmix named it, it is older than seven days, and nothing refers to it. A shard
is needed if the index refers to it, an index that was replaced in the last seven days, or a unit
record that is kept. A tokenizer or processor is needed if the manifest of any stream or version of
the mix refers to it. Versions are deleted only if the user says how many to keep. The age of a
version counts from when it was replaced, since a job that began the day before may read a version
that is months old.

Only files with names that mdsmix gives are considered, so everything else in the folder is kept.
Files are deleted under the stream's lease, so none is deleted that a running conversion is about to
use.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter

from mdsmix.conversion.source_cache import PART
from mdsmix.conversion.unit_files import (
    EARLIER,
    FINGERPRINTS,
    FOLDER,
    SEGMENT,
    UNIT_FILE_NAME,
    parse_record,
    read_unit_file,
)
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import Say
from mdsmix.recipe.rules import is_pretrained_folder
from mdsmix.shards.index import INDEX, Index, Shard, parse_index
from mdsmix.shards.lease import hold_lease
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.published import (
    QUARANTINE,
    find_published,
    find_working_folder,
    list_versions,
    locate_version,
    read_index_and_manifest,
)
from mdsmix.shards.shard_files import SHARD_NAME
from mdsmix.shards.side_files import NAME_PATTERNS as NAMED_FILES
from mdsmix.storage import Location, Stat, locate, map_in_batches, map_threads
from mdsmix.tokenizer.published import card_file_name, read_card

KEEP_SECONDS = 7 * 86_400
"Younger files are kept, unless --older-than gives another age."

_HASH = "[0-9a-f]{32}"
_STATE = {
    "unit record": UNIT_FILE_NAME.pattern,
    "fingerprints": FINGERPRINTS.pattern,
    "segment": SEGMENT.pattern,
    "unit of an earlier commit": EARLIER.pattern,
    "note of a part": PART.pattern,
    "old index": rf"{_HASH}\.index",
    "version mark": r"[0-9a-f]{8}\.replaced",
}
_KINDS = {
    **{kind: rf"\{FOLDER}/{pattern}" for kind, pattern in _STATE.items()},
    "quarantine": rf"{QUARANTINE}/{_HASH}-[0-9a-f]{{8}}\.jsonl\.zst",
    **NAMED_FILES,
    "shard": SHARD_NAME.pattern,
}
NAMES_OF_FILES = tuple(re.compile(pattern) for pattern in _KINDS.values())
"Names that only mdsmix gives to files of a stream."
_IN_VERSION = re.compile(
    "|".join([SHARD_NAME.pattern, *NAMED_FILES.values(), r"index\.json|mdsmix\.manifest"])
)
UNFINISHED = "unfinished write"
_WITH_SHARDS = ("shard", "version", "unfinished version")
"Kinds that contain shards. They are deleted last, since unit records refer to shards."
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@frozen(kw_only=True, slots=True)
class Garbage:
    """A file or folder that may be deleted: an unused file, an old version of the stream, a
    tokenizer or a processor.
    """

    kind: str
    name: str
    """For a file, its path below the stream's folder. For a version, tokenizer or processor, the
    name of its folder.
    """
    bytes: int
    age: float
    "Seconds since it was written; for a version, since it was replaced."
    discard: Callable[[], None]
    "Deletes the item."

    @property
    def key(self) -> str:
        """The hash with which the file's name begins: `6a739...` of `6a739....mds`. It has 32 hex
        digits; in the name of a version's mark (`.replaced`), 8.
        """
        file_name = self.name.rpartition("/")[2]
        return re.split(r"[-.]", file_name)[0]  # the name up to its first `-` or `.`


def parse_age(text: str) -> float:
    """Return the seconds of an age such as `7d`, `12h`, `30m` or `0s`.

    Raises RecipeError if the text is not an age.
    """
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if not match:
        raise RecipeError(
            f"--older-than {text} is not an age: write for example 7d, 12h, 30m or 0s."
        )
    return int(match[1]) * _UNITS[match[2]]


def find_folder(url: str) -> Location:
    """Return the folder of a split of a stream, such as `mix/web/train`, if the split is published
    or its conversion has begun.

    Raises Unreachable if neither is true.

    Args:
        url: where the user says that the stream is: its folder, or the folder of its split.
    """
    folder = locate(url)
    try:
        return find_working_folder(find_published(folder))
    except Unreachable:
        has_unit_files = any(True for _ in (folder / FOLDER).list())
        if has_unit_files:
            return folder
        raise


def find_garbage(folder: Location, older_than: float, keep: int | None = None) -> list[Garbage]:
    """Return the files that nothing refers to, and the old versions of the stream that need not be
    kept. (`publish: versioned` keeps a folder for each published version.) Files and versions
    younger than `older_than` are left out.

    Args:
        folder: the folder of a split of a stream, such as `mix/web/train`.
        older_than: an age in seconds.
        keep: how many of the newest versions are kept, including the current one; None: all.
    """
    # Read what is there: first the files and the folders of versions, so that a file that is
    # published meanwhile is either not listed or in the manifest.
    files = list(_list_named_files(folder))
    versions = list(list_versions(folder))
    index, manifest = read_index_and_manifest(folder)
    current: Location | None = None
    if index is None and manifest:
        current = locate_version(folder, manifest.index_hash)
    # Choose the versions to delete.
    other_versions = _list_other_versions(versions, current, files)
    complete = [version for version in other_versions if version.kind == "version"]
    kept_versions = complete
    if keep is not None:
        # The current version is kept anyway, and is not in `complete`.
        other_count = keep - 1 if current else keep
        kept_versions = complete[:other_count]
    old_versions = list[Garbage]()
    used_keys = _find_used_keys(folder, index, manifest, files, older_than)
    for version in other_versions:
        if version not in kept_versions and version.age >= older_than:
            old_versions.append(version)
        else:
            # Keep its version mark, which is named by the last 8 digits of the version's name.
            used_keys.add(version.name[-8:])
    # Add the files that nothing refers to.
    unused = [file for file in files if file.key not in used_keys]
    unused += _list_unfinished(folder, versions)
    with suppress(Unreachable):  # an unreadable manifest of the mix may refer to any tokenizer
        unused += _find_unused_pretrained(folder, manifest)
    return [*(item for item in unused if item.age >= older_than), *old_versions]


def _find_used_keys(
    folder: Location,
    index: Index | None,
    manifest: Manifest | None,
    files: Sequence[Garbage],
    older_than: float,
) -> set[str]:
    """Return the keys (hashes with which names begin) of all files that are still needed.

    A file is needed if one of these refers to it: the manifest, the index, an index that was
    replaced less than `older_than` seconds ago, or a unit record that is kept. A record is kept if
    it was written less than `older_than` seconds ago, or is in the manifest.

    Args:
        folder: the folder of a split of a stream.
        index: the index in it; None if it is missing.
        manifest: the manifest in it; None if it is missing.
        files: all files in it with names that mdsmix gives.
        older_than: an age in seconds.
    """
    # Files of the published stream.
    published = set[str]()
    used = set[str]()
    if manifest:
        published = {part.key for part in manifest.parts}
        used = published | {file.hash for file in manifest.named_files}
    shards = list(index.shards) if index else list[Shard]()
    # Files that replaced indexes refer to.
    for file in files:
        if file.kind == "old index" and file.age < older_than:
            with suppress(Unreachable):  # damaged: no reader can use it
                shards += parse_index((folder / file.name).read(), file.name).shards
    # Files that unit records refer to.
    unit_files = [file for file in files if file.kind in ("unit record", "segment")]
    heads = map_in_batches(
        lambda file: read_unit_file(folder, file.name.rpartition("/")[2]), unit_files
    )
    for file, head in zip(unit_files, heads, strict=True):
        for key, line in head.records.items():
            if file.age >= older_than and key not in published:
                continue
            record = parse_record(line)
            if record:
                used |= {file.key, record.key, record.base}
                shards += record.shards
    # The name of a shard begins with a hash of 32 digits.
    return used | {shard.stored.basename[:32] for shard in shards}


def _make_file_item(kind: str, folder: Location, name: str, stat: Stat) -> Garbage:
    """Return a file of the folder as an item that may be deleted.

    Args:
        kind: what the file is, for messages: `old index`.
        folder: the folder that contains the file.
        name: the file's path below the folder.
        stat: the file's size and time.
    """
    return Garbage(
        kind=kind,
        name=name,
        bytes=stat.size,
        age=time.time() - stat.modified,
        discard=(folder / name).delete,
    )


def _list_named_files(folder: Location) -> Iterator[Garbage]:
    """Yield the files in this folder and below whose names mdsmix gives to its files, such as
    `<hash>.mds`. Other files are never deleted.
    """
    for name, stat in folder.list(recursive=True):
        for kind, pattern in _KINDS.items():
            if re.fullmatch(pattern, name):
                yield _make_file_item(kind, folder, name, stat)


def _list_unfinished(folder: Location, versions: Iterable[Location]) -> Iterator[Garbage]:
    """Yield interrupted writes in the stream's folder and in its versions."""
    for name, stat in folder.unfinished():
        yield _make_file_item(UNFINISHED, folder, name, stat)
    for version in versions:
        for name, stat in version.unfinished():
            yield _make_file_item(UNFINISHED, folder.parent, f"{version.name}/{name}", stat)


def _list_other_versions(
    versions: Iterable[Location], current: Location | None, files: Iterable[Garbage]
) -> list[Garbage]:
    """Return all versions of the split except the current one; the version that was replaced last
    comes first. The age of an unfinished version is that of its newest file.

    Args:
        versions: the folders of all versions.
        current: the folder of the current version; None without a published version.
        files: all files in the split's folder with names that mdsmix gives.
    """
    replaced_ages = {file.key: file.age for file in files if file.kind == "version mark"}
    items = list[Garbage]()
    for version in versions:
        stats = {name: stat for name, stat in version.list() if _IN_VERSION.fullmatch(name)}
        if version != current and stats:
            kind = "version" if INDEX in stats else "unfinished version"
            item = _make_folder_item(kind, version, INDEX, stats)
            # A version mark is named by the last 8 digits of the version's name.
            age = replaced_ages.get(version.name[-8:], item.age)
            items.append(replace(item, age=age))
    return sorted(items, key=attrgetter("age"))


def _find_unused_pretrained(folder: Location, manifest: Manifest | None) -> Iterator[Garbage]:
    """Yield the tokenizers and processors of the stream's mix that no stream or version of the mix
    uses.

    Raises Unreachable if a manifest is damaged.

    Args:
        folder: the folder of a split of a stream.
        manifest: the manifest in it; None if it is missing.
    """
    # Find the folders that no manifest names: stop as soon as the manifests so far name all.
    root = folder.parent.parent
    unused = set(filter(is_pretrained_folder, root.folders()))
    for user in chain([manifest], map(read_manifest, _list_splits(root))):
        if user:
            unused -= {user.tokenizer.folder_name, user.processor_folder}
        if not unused:
            return
    # Take only the files that mdsmix has written: a folder without a card is not from mdsmix.
    for name in unused:
        home = root / name
        card = read_card(home)
        if card:
            card_file = card_file_name(name)
            ours = {card_file, *card.files}
            stats = {path: stat for path, stat in home.list(recursive=True) if path in ours}
            kind = card_file.removeprefix("mdsmix.")  # tokenizer or processor
            yield _make_folder_item(kind, home, first=card_file, stats=stats)


def _list_splits(root: Location) -> Iterator[Location]:
    """Yield the folders of all splits and versions of a mix.

    Args:
        root: the folder of the mix.
    """
    for stream in root.folders():
        for split in (root / stream).folders():
            yield root / stream / split


def _make_folder_item(
    kind: str, folder: Location, first: str, stats: Mapping[str, Stat]
) -> Garbage:
    """Return a folder of these files as one item that may be deleted. It is as old as its newest
    file.

    Args:
        kind: what the folder is, for messages: `version`.
        folder: the folder.
        first: the file that is deleted first. Without this file no reader takes the folder for
            complete.
        stats: name -> size and time, of the files to delete.
    """
    return Garbage(
        kind=kind,
        name=folder.name,
        bytes=sum(stat.size for stat in stats.values()),
        age=time.time() - max(stat.modified for stat in stats.values()),
        discard=partial(_discard_folder, folder, first, stats),
    )


def _discard_folder(folder: Location, first: str, files: Collection[str]) -> None:
    """Delete these files of a folder, `first` before the others. Other files in it are kept."""
    (folder / first).delete()
    folder.flush()
    map_threads(lambda name: (folder / name).delete(), files)
    folder.delete()


def delete_garbage(
    folder: Location, older_than: float, say: Say, keep: int | None = None
) -> list[Garbage]:
    """Delete the items of `find_garbage`, and return them.

    Raises Unreachable if a conversion of the stream is running.

    Args:
        folder: the folder of a split of a stream.
        older_than: an age in seconds; younger items are kept.
        say: called with sentences for the user.
        keep: how many of the newest versions are kept; None: all.
    """
    with hold_lease(folder, say) as held_lease:

        def discard(item: Garbage) -> None:
            """Delete an item. Raise Unreachable if this process has lost its lease (write lock) on
            the stream.
            """
            if not held_lease.is_held_recently():
                held_lease.confirm()
            item.discard()

        garbage = find_garbage(folder, older_than, keep)
        with_shards = [item for item in garbage if item.kind in _WITH_SHARDS]
        without_shards = [item for item in garbage if item.kind not in _WITH_SHARDS]
        # Shards are deleted last, also the shards of versions: a unit record whose shards are gone
        # would still count as a finished unit.
        for items in (without_shards, with_shards):
            map_threads(discard, items)
            (folder / FOLDER).flush()
    return garbage
