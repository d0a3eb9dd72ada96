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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from mdsmix.convert.damage import SHARD
from mdsmix.convert.ledger import (
    EARLIER,
    FOLDER,
    HASHES,
    SEGMENT,
    UNIT,
    UnitRecord,
    read_units,
)
from mdsmix.convert.parts import NOTE
from mdsmix.encode.published_folders import card_name, read_card
from mdsmix.engines.ray_node import MEETING
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
from mdsmix.shards.side_files import NAMES as NAMED_FILES
from mdsmix.storage import Location, Stat, locate, together

KEEP_SECONDS = 7 * 86_400
THREADS = 16

_HASH = "[0-9a-f]{32}"
_IN_LEDGER = {
    "unit record": UNIT.pattern,
    "fingerprints": HASHES.pattern,
    "segment": SEGMENT.pattern,
    "unit of an earlier commit": EARLIER.pattern,
    "note of a part": f"({NOTE.pattern})",
    "note of a cluster's run": f"({MEETING.pattern})",
    "old index": rf"({_HASH})\.index",
    "version mark": r"([0-9a-f]{8})\.replaced",
}
_KINDS = {
    **{kind: re.escape(f"{FOLDER}/") + name for kind, name in _IN_LEDGER.items()},
    "quarantine": rf"{QUARANTINE}/({_HASH})-[0-9a-f]{{8}}\.jsonl\.zst",
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


@dataclass(frozen=True, slots=True)
class _File:
    """One of a name that mdsmix gives, at the target."""

    kind: str
    name: str
    key: str
    stat: Stat

    @property
    def base(self) -> str:
        return self.name.rpartition("/")[2]


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
    """Everything older than `older_than` seconds that nothing names, and versions of that age except the newest `keep`."""
    now, ours = time.time(), list(_ours(folder))
    others = _old_versions(folder, ours, now)
    going = [each for each in _surplus(folder, others, keep) if each.age >= older_than]
    current = _named(folder) | {each.name[-8:] for each in others if each not in going}
    young = {file.name for file in ours if now - file.stat.modified < older_than}
    staying = young | {file.name for file in ours if file.key in current}
    holding = [file.base for file in ours if file.kind in ("unit record", "segment")]
    units = zip(holding, together(partial(read_units, folder), holding), strict=True)
    records = list[UnitRecord]()
    for name, of in ((f"{FOLDER}/{name}", of) for name, of in units if of):
        live = of.records.keys() if name in young else of.records.keys() & current
        if live or name in staying:
            staying.add(name)
            records += filter(None, map(of.record, live))
    bases = {key for record in records for key in (record.key, record.base)}
    staying |= {file.name for file in ours if file.kind == "fingerprints" and file.key in bases}
    staying |= _shards(
        folder, [f.name for f in ours if f.kind == "old index" and f.name in staying], records
    )
    found = [
        Garbage(
            kind=file.kind,
            name=file.name,
            bytes=file.stat.size,
            age=now - file.stat.modified,
            discard=(folder / file.name).delete,
        )
        for file in ours
        if file.name not in staying
    ]
    unfinished = (each for each in _unfinished(folder, now) if each.age >= older_than)
    return [*found, *going, *unfinished, *needless(folder.parent.parent, older_than)]


def _named(folder: Location) -> set[str]:
    """What the manifest names: units, and files by their hashes."""
    manifest = read_manifest(folder)
    if manifest is None:
        return set()
    return {file.hash for file in manifest.named_files} | {part.key for part in manifest.parts}


def _ours(folder: Location) -> Iterator[_File]:
    """The files that mdsmix names, by kind."""
    files = dict(folder.list(recursive=True))
    for kind, pattern in _KINDS.items():
        for name, stat in files.items():
            if found := re.fullmatch(pattern, name):
                yield _File(kind, name, found[1], stat)


def _shards(folder: Location, old: Iterable[str], records: Iterable[UnitRecord]) -> set[str]:
    """The shards that the index names, or an old one, or a unit record that stays."""
    shards: list[Shard] = []
    if (folder / index_file.BASENAME).stat():
        shards += read_index(folder).shards
    for name in old:
        with suppress(Unreachable):  # damaged: no reader can have it
            shards += parse_index((folder / name).read(), name).shards
    for record in records:
        shards += record.shards
    return {shard.stored.basename for shard in shards}


def _old_versions(folder: Location, ours: Iterable[_File], now: float) -> list[Garbage]:
    """All versions of the split in `folder` but the current one, the last replaced first. The age of a half-made one is since it was
    last worked on."""
    current, found = named_version(folder), list[Garbage]()
    marks = {file.key: file.stat.modified for file in ours if file.kind == "version mark"}
    for version in (version for version in versions(folder) if version != current):
        files = {name: stat for name, stat in version.list() if _IN_VERSION.fullmatch(name)}
        index = files.get(index_file.BASENAME)
        if files:
            last = index.modified if index else max(stat.modified for stat in files.values())
            replaced = marks.get(version.name[-8:], last)
            kind = "version" if index else "unfinished version"
            found.append(_folder(kind, version, index_file.BASENAME, files, now - replaced))
    return sorted(found, key=lambda version: version.age)


def _surplus(folder: Location, found: list[Garbage], keep: int | None) -> list[Garbage]:
    """Those that are not among the newest `keep`, the current one counted; None keeps all. Half-made ones never count."""
    whole = [version for version in found if version.kind == "version"]
    room = len(whole) if keep is None else keep - (named_version(folder) is not None)
    return [version for version in found if version not in whole[:room]]


def _folder(
    kind: str, folder: Location, first: str, files: Mapping[str, Stat], age: float
) -> Garbage:
    return Garbage(
        kind=kind,
        name=folder.name,
        bytes=sum(stat.size for stat in files.values()),
        age=age,
        discard=partial(_discard_folder, folder, first, list(files)),
    )


def _discard_folder(folder: Location, first: str, names: Sequence[str]) -> None:
    """Deletes `first`, without which nobody takes the folder for a whole one, and then these files; what else lies there stays."""
    (folder / first).delete()
    folder.flush()
    together(lambda name: (folder / name).delete(), names)
    folder.delete()


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
    first = card_name(home.name)
    if not (card := read_card(home)):
        return None
    files = {name: stat for name, stat in home.list(recursive=True) if name in (first, *card.files)}
    kind, age = home.name.partition("-")[0], time.time() - files[first].modified
    return _folder(kind, home, first, files, age)


def _folders_named(root: Location) -> set[str]:
    """By the manifests of all splits and versions of all streams at the root."""
    streams = [root / name for name in root.folders() if not is_folder_beside(name)]
    splits = together(lambda stream: [stream / name for name in stream.folders()], streams)
    read = together(manifest_file.read_manifest, [split for found in splits for split in found])
    manifests = list(filter(None, read))
    return {
        name for m in manifests for name in (m.tokenizer.folder_name, m.processor_folder) if name
    }


def _unfinished(folder: Location, now: float) -> Iterator[Garbage]:
    for place in (folder, *versions(folder)):
        for left in place.unfinished():
            yield Garbage(
                kind="unfinished write",
                name=left.name if place == folder else f"{place.name}/{left.name}",
                bytes=left.size,
                age=now - left.modified,
                discard=left.discard,
            )


def delete_garbage(
    folder: Location, older_than: float, say: Callable[[str], None], keep: int | None = None
) -> list[Garbage]:
    """Deletes what `find_garbage` finds while no conversion is at work; Unreachable where one is. Returns what is gone."""
    with lease(folder, say) as held, ThreadPoolExecutor(THREADS) as pool:
        garbage = find_garbage(folder, older_than, keep)
        gone = []
        # Shards last, those of versions too: a unit record whose shards are gone would be believed.
        for is_last in (False, True):
            chosen = [g for g in garbage if (g.kind in _LAST) is is_last]
            list(pool.map(lambda item: _discard(item, held), chosen))
            gone += chosen
            if chosen and not is_last:
                (folder / FOLDER).flush()
    return gone


def _discard(item: Garbage, held: Lease) -> None:
    if not held.is_held_still():
        held.confirm()
    item.discard()
