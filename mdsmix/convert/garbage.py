"""What nothing needs any more at a published stream: shards, unit records, quarantine files, writes that were killed, older versions,
and the tokenizers and processors beside it that no stream names.

What goes is ours by its name, older than seven days and not reachable: a shard from neither the index, nor one that was replaced in the
last seven days, nor a unit record that stays. Versions go only where the user says how many to keep; their age counts from when they
ceased to be current, since a job that began the day before may read one that is months old. Only names that mdsmix gives are looked at,
so everything else in the folder stays. Deletion holds the stream's lease, so nothing goes that a conversion is about to name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from mdsmix.convert.ledger import EARLIER, FINGERPRINTS, FOLDER, SEGMENT, UNIT, read_units
from mdsmix.convert.parts import NOTE
from mdsmix.encode.published_folders import card_name, read_card
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.recipe.rules import is_folder_beside
from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.index import Shard, parse_index, read_index
from mdsmix.shards.lease import Lease, lease
from mdsmix.shards.manifest import read_manifest
from mdsmix.shards.published import (
    QUARANTINE,
    find_published,
    named_version,
    versions,
    working_folder,
)
from mdsmix.shards.shard_files import SHARD
from mdsmix.shards.side_files import NAMES as NAMED_FILES
from mdsmix.storage import Location, Stat, locate, together

KEEP_SECONDS = 7 * 86_400

_HASH = "[0-9a-f]{32}"
_STATE = {
    "unit record": UNIT.pattern,
    "fingerprints": FINGERPRINTS.pattern,
    "segment": SEGMENT.pattern,
    "unit of an earlier commit": EARLIER.pattern,
    "note of a part": NOTE.pattern,
    "old index": rf"{_HASH}\.index",
    "version mark": r"[0-9a-f]{8}\.replaced",
}
_KINDS = {
    **{kind: rf"\{FOLDER}/{pattern}" for kind, pattern in _STATE.items()},
    "quarantine": rf"{QUARANTINE}/{_HASH}-[0-9a-f]{{8}}\.jsonl\.zst",
    **NAMED_FILES,
    "shard": SHARD.pattern,
}
_IN_VERSION = re.compile(
    "|".join([SHARD.pattern, *NAMED_FILES.values(), r"index\.json|mdsmix\.manifest"])
)
_LAST = ("shard", "version", "unfinished version")
"What unit records name."
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Something that may go."""

    kind: str
    name: str
    "Below the stream's folder; of a version, beside it; of a tokenizer or a processor, beside the streams."
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
        return working_folder(find_published(at))
    except Unreachable:
        if any(True for _ in (at / FOLDER).list()):
            return at
        raise


def find_garbage(folder: Location, older_than: float, keep: int | None = None) -> list[Garbage]:
    """Everything older than `older_than` seconds that nothing names, and versions of that age except the newest `keep`, the current one
    counted; None keeps all."""
    ours = list(_ours(folder))
    others = _old_versions(folder, ours)
    whole = [each for each in others if each.kind == "version"]
    kept = whole if keep is None else whole[: keep - (named_version(folder) is not None)]
    going = [each for each in others if each not in kept and each.age >= older_than]
    named = {each.name[-8:] for each in others if each not in going}
    if manifest := read_manifest(folder):
        named |= {file.hash for file in manifest.named_files}
        named |= {part.key for part in manifest.parts}
    shards = list[Shard]()
    if (folder / index_file.BASENAME).stat():
        shards += read_index(folder).shards
    for file in ours:
        if file.kind == "old index" and file.age < older_than:
            with suppress(Unreachable):  # damaged: no reader can have it
                shards += parse_index((folder / file.name).read(), file.name).shards
    reachable = set(named)
    holding = [file for file in ours if file.kind in ("unit record", "segment")]
    read = together(lambda file: read_units(folder, file.name.partition("/")[2]), holding)
    for file, units in zip(holding, read, strict=True):
        for key in units.records if units else ():
            is_live = file.age < older_than or key in named
            if units and is_live and (record := units.record(key)):
                reachable |= {file.key, key, record.base}
                shards += record.shards
    reachable |= {shard.stored.basename[:32] for shard in shards}
    left = [file for file in ours if file.key not in reachable]
    old = [each for each in (*left, *_unfinished(folder)) if each.age >= older_than]
    return [*old, *going, *needless(folder.parent.parent, older_than)]


