"""What nothing needs any more at a published stream: shards, unit records, quarantine files, writes that were killed.

A shard goes when it is named neither by the index, nor by one that was replaced in the last seven days, nor by a unit record
that stays. Whatever goes is itself older than seven days. Versions go only where the user says how many to keep. Only names
that mdsmix gives are looked at, so everything else in the folder stays. Deletion holds the stream's lease, so nothing goes
that a conversion is about to name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from mdsmix.convert.damage import SHARD
from mdsmix.convert.ledger import FOLDER, UnitRecord, read_record
from mdsmix.convert.needless import KeptFolder, needless
from mdsmix.convert.old_versions import Version, find_versions, versions_to_delete
from mdsmix.convert.parts import NOTE
from mdsmix.convert.segments import NAME, UnitSegment, read_segments, shrink
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
    "segment": rf"{re.escape(FOLDER)}/{NAME.pattern}",
    "bad records": rf"{re.escape(FOLDER)}/{_BAD_NAME}\.bad",
    "note of a part": rf"{re.escape(FOLDER)}/({NOTE.pattern})",
    "note of a cluster's run": rf"{re.escape(FOLDER)}/({MEETING.pattern})",
    "old index": rf"{re.escape(FOLDER)}/({_HASH})\.index",
    "version mark": rf"{re.escape(FOLDER)}/([0-9a-f]{{8}})\.replaced",
    "quarantine": rf"{QUARANTINE}/{_BAD_NAME}\.jsonl\.zst",
    **NAMED_FILES,
    "shard": SHARD.pattern,
}
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
    segments = read_segments(folder, [f.base for f in (*gone["segment"], *kept["segment"])])
    joined = [
        segments[file.base].only(current, ()) if is_old else segments[file.base]
        for is_old, of in ((True, gone), (False, kept))
        for file in of["segment"]
        if file.base in segments
    ]
    own = _records(folder, kept["unit record"])
    records = [*own, *(record for each in joined for record in _records_in(each))]
    named = _named(folder, kept, records)
    gone["shard"] = [file for file in gone["shard"] if file.name not in named]
    bases = {key for record in records for key in (record.key, record.base)}
    gone["fingerprints"] = [file for file in gone["fingerprints"] if file.key not in bases]
    left = {f: segments.get(f.base, UnitSegment()).only(current, bases) for f in gone["segment"]}
    gone["segment"] = [f for f, of in left.items() if not (of.records or of.fingerprints)]
    shrunk = [
        _shrunk(folder, f, segments, of, now) for f, of in left.items() if f not in gone["segment"]
    ]
    files = [_of_file(folder, kind, file, now) for kind in _KINDS for file in gone[kind]]
    unfinished = [left for left in _unfinished(folder, now) if left.age >= older_than]
    kept_folders = needless(folder.parent.parent, older_than)
    return [
        *files,
        *(item for of in shrunk for item in of),
        *(_of_version(version, now) for version in old),
        *unfinished,
        *(_of_folder(found, now) for found in kept_folders),
    ]


def _records_in(segment: UnitSegment) -> Iterator[UnitRecord]:
    return filter(None, map(segment.record, segment.records))


def _shrunk(
    folder: Location,
    file: _File,
    segments: Mapping[str, UnitSegment],
    left: UnitSegment,
    now: float,
) -> Iterator[Garbage]:
    """Units that lie in a segment with others that stay: it is written again without them."""
    lines = segments[file.base].records
    gone = [len(line) for key, line in lines.items() if key not in left.records]
    if left != segments[file.base]:
        yield Garbage(
            kind="segment",
            name=f"{file.name}: {len(gone):,} of {len(lines):,}",
            bytes=sum(gone),
            age=now - file.stat.modified,
            discard=partial(shrink, folder, file.base, left, lambda at: at.delete()),
        )


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
