"""Marks at a target (`mdsmix.overlap`): one a work unit, `.mdsmix/<key>.grams`, and one of the stream, a side file that the manifest names.

The stream's is put together when it is published. Of units that did not change it takes what the published one holds, so an added file
costs one read, not one a unit. Units that older versions made have none; their samples are in no mark until they are
converted anew, and the stream's says which units it is of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, UnitRecord
from mdsmix.convert.stored import stored_at
from mdsmix.overlap.marks import KIND, Mark, UnitMark, halvings_for, parse
from mdsmix.shards.beside import SideFile
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.writing import write_once
from mdsmix.storage import Location, together


def keep_mark(folder: Location, mark: UnitMark) -> None:
    """Writes the mark of a unit."""
    _at(folder, mark.key).write(Mark((mark,)).to_bytes())


def store_mark(
    job: Job, units: Sequence[UnitRecord], last: UnitMark | None, published: Manifest | None
) -> list[SideFile]:
    """Writes the stream's mark; none where no unit has one. `last`: that of the part that is made of leftovers."""
    marked = [unit for unit in units if unit.marked is not None]
    if not marked:
        return []
    halvings = halvings_for(sum(unit.marked or 0 for unit in marked) + (last.count if last else 0))
    known = _published(job.folder, published, halvings)
    found = together(lambda unit: _of_unit(job.folder, unit, known, halvings), marked)
    marks = [mark for mark in found if mark]
    content = Mark((*marks, last.below(halvings)) if last else tuple(marks), halvings).to_bytes()
    digest = xxhash.xxh128_hexdigest(content)
    name = f"{digest}.{KIND}.side"
    stored = stored_at(job)
    write_once(job.folder / name, [memoryview(content)], stored.shards if stored else None)
    return [SideFile(name=name, bytes=len(content), hash=digest, kind=KIND, shard="")]


def _of_unit(
    folder: Location, unit: UnitRecord, known: Mapping[str, UnitMark], halvings: int
) -> UnitMark | None:
    """None where it is gone or damaged."""
    mark = known.get(unit.key)
    if mark is None:
        found = _at(folder, unit.key).fetch()
        kept = parse(found[1]) if found else None
        mark = kept.units[0] if kept else None
    return mark.below(halvings) if mark else None


def _published(
    folder: Location, manifest: Manifest | None, halvings: int
) -> Mapping[str, UnitMark]:
    """By their keys, the marks that the published one holds, as far down as they are wanted."""
    sides = manifest.side_files if manifest else []
    for side in sides:
        if side.kind == KIND:
            found = (folder / side.name).fetch()
            mark = parse(found[1]) if found else None
            if mark and mark.halvings <= halvings:
                return {unit.key: unit for unit in mark.units}
    return {}


def _at(folder: Location, key: str) -> Location:
    return folder / FOLDER / f"{key}.grams"