def _file(kind: str, name: str, at: Location, stat: Stat) -> Garbage:
    age = time.time() - stat.modified
    return Garbage(kind=kind, name=name, bytes=stat.size, age=age, discard=at.delete)


def _ours(folder: Location) -> Iterator[Garbage]:
    """The files that mdsmix names, by kind."""
    for name, stat in folder.list(recursive=True):
        for kind, pattern in _KINDS.items():
            if re.fullmatch(pattern, name):
                yield _file(kind, name, folder / name, stat)


def _unfinished(folder: Location) -> Iterator[Garbage]:
    for place in (folder, *versions(folder)):
        for name, stat in place.unfinished():
            shown = name if place == folder else f"{place.name}/{name}"
            yield _file("unfinished write", shown, place / name, stat)


def _old_versions(folder: Location, ours: Iterable[Garbage]) -> list[Garbage]:
    """All versions of the split in `folder` but the current one, the last replaced first. A half-made one is as old as its last file."""
    now, current, found = time.time(), named_version(folder), list[Garbage]()
    replaced = {file.key: file.age for file in ours if file.kind == "version mark"}
    for version in (version for version in versions(folder) if version != current):
        files = {name: stat for name, stat in version.list() if _IN_VERSION.fullmatch(name)}
        if files:
            index = files.get(index_file.BASENAME)
            written = index or max(files.values(), key=attrgetter("modified"))
            age = replaced.get(version.name[-8:], now - written.modified)
            kind = "version" if index else "unfinished version"
            found.append(_folder(kind, version, index_file.BASENAME, files, age))
    return sorted(found, key=attrgetter("age"))


def _folder(
    kind: str, folder: Location, first: str, files: Mapping[str, Stat], age: float
) -> Garbage:
    """`first`: the file without which nobody takes the folder for a whole one; it is deleted before these files. What else lies there
    stays."""

    def discard() -> None:
        (folder / first).delete()
        folder.flush()
        together(lambda name: (folder / name).delete(), files)
        folder.delete()

    size = sum(stat.size for stat in files.values())
    return Garbage(kind=kind, name=folder.name, bytes=size, age=age, discard=discard)


def needless(root: Location, older_than: float) -> list[Garbage]:
    """Tokenizers and processors at the root of a mix that are at least so many seconds old and that no stream published there names.
    Where a manifest there cannot be read, none is needless, since it may name any."""
    found = filter(None, (_kept(root / name) for name in root.folders() if is_folder_beside(name)))
    old = [folder for folder in found if folder.age >= older_than]
    with suppress(Unreachable):
        needed = _folders_named(root) if old else set()
        return [folder for folder in old if folder.name not in needed]
    return []


def _kept(home: Location) -> Garbage | None:
    """None where no card says that mdsmix wrote this folder: anything else of such a name is left alone."""
    if not (card := read_card(home)):
        return None
    first = card_name(home.name)
    files = {name: stat for name, stat in home.list(recursive=True) if name in (first, *card.files)}
    age = time.time() - files[first].modified
    return _folder(home.name.partition("-")[0], home, first, files, age)


def _folders_named(root: Location) -> set[str | None]:
    """By the manifests of all splits and versions of all streams at the root."""
    streams = [root / name for name in root.folders() if not is_folder_beside(name)]
    splits = together(lambda stream: [stream / name for name in stream.folders()], streams)
    read = together(manifest_file.read_manifest, [split for found in splits for split in found])
    return {name for m in read if m for name in (m.tokenizer.folder_name, m.processor_folder)}


def delete_garbage(
    folder: Location, older_than: float, say: Callable[[str], None], keep: int | None = None
) -> list[Garbage]:
    """Deletes what `find_garbage` finds while no conversion is at work; Unreachable where one is. Returns what is gone."""
    with lease(folder, say) as held:
        garbage = find_garbage(folder, older_than, keep)
        # Shards last, those of versions too: a unit record whose shards are gone would be believed.
        for is_last in (False, True):
            some = [each for each in garbage if (each.kind in _LAST) is is_last]
            together(partial(_discard, held), some)
            (folder / FOLDER).flush()
    return garbage


def _discard(held: Lease, item: Garbage) -> None:
    if not held.is_held_still():
        held.confirm()
    item.discard()
