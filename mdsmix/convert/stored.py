"""What lay at a target when the work on it began: two listings, instead of a request for every shard and every unit record.

A listed file stays, because `gc` and `repair` delete only under the lease, which this run holds. Files that the run itself
writes are not listed, so a shard that two units share is written twice, with the same bytes. Forked workers share the
listing; any other process has none and asks for each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER
from mdsmix.shards.index import StoredFile
from mdsmix.storage import Location, together


@dataclass(frozen=True, slots=True)
class Stored:
    """Names of unit records, and names and sizes of shards: a file of another size is not the shard."""

    kept: frozenset[str] = frozenset()
    "Unit records and their bad records."
    shards: frozenset[tuple[str, int]] = frozenset()
    "In the target."
    versions: frozenset[tuple[str, int]] = frozenset()

    def has(self, file: StoredFile) -> bool:
        shard = file.basename, file.bytes
        return shard in self.shards or shard in self.versions


_listed: dict[str, Stored] = {}


def stored_at(job: Job) -> Stored | None:
    """What was listed of the job's target; None in a process that knows of no listing."""
    return Stored() if job.is_new else _listed.get(job.target)


@contextmanager
def listing(job: Job) -> Iterator[None]:
    """Inside of the block `stored_at` answers. Nothing is listed of a target that was just seen to be empty."""
    _listed[job.target] = Stored() if job.is_new else _list(job)
    try:
        yield
    finally:
        del _listed[job.target]


def _list(job: Job) -> Stored:
    target, *versions = job.shard_folders
    kept, shards, *others = together(_sizes, [target / FOLDER, target, *versions])
    return Stored(frozenset(name for name, _ in kept), shards, frozenset().union(*others))


def _sizes(folder: Location) -> frozenset[tuple[str, int]]:
    return frozenset((name, stat.size) for name, stat in folder.list())
