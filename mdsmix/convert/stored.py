"""What lay at a target when the work on it began: two listings and the packs of unit records, instead of a request for every shard
and every unit record.

A listed file stays, because `gc` and `repair` delete only under the lease, which this run holds. Files that the run itself
writes are not listed, so a shard that two units share is written twice, with the same bytes. Forked workers share the
listing; any other process has none and asks for each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, RECORD
from mdsmix.convert.packs import Packed, read_packs
from mdsmix.shards.index import StoredFile
from mdsmix.storage import Location, together


@dataclass(frozen=True, slots=True)
class Stored:
    """Names of unit records, and names and sizes of shards: a file of another size is not the shard."""

    kept: frozenset[str] = frozenset()
    "Files of units: their records, fingerprints and bad records."
    packed: Packed = field(default_factory=Packed)
    "Records and fingerprints that are no files of their own."
    shards: frozenset[tuple[str, int]] = frozenset()
    "In the target."
    versions: frozenset[tuple[str, int]] = frozenset()

    @property
    def records(self) -> Iterator[str]:
        """The keys of all unit records."""
        yield from self.packed.records
        yield from filter(RECORD.fullmatch, self.kept)

    def has(self, file: StoredFile) -> bool:
        shard = file.basename, file.bytes
        return shard in self.shards or shard in self.versions


_listed: dict[str, Stored] = {}


def stored_at(job: Job) -> Stored | None:
    """What was listed of the job's target; None in a process that knows of no listing."""
    return Stored() if job.is_new else _listed.get(job.target)


@contextmanager
def listing(job: Job) -> Iterator[Stored]:
    """Inside of the block `stored_at` answers. Nothing is listed of a target that was just seen to be empty."""
    _listed[job.target] = Stored() if job.is_new else list_stored(job)
    try:
        yield _listed[job.target]
    finally:
        _listed.pop(job.target, None)  # gone where another run of this process was at it


def list_stored(job: Job) -> Stored:
    target, *versions = job.shard_folders
    kept, shards, *others = together(_sizes, [target / FOLDER, target, *versions])
    names = frozenset(name for name, _ in kept)
    packed = read_packs(target, names, alone=names)
    return Stored(names, packed, shards, frozenset().union(*others))


def _sizes(folder: Location) -> frozenset[tuple[str, int]]:
    return frozenset((name, stat.size) for name, stat in folder.list())
