"""What nothing needs any more at a published stream: shards, unit records, quarantine files, writes that were killed.

What goes is ours by its name, older than seven days and not reachable: a shard from neither the index, nor one that was replaced in the
last seven days, nor a unit record that stays. Versions go only where the user says how many to keep. Only names
that mdsmix gives are looked at, so everything else in the folder stays. Deletion holds the stream's lease, so nothing goes
that a conversion is about to name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
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
from mdsmix.storage import Location, Stat, locate, together

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
    """One of a name that mdsmix gives, at the target."""

    kind: str
    name: str
    key: str
    stat: Stat

    def garbage(self, folder: Location, now: float) -> Garbage:
        at, age = folder / self.name, now - self.stat.modified
        return Garbage(
            kind=self.kind, name=self.name, bytes=self.stat.size, age=age, discard=at.delete
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
    surplus = versions_to_delete(folder, others, keep)
    versions_gone = [version for version in surplus if now - version.replaced >= older_than]
    current = {file.hash for file in manifest.named_files} if manifest else set()
    current |= {part.key for part in manifest.parts} if manifest else set()
    current |= {version.hash for version in others if version not in versions_gone}
    ours = list(_ours(folder))
    staying = {
        file.name for file in ours if file.key in current or now - file.stat.modified < older_than
    }
    segments = read_segments(folder, [_base(f.name) for f in ours if f.kind == "segment"])
    young = [of for name, of in segments.items() if f"{FOLDER}/{name}" in staying]
    joined = [*young, *(segment.only(current, ()) for segment in segments.values())]
    records = _records(
        folder, [f.key for f in ours if f.kind == "unit record" and f.name in staying]
    )
    records += [found for of in joined for key in of.records if (found := of.record(key))]
    bases = {key for record in records for key in (record.key, record.base)}
    left = {name: segment.only(current, bases) for name, segment in segments.items()}
    indexes = [file.name for file in ours if file.kind == "old index" and file.name in staying]
    staying |= _shards(folder, indexes, records)
    staying |= {f"{FOLDER}/{base}.hashes" for base in bases}
    old = [file for file in ours if file.name not in staying]
    shrunk = {
        f.name: of
        for f in old
        if (of := left.get(_base(f.name))) and (of.records or of.fingerprints)
    }
    kept_folders = needless(folder.parent.parent, older_than)
    return [
        *(file.garbage(folder, now) for file in old if file.name not in shrunk),
        *(
            _shrunk(
                folder, file.garbage(folder, now), segments[_base(file.name)], shrunk[file.name]
            )
            for file in old
            if file.name in shrunk and shrunk[file.name] != segments[_base(file.name)]
        ),
        *(_of_version(version, now) for version in versions_gone),
        *(write for write in _unfinished(folder, now) if write.age >= older_than),
        *(_of_folder(found, now) for found in kept_folders),
    ]


def _shrunk(folder: Location, file: Garbage, whole: UnitSegment, left: UnitSegment) -> Garbage:
    """Units that lie in a segment with others that stay: it is written again without them."""
    gone = [len(line) for key, line in whole.records.items() if key not in left.records]
    return replace(
        file,
        name=f"{file.name}: {len(gone):,} of {len(whole.records):,}",
        bytes=sum(gone),
        discard=partial(shrink, folder, _base(file.name), left, lambda at: at.delete()),
    )


def _base(name: str) -> str:
    return name.rpartition("/")[2]


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


def _ours(folder: Location) -> Iterator[_File]:
    """The files that mdsmix names, by kind."""
    files = dict(folder.list(recursive=True))
    for kind, pattern in _KINDS.items():
        for name, stat in files.items():
            if found := re.fullmatch(pattern, name):
                yield _File(kind, name, found[1], stat)


def _records(folder: Location, keys: Sequence[str]) -> list[UnitRecord]:
    return [record for record in together(partial(read_record, folder), keys) if record]


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
