"""The last writes of a publication: shards to where the index names them, the manifest, and the index last.

In place, the index of the target is replaced. As a version, a new folder is filled and then the manifest in the target
names it; what the version holds is not kept in the target too. Every step is done as a whole or not at all, and is skipped
where it is done, so the next run completes one that was killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from mdsmix.convert.job import Job
from mdsmix.convert.target_state import TargetState
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.index import Index, find_index
from mdsmix.shards.lease import Lease
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.published import named_version
from mdsmix.shards.revisions import Revision, publish_in_place, refuse_crossed, swap
from mdsmix.shards.shard_files import (
    REPLACED,
    copy_missing,
    keep_index,
    refuse_links,
    superseded,
    write_if_new,
)
from mdsmix.storage import Location, together


def put_shards(job: Job, index: Index) -> None:
    """Brings the shards of the index, wherever they lie in the job's folders, to where it is to be published."""
    place = job.place(index.hash)
    if job.is_versioned:
        refuse_links(place.parent, place.name)
        _refuse_other(place, index)
    copy_missing(place, index.files, job.shard_folders)


def put(job: Job, index: Index, manifest: Manifest, held: Lease) -> None:
    """Makes the index, whose shards lie in their place, what is published. Nothing is written where it is so, and
    nothing where another published since the lease was lost."""
    if job.is_versioned:
        _put_version(job, index, manifest, held)
        return
    _mark_replaced(job, job.folder)
    publish_in_place(job.folder, index, manifest.to_bytes(), held)


def _put_version(job: Job, index: Index, manifest: Manifest, held: Lease) -> None:
    place = job.place(index.hash)
    _fill(place, index, manifest, job.folder)
    before = Revision.of(job.folder / manifest_file.BASENAME)
    held.confirm()
    _mark_replaced(job, place)
    refuse_crossed(swap(before, manifest.to_bytes()), held)
    _tidy(job.folder, index, held)


def _tidy(folder: Location, index: Index, held: Lease) -> None:
    """Deletes from the target what the version has made needless: the index of a stream that was published in place, which
    is kept as a replaced one, and shards that lie in the version too. Where the lease was lost they stay for the next run."""
    old = Revision.of(folder / index_file.BASENAME)
    if old.content is not None:
        keep_index(folder, old.content)
        if held.is_held():
            old.at.delete()
    here = [name for name, _ in folder.list()]
    together(held.delete, _second_copies(folder, here, index))


def is_put(job: Job, manifest: Manifest, target: TargetState) -> bool:
    """Whether `put` has nothing to do: the manifest names this index, and the listing shows every shard of it."""
    index = target.index
    if index is None or index.hash != manifest.index_hash:
        return False
    if any(file.missing_from(target.stored) for file in index.files):
        return False
    if any(file.stored.missing_from(target.files) for file in manifest.named_files):
        return False
    if manifest_file.BASENAME not in target.stored:
        return False
    if not job.is_versioned:
        return True
    return not target.has_index and not _second_copies(job.folder, target.files, index)


def _index_in(folder: Location) -> Index | None:
    """None where there is none, or a damaged one, which is written again."""
    with suppress(Unreachable):
        return find_index(folder)
    return None


def _refuse_other(version: Location, index: Index) -> None:
    held = _index_in(version)
    if held and held.hash != index.hash and held.hash[:8] == index.hash[:8]:
        raise MdsmixError(
            f"{version} holds another version whose hash begins with the same 8 digits, and versions never change; "
            "publish under another stream name, or delete that one by `mdsmix gc --keep`."
        )


def _fill(version: Location, index: Index, manifest: Manifest, target: Location) -> None:
    """Writes the manifest and the index of a version. A manifest that is there and names this index stays: where other
    sources gave the same shards, only the target's manifest changes."""
    if not _has_manifest(version, index):
        if beside := [file.stored for file in manifest.named_files]:
            copy_missing(version, beside, [target])
        write_if_new(version / manifest_file.BASENAME, manifest.to_bytes())
    write_if_new(version / index_file.BASENAME, index.content)


def _has_manifest(version: Location, index: Index) -> bool:
    """And all that it names."""
    with suppress(Unreachable):
        found = read_manifest(version)
        if found is None or found.index_hash != index.hash:
            return False
        here = dict(version.list()) if found.named_files else {}
        return not any(file.stored.missing_from(here) for file in found.named_files)
    return False


def _mark_replaced(job: Job, place: Location) -> None:
    """Where another version is current, notes for `mdsmix gc` that it is replaced now. Nobody asks for one where nothing was."""
    if not job.versions:
        return
    with suppress(Unreachable):  # a damaged manifest names none
        before = named_version(job.folder)
        if before and before != place and (before / index_file.BASENAME).stat():
            at = job.folder / REPLACED.format(hash=before.name[-8:])
            at.write(before.name.encode())


def _second_copies(folder: Location, here: Iterable[str], index: Index) -> list[Location]:
    """Shards of the version that lie in the target too and that no replaced index of the target names, since running jobs
    may read by one. `here`: the names of the target's files."""
    names = {shard.stored.basename for shard in index.shards}
    twice = [name for name in here if name in names]
    if not twice:
        return []
    read = {shard.stored.basename for old in superseded(folder) for shard in old.shards}
    return [folder / name for name in twice if name not in read]
