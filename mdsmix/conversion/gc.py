"""Deletes files of a published stream that nothing needs: shards, unit records, quarantine files,
killed writes, older versions, and the tokenizers and processors beside the streams.

A file goes if mdsmix named it, it is older than seven days, and nothing names it. A shard is named
by the index, by an index that was replaced in the last seven days, or by a unit record that stays.
Versions go only where the user says how many to keep. Their age counts from when they ceased to be
current, since a job that began the day before may read one that is months old. Only names that
mdsmix gives are looked at, so everything else in the folder stays. A tokenizer or processor is
named by the manifest of any stream or version beside it. Deletion holds the stream's lease, so
nothing goes that a conversion is about to name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter

from mdsmix.conversion.source_cache import PART
from mdsmix.conversion.unit_files import (
    EARLIER,
    FINGERPRINTS,
    FOLDER,
    SEGMENT,
    UNIT,
    read_units,
    record_of,
)
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.messages import Say
from mdsmix.recipe.rules import is_folder_beside
from mdsmix.shards.index import INDEX, Shard, find_index, parse_index
from mdsmix.shards.lease import hold_lease
from mdsmix.shards.manifest import read_manifest
from mdsmix.shards.published import (
    QUARANTINE,
    find_named_version,
    find_published,
    find_working_folder,
    list_versions,
)
from mdsmix.shards.shard_files import SHARD_NAME
from mdsmix.shards.side_files import NAME_PATTERNS as NAMED_FILES
from mdsmix.storage import Location, Stat, locate, map_threads
from mdsmix.tokenizer.published import card_file_name, read_card

KEEP_SECONDS = 7 * 86_400

_HASH = "[0-9a-f]{32}"
_STATE = {
    "unit record": UNIT.pattern,
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
_IN_VERSION = re.compile(
    "|".join([SHARD_NAME.pattern, *NAMED_FILES.values(), r"index\.json|mdsmix\.manifest"])
)
UNFINISHED = "unfinished write"
_LAST = ("shard", "version", "unfinished version")
"Kinds with shards, which unit records name: they are deleted last."
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """A file, a version, a tokenizer or a processor that may be deleted."""

    kind: str
    name: str
    """The path below the stream's folder; of a version, the name beside it; of a tokenizer or
    processor, the name beside the streams.
    """
    bytes: int
    age: float
    "Seconds since it was written, or, of a version, replaced."
    discard: Callable[[], None]

    @property
    def key(self) -> str:
        """The hash that its name begins with, of 32 or 8 digits."""
        return re.split(r"[-.]", self.name.rpartition("/")[2])[0]


def seconds_of(text: str) -> float:
    """An age such as 7d, 12h, 30m or 0s; RecipeError where it is none."""
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if not found:
        raise RecipeError(f"--older-than {text} is no age: write for example 7d, 12h, 30m or 0s.")
    return int(found[1]) * _UNITS[found[2]]


def find_folder(url: str) -> Location:
    """The split folder of a stream, published or begun; Unreachable where there is none."""
    at = locate(url)
    try:
        return find_working_folder(find_published(at))
    except Unreachable:
        if any(True for _ in (at / FOLDER).list()):
            return at
        raise


def find_garbage(folder: Location, older_than: float, keep: int | None = None) -> list[Garbage]:
    """Everything older than `older_than` seconds that nothing names, and versions of that age
    except the newest `keep`, the current one counted; None keeps all.
    """
    ours = list(_ours(folder))
    others = _other_versions(folder, ours)
    whole = [each for each in others if each.kind == "version"]
    kept = whole if keep is None else whole[: keep - (find_named_version(folder) is not None)]
    going = [each for each in others if each not in kept and each.age >= older_than]
    named = _named(folder, ours, older_than)
    named |= {each.name[-8:] for each in others if each not in going}
    left = [file for file in ours if file.key not in named]
    left += _unfinished(folder)
    with suppress(Unreachable):  # a manifest beside that cannot be read may name any tokenizer
        left += _unnamed_pretrained(folder)
    return [*(each for each in left if each.age >= older_than), *going]


def _named(folder: Location, ours: Iterable[Garbage], older_than: float) -> set[str]:
    """The keys of everything that is named: by the manifest, the index, an index replaced less than
    `older_than` seconds ago, or a unit record that stays. A record stays if it is as young, or in
    the manifest.
    """
    manifest, index = read_manifest(folder), find_index(folder)
    published = {part.key for part in manifest.parts} if manifest else set[str]()
    named = published | {file.hash for file in (manifest.named_files if manifest else ())}
    shards = [*index.shards] if index else list[Shard]()
    for file in ours:
        at, is_young = folder / file.name, file.age < older_than
        if file.kind == "old index" and is_young:
            with suppress(Unreachable):  # damaged: no reader can have it
                shards += parse_index(at.read(), at.name).shards
        if file.kind in ("unit record", "segment"):
            records = read_units(folder, at.name).records
            live = records.keys() if is_young else records.keys() & published
            for record in filter(None, map(record_of, map(records.__getitem__, live))):
                named |= {file.key, record.key, record.base}
                shards += record.shards
    return named | {shard.stored.basename[:32] for shard in shards}


def _file(kind: str, folder: Location, name: str, stat: Stat) -> Garbage:
    return Garbage(
        kind=kind,
        name=name,
        bytes=stat.size,
        age=time.time() - stat.modified,
        discard=(folder / name).delete,
    )


def _ours(folder: Location) -> Iterator[Garbage]:
    """The files that mdsmix names, by kind."""
    for name, stat in folder.list(recursive=True):
        for kind, pattern in _KINDS.items():
            if re.fullmatch(pattern, name):
                yield _file(kind, folder, name, stat)


def _unfinished(folder: Location) -> Iterator[Garbage]:
    for name, stat in folder.unfinished():
        yield _file(UNFINISHED, folder, name, stat)
    for version in list_versions(folder):
        for name, stat in version.unfinished():
            yield _file(UNFINISHED, folder.parent, f"{version.name}/{name}", stat)


def _other_versions(folder: Location, ours: Iterable[Garbage]) -> list[Garbage]:
    """All versions of the split in `folder` but the current one, the last replaced first. A
    half-made one is as old as its last file.
    """
    current, found = find_named_version(folder), list[Garbage]()
    replaced = {file.key: file.age for file in ours if file.kind == "version mark"}
    for version in list_versions(folder):
        files = {name: stat for name, stat in version.list() if _IN_VERSION.fullmatch(name)}
        if version != current and files:
            kind = "version" if INDEX in files else "unfinished version"
            each = _folder(kind, version, INDEX, files)
            found.append(replace(each, age=replaced.get(version.name[-8:], each.age)))
    return sorted(found, key=attrgetter("age"))


def _unnamed_pretrained(folder: Location) -> Iterator[Garbage]:
    """The tokenizers and processors of the stream's mix that no stream or version there names.
    Unreachable where a manifest is damaged.
    """
    root = folder.parent.parent
    unnamed = set(filter(is_folder_beside, root.folders()))
    splits = (root / name / split for name in root.folders() for split in (root / name).folders())
    for split in chain([folder], splits):
        if manifest := read_manifest(split):
            unnamed -= {manifest.tokenizer.folder_name, manifest.processor_folder}
        if not unnamed:
            return
    for home in map(root.__truediv__, unnamed):
        if card := read_card(home):  # else mdsmix did not write it
            first = card_file_name(home.name)
            found = home.list(recursive=True)
            ours = {name: stat for name, stat in found if name in (first, *card.files)}
            yield _folder(first.removeprefix("mdsmix."), home, first, ours)


def _folder(kind: str, at: Location, first: str, files: Mapping[str, Stat]) -> Garbage:
    """A folder of these files, as old as the last one. `first`: the file without which nobody takes
    the folder for a whole one.
    """
    return Garbage(
        kind=kind,
        name=at.name,
        bytes=sum(stat.size for stat in files.values()),
        age=time.time() - max(stat.modified for stat in files.values()),
        discard=partial(_discard, at, first, files),
    )


def _discard(folder: Location, first: str, files: Iterable[str]) -> None:
    """Deletes these files, the first one before the others. Foreign files stay."""
    (folder / first).delete()
    folder.flush()
    map_threads(lambda name: (folder / name).delete(), files)
    folder.delete()


def delete_garbage(
    folder: Location, older_than: float, say: Say, keep: int | None = None
) -> list[Garbage]:
    """Deletes what `find_garbage` finds while no conversion is at work; Unreachable where one is.
    Returns what is gone.
    """
    with hold_lease(folder, say) as held:

        def discard(item: Garbage) -> None:
            if not held.is_held_recently():
                held.confirm()
            item.discard()

        garbage = find_garbage(folder, older_than, keep)
        # Shards last, those of versions too: a unit record whose shards are gone would be believed.
        for is_last in (False, True):
            map_threads(discard, [each for each in garbage if (each.kind in _LAST) is is_last])
            (folder / FOLDER).flush()
    return garbage
