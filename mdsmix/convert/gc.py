"""What nothing needs any more at a published stream: shards, unit records, quarantine files, writes that were killed.

A shard goes when it is named neither by the index, nor by one that was replaced in the last seven days, nor by a unit record
that stays. Whatever goes is itself older than seven days. Versions go only where the user says how many to keep. Only names
that mdsmix gives are looked at, so everything else in the folder stays. Deletion holds the stream's lease, so nothing goes
that a conversion is about to name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from mdsmix.convert.damage import SHARD
from mdsmix.convert.ledger import FOLDER, UnitRecord, parse_record, read_record
from mdsmix.convert.needless import KeptFolder, needless
from mdsmix.convert.old_versions import Version, find_versions, versions_to_delete
from mdsmix.convert.packs import (
    FINGERPRINTS,
    NAME,
    Pack,
    Packed,
    Place,
    read_packs,
    read_places,
    rewrite,
)
from mdsmix.convert.parts import NOTE
from mdsmix.engines.ray_node import MEETING
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.shards import index as index_file
from mdsmix.shards.index import Shard, parse_index, read_index
from mdsmix.shards.lease import Lease, lease
from mdsmix.shards.manifest import read_manifest
from mdsmix.shards.published import find_published, versions, working_folder
from mdsmix.shards.quarantined import QUARANTINE
from mdsmix.shards.side_files import NAMES as NAMED_FILES
from mdsmix.storage import Location, Stat, locate

KEEP_SECONDS = 7 * 86_400
THREADS = 16

_HASH = "[0-9a-f]{32}"
_BAD_NAME = rf"({_HASH})-[0-9a-f]{{8}}"
_KINDS = {
    "unit record": rf"{re.escape(FOLDER)}/({_HASH})",
    "fingerprints": rf"{re.escape(FOLDER)}/({_HASH})\.hashes",
    "packed records": rf"{re.escape(FOLDER)}/{NAME.pattern}",
    "packed fingerprints": rf"{re.escape(FOLDER)}/{FINGERPRINTS.pattern}",
    "bad records": rf"{re.escape(FOLDER)}/{_BAD_NAME}\.bad",
    "note of a part": rf"{re.escape(FOLDER)}/({NOTE.pattern})",
    "note of a cluster's run": rf"{re.escape(FOLDER)}/({MEETING.pattern})",
    "old index": rf"{re.escape(FOLDER)}/({_HASH})\.index",
    "version mark": rf"{re.escape(FOLDER)}/([0-9a-f]{{8}})\.replaced",
    "quarantine": rf"{QUARANTINE}/{_BAD_NAME}\.jsonl\.zst",
    **NAMED_FILES,
    "shard": SHARD.pattern,
}
_PACKS = ("packed records", "packed fingerprints")
_LAST = ("shard", "version", "unfinished version", "packed fingerprints")
"What unit records name, and packs of them."
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
    name: str
    key: str
    stat: Stat

    @property
    def base(self) -> str:
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class _Packs:
    """Packs of unit records, and which records of each stay: of a young one all, of an old one those of the stream that is published."""

    packed: Packed
    keys: Mapping[str, Collection[str]]

    @staticmethod
    def of(
        folder: Location, names: Iterable[str], old: Collection[str], current: Collection[str]
    ) -> _Packs:
        """`names`: of all packs, those of fingerprints too; `old`: of those of records that are."""
        packed = read_packs(folder, names)
        keys = {
            name: {key for key in pack.records if name not in old or key in current}
            for name, pack in packed.packs.items()
        }
        return _Packs(packed, keys)

    @property
    def packs(self) -> Mapping[str, Pack]:
        return self.packed.packs

    def records(self) -> Iterator[UnitRecord]:
        for name, keys in self.keys.items():
            found = (parse_record(self.packs[name].records[key], key) for key in keys)
            yield from (record for record in found if record)

    def left(self, bases: Collection[str]) -> dict[str, Pack]:
        """What stays of each. `bases`: the keys of fingerprints that a record names."""
        return {name: pack.only(self.keys[name], bases) for name, pack in self.packs.items()}

    def shrunk(
        self, folder: Location, files: Iterable[_File], left: Mapping[str, Pack], now: float
    ) -> Iterator[Garbage]:
        """Records that are packed with others that stay: the pack is written again without them."""
        for file in files:
            stays, pack = left[file.base], self.packs[file.base]
            gone = [len(line) for key, line in pack.records.items() if key not in stays.records]
            if stays != pack:
                yield Garbage(
                    kind="packed records",
                    name=f"{file.name}: {len(gone):,} of {len(pack.records):,}",
                    bytes=sum(gone),
                    age=now - file.stat.modified,
                    discard=partial(rewrite, folder, file.base, stays, lambda at: at.delete()),
                )


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


def find_garbage(
    folder: Location,
    older_than: float,
    keep: int | None = None,
) -> list[Garbage]:
    """Everything older than `older_than` seconds that nothing names, and versions of that age except the newest `keep`."""
    now = time.time()
    manifest, others = read_manifest(folder), find_versions(folder)
    old = [v for v in versions_to_delete(folder, others, keep) if now - v.replaced >= older_than]
    current = {file.hash for file in manifest.named_files} if manifest else set()
    current |= {part.key for part in manifest.parts} if manifest else set()
    current |= {version.hash for version in others if version not in old}
    gone, kept = dict[str, list[_File]](), dict[str, list[_File]]()
    for kind, found in _sorted_out(folder).items():
        gone[kind], kept[kind] = [], []
        for file in found:
            may_go = file.key not in current and now - file.stat.modified >= older_than
            (gone if may_go else kept)[kind].append(file)
    names = [file.base for kind in _PACKS for file in (*gone[kind], *kept[kind])]
    packs = _Packs.of(folder, names, {file.base for file in gone["packed records"]}, current)
    records = [*_records(folder, kept["unit record"]), *packs.records()]
    named = _named(folder, kept, records)
    gone["shard"] = [file for file in gone["shard"] if file.name not in named]
    bases = {key for record in records for key in (record.key, record.base)}
    alone = [*gone["fingerprints"], *kept["fingerprints"]]
    gone["fingerprints"] = [file for file in gone["fingerprints"] if file.key not in bases]
    left = packs.left(bases)
    shrunk = [file for file in gone["packed records"] if left.get(file.base)]
    gone["packed records"] = [file for file in gone["packed records"] if file not in shrunk]
    in_use = {name for pack in left.values() for name in pack.fingerprints}
    packed = [file for file in gone["packed fingerprints"] if file.base not in in_use]
    gone["packed fingerprints"] = packed
    places = {k: place for k, place in packs.packed.fingerprints.items() if place.file in in_use}
    stay = [file for file in alone if file not in gone["fingerprints"]]
    old_ones = [file for file in stay if now - file.stat.modified >= older_than]
    gone["fingerprints"] += _packed_too(folder, old_ones, places)
    files = [_of_file(folder, kind, file, now) for kind in _KINDS for file in gone[kind]]
    unfinished = [left for left in _unfinished(folder, now) if left.age >= older_than]
    kept_folders = needless(folder.parent.parent, older_than)
    return [
        *files,
        *packs.shrunk(folder, shrunk, left, now),
        *(_of_version(version, now) for version in old),
        *unfinished,
        *(_of_folder(found, now) for found in kept_folders),
    ]


def _packed_too(
    folder: Location, files: Sequence[_File], places: Mapping[str, Place]
) -> Iterator[_File]:
    """Those that a pack holds byte by byte: a run was killed when it had packed them, and before it deleted them."""
    files = [file for file in files if file.key in places]
    packed = read_places(folder, [places[file.key] for file in files])
    for file, content in zip(files, packed, strict=True):
        if content == (folder / file.name).read():
            yield file


def _of_file(folder: Location, kind: str, file: _File, now: float) -> Garbage:
    return Garbage(
        kind=kind,
        name=file.name,
        bytes=file.stat.size,
        age=now - file.stat.modified,
        discard=(folder / file.name).delete,
    )


def _of_version(version: Version, now: float) -> Garbage:
    return Garbage(
        kind="version" if version.is_whole else "unfinished version",
        name=version.folder.name,
        bytes=version.bytes,
        age=now - version.replaced,
        discard=version.discard,
    )


def _of_folder(found: KeptFolder, now: float) -> Garbage:
    return Garbage(
        kind=found.kind,
        name=found.folder.name,
        bytes=found.bytes,
        age=now - found.written,
        discard=found.discard,
    )


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


def _sorted_out(folder: Location) -> dict[str, list[_File]]:
    """The files that mdsmix names, by kind."""
    files: dict[str, list[_File]] = {kind: [] for kind in _KINDS}
    for name, stat in folder.list(recursive=True):
        for kind, pattern in _KINDS.items():
            if found := re.fullmatch(pattern, name):
                files[kind].append(_File(name, found[1], stat))
    return files


def _records(folder: Location, files: Iterable[_File]) -> list[UnitRecord]:
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda file: read_record(folder, file.key), files)
        return [record for record in found if record]


def _named(
    folder: Location, kept: Mapping[str, list[_File]], records: Iterable[UnitRecord]
) -> set[str]:
    """The shards that the index names, or an old one, or a unit record that stays."""
    shards: list[Shard] = []
    if (folder / index_file.BASENAME).stat():
        shards += read_index(folder).shards
    for old in kept["old index"]:
        with suppress(Unreachable):  # damaged: no reader can have it
            shards += parse_index((folder / old.name).read(), old.name).shards
    for record in records:
        shards += record.shards
    return {shard.stored.basename for shard in shards}
