"""What lies at a stream's target when a run begins: a listing, the manifest, and the index that it names.

That is all that is asked of a stream that is up to date: three requests, of many streams at a time. Of a stream that has
work it is looked at again when its turn comes, since hours may have passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from mdsmix.convert.job import Job
from mdsmix.errors import Unreachable
from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.index import Index, find_description, parse_index
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.published import QUARANTINE
from mdsmix.storage import Location, Stat


@dataclass(frozen=True, kw_only=True)
class TargetState:
    """One look at a target."""

    files: Mapping[str, Stat] = field(default_factory=dict)
    "Directly in it."
    folders: frozenset[str] = frozenset()
    manifest: Manifest | None = None
    damage: Unreachable | None = None
    "Why the manifest that is there cannot be read."
    index_content: bytes | None = None
    "As stored, of what the manifest says is published."
    stored: Mapping[str, Stat] = field(default_factory=dict)
    "The files beside that index: the target's own, or a version's."
    quarantined: tuple[str, ...] = ()
    "Names in the quarantine."

    @cached_property
    def index(self) -> Index | None:
        """None where there is none, or a damaged one, which is written again. Where a file of the source is new nobody asks, and
        10,000 shards take half a second."""
        if self.index_content is None:
            return None
        with suppress(Unreachable):
            return parse_index(self.index_content, index_file.BASENAME)
        return None

    @property
    def is_empty(self) -> bool:
        return not self.files and not self.folders

    @property
    def has_index(self) -> bool:
        """In the target itself, as a stream that is published in place has it."""
        return index_file.BASENAME in self.files


def state_of(job: Job) -> TargetState:
    """Looks at the job's target; Unreachable where the store cannot be asked."""
    files, folders = job.folder.entries()
    manifest, damage = _manifest(job.folder) if manifest_file.BASENAME in files else (None, None)
    content, stored = None, files
    if manifest:
        place = job.place(manifest.index_hash)
        stored = files if place == job.folder else dict(place.list())
        content = _index(place) if index_file.BASENAME in stored else None
    quarantine = (job.folder / QUARANTINE).list() if QUARANTINE in folders else ()
    return TargetState(
        files=files,
        folders=frozenset(folders),
        manifest=manifest,
        damage=damage,
        index_content=content,
        stored=stored,
        quarantined=tuple(name for name, _ in quarantine),
    )


def _manifest(folder: Location) -> tuple[Manifest | None, Unreachable | None]:
    try:
        return read_manifest(folder), None
    except Unreachable as error:
        return None, error


def _index(folder: Location) -> bytes | None:
    with suppress(Unreachable):
        return find_description(folder / index_file.BASENAME)
    return None
