"""Marks at a target (`mdsmix.overlap`): one a work unit, `.mdsmix/<key>.grams`, and one of the stream, a side file that the manifest names.

The stream's is put together when it is published. Of units that did not change it takes what the published one holds, so an added file
costs one read, not one a unit. Units that older versions made have none; their samples are in no mark until they are
converted anew, and the stream's says which units it is of. Those of many units lie in packs (packs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import xxhash

from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, UnitRecord
from mdsmix.convert.packs import read_stored
from mdsmix.convert.stored import stored_at
from mdsmix.overlap.marks import KIND, Mark, UnitMark, halvings_for, parse
from mdsmix.shards.beside import SideFile
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.writing import write_once
from mdsmix.storage import Location

Note = Callable[[str, bytes], None]


def keep_mark(folder: Location, mark: UnitMark) -> None:
    """Writes the mark of a unit."""
    (folder / FOLDER / mark_name(mark.key)).write(Mark((mark,)).to_bytes())


def mark_name(key: str) -> str:
    return f"{key}.grams"


stored_marks = partial(read_stored, mark_name)
"Those of all keys as they are stored, in their order."


def store_mark(
    job: Job,
    units: Sequence[UnitRecord],
    last: UnitMark | None,
    published: Manifest | None,
    note: Note | None = None,
) -> list[SideFile]:
    """Writes the stream's mark; none where no unit has one. `last`: that of the part that is made of leftovers; `note` is told of
    each mark of a unit that is read, as it is stored."""
    marked = [unit for unit in units if unit.marked is not None]
    if not marked:
        return []
    halvings = halvings_for(sum(unit.marked or 0 for unit in marked) + (last.count if last else 0))
    found = _published(job.folder, published, halvings)
    new = dict.fromkeys(unit.key for unit in marked if unit.key not in found)
    found |= _of_units(job, list(new), halvings, note)
    marks = [found[unit.key].below(halvings) for unit in marked if unit.key in found]
    content = Mark((*marks, last.below(halvings)) if last else tuple(marks), halvings).to_bytes()
    digest = xxhash.xxh128_hexdigest(content)
    name = f"{digest}.{KIND}.side"
    stored = stored_at(job)
    write_once(job.folder / name, [memoryview(content)], stored.shards if stored else None)
    return [SideFile(name=name, bytes=len(content), hash=digest, kind=KIND, shard="")]


def _of_units(
    job: Job, keys: Sequence[str], halvings: int, note: Note | None
) -> Iterator[tuple[str, UnitMark]]:
    """By their keys, the marks of units as far down as they are wanted; not those that are gone or damaged."""
    stored = stored_at(job)
    packed = stored.packed.marks if stored else {}
    for key, content in zip(keys, stored_marks(job.folder, keys, packed), strict=True):
        mark = parse(content) if content else None
        if content and mark and mark.units[0].key == key:
            yield key, mark.units[0].below(halvings)
            if note:
                note(key, content)


def _published(folder: Location, manifest: Manifest | None, halvings: int) -> dict[str, UnitMark]:
    """By their keys, the marks that the published one holds, as far down as they are wanted."""
    sides = manifest.side_files if manifest else []
    for side in sides:
        if side.kind == KIND:
            found = (folder / side.name).fetch()
            mark = parse(found[1]) if found else None
            if mark and mark.halvings <= halvings:
                return {unit.key: unit for unit in mark.units}
    return {}
