"""Unit records -> a published stream: the last part made of leftovers, the index and the manifest;
and the last writes.

In place, the index of the target is replaced. As a version, a new folder is filled and then the
manifest in the target names it; what the version holds is not kept in the target too. Every step is
done as a whole or not at all, and is skipped where it is done, so the next run completes one that
was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from mdsmix import __version__
from mdsmix.conversion.bad_records import advice, refuse_too_many_bad
from mdsmix.conversion.job import Job
from mdsmix.conversion.target import TargetState
from mdsmix.conversion.unit_files import UnitRecord
from mdsmix.errors import MdsmixError, TooManyBadRecords, Unreachable
from mdsmix.kinds.assemble import JoinedRows
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import INDEX, Index, make_index
from mdsmix.shards.lease import (
    REPLACED_MARK,
    Lease,
    Revision,
    keep_index,
    publish_in_place,
    read_replaced_indexes,
    replace_unchanged,
)
from mdsmix.shards.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    TokenizerCard,
    UnitShards,
    read_manifest,
)
from mdsmix.shards.published import find_contradictions, find_named_version
from mdsmix.shards.shard_files import (
    copy_missing,
    make_names_distinct,
    refuse_links,
    store_shards,
    write_if_changed,
)
from mdsmix.shards.side_files import MOST_LISTED, SourceEntry, rename_shards, store_sources
from mdsmix.storage import Location, map_threads


def publish(
    job: Job,
    units: Sequence[UnitRecord],
    sources: list[SourceEntry],
    held: Lease,
    noticed: Records,
) -> tuple[Manifest, Index]:
    """Makes the units, in the order of the plan, the stream's content. Nothing is written where
    nothing changed. `noticed`: counts that no unit knows for itself.
    """
    last = _join_leftovers(job, units) if job.kind.joins_units else None
    units = [*units, last] if last else units
    records = sum((unit.records for unit in units), noticed)
    totals = sum((unit.totals for unit in units), Totals())
    _refuse_losses(job, records, totals)
    shards = make_names_distinct([shard for unit in units for shard in unit.shards])
    side_files = rename_shards([side for unit in units for side in unit.side_files], shards)
    index = make_index(shards)
    # Shards that lie in another of the job's folders are brought to where it is to be published.
    if job.is_versioned:
        refuse_links(job.folder.parent, job.place(index.hash).name)
    copy_missing(job.place(index.hash), index.files, job.shard_folders)
    source_parts = store_sources(job.folder, sources) if len(sources) > MOST_LISTED else []
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version=__version__,
        encoding=job.encoding,
        tokenizer=TokenizerCard.of(job.tokenizer),
        backend=" + ".join(sorted({unit.backend for unit in units if unit.backend})),
        totals=totals,
        records=records,
        sources=[] if source_parts else sources,
        source_parts=source_parts,
        side_files=side_files,
        parts=[
            UnitShards(key=unit.key, shards=len(unit.shards), samples=unit.totals.samples)
            for unit in units
        ],
        index_hash=index.hash,
        complete=True,
        source=dict(job.source),
        formats=dict(job.formats),
    )
    put(job, index, manifest, held)
    return manifest, index


def is_published(job: Job, manifest: Manifest, target: TargetState, keys: list[str]) -> bool:
    """Whether the manifest at the target says just these units, it names the index that lies there,
    and the listing shows every shard.
    """
    last = [leftover_key(job, keys)] if job.kind.joins_units else []
    return (
        [part.key for part in manifest.parts] in (keys, keys + last)
        and manifest.tool_version == __version__
        and manifest.encoding.duplicates == job.encoding.duplicates
        and manifest.formats == job.formats
        and all(map(job.trusts, manifest.backend.split(" + ")))
        and target.index is not None
        and not any(True for _ in find_contradictions(target.index, manifest, target.stored))
        and not any(file.stored.find_problem(target.files) for file in manifest.named_files)
        and MANIFEST in target.stored
        and not (job.is_versioned and INDEX in target.files)
    )


def leftover_key(job: Job, keys: list[str]) -> str:
    """The key of the last part: what is left over follows from the units before it."""
    return job.key("leftovers " + " ".join(keys))


def _join_leftovers(job: Job, units: Sequence[UnitRecord]) -> UnitRecord | None:
    """The units' leftovers, in order, as the stream's last part; less than one row is lost, and
    counted.
    """
    rows = JoinedRows(job.layout, job.encoding.max_seq_len, job.tokenizer.dtype)
    for unit in units:
        if unit.leftover:
            tokens = unit.leftover_tokens(job.tokenizer.dtype)
            rows.keep({"tokens": Ragged.from_rows([tokens], tokens.dtype)})
    full, totals, rest, _ = rows.finish()
    if not len(full) and not len(rest):
        return None
    return UnitRecord(
        key=leftover_key(job, [unit.key for unit in units]),
        backend="",
        shards=store_shards(job.folder, job.layout, full),
        totals=replace(totals, lost_tokens=len(rest)),
        records=Records(),
    )


def _refuse_losses(job: Job, records: Records, totals: Totals) -> None:
    """Refuses counts that do not add up (MdsmixError), a stream without a sample and too many bad
    records (TooManyBadRecords).
    """
    if not records.adds_up:
        raise MdsmixError(
            f"stream {job.name}: {records.read} records read, but {records.written} written, {records.dropped} "
            f"filtered and {records.bad} quarantined; nothing is published. This is a defect of mdsmix."
        )
    if not totals.samples:
        reasons = {**records.filtered, **records.quarantined}
        said = [f"{n} {reason}" for reason, n in reasons.items()]
        said += [f"{totals.lost_tokens} tokens, less than a row"] if totals.lost_tokens else []
        if records.bad:
            hint = f"{advice(job, records)} The bad records lie in {job.target}/quarantine (mdsmix quarantine shows them)."
        else:
            hint = "Look at the source, and at where, sample, budget, holdout and --limit, which leave records out."
        raise TooManyBadRecords(
            f"stream {job.name}: not one sample came of its source ({records.read} records: {', '.join(said) or 'none'}), and Streaming "
            f"refuses an empty stream; nothing is published. {hint}"
        )
    refuse_too_many_bad(job, records)


def put(job: Job, index: Index, manifest: Manifest, held: Lease) -> None:
    """Publishes the index, whose shards lie in their place. Nothing is written where it is
    published already, or where another run published since the lease was lost.
    """
    place = job.place(index.hash)
    if not job.is_versioned:
        _mark_replaced(job, place)
        publish_in_place(place, index, manifest.to_bytes(), held)
        return
    _fill(place, index, manifest, job.folder)
    before = Revision.of(job.folder / MANIFEST)
    held.confirm()
    _mark_replaced(job, place)
    replace_unchanged(before, manifest.to_bytes())
    _tidy(job.folder, index, held)


def _tidy(folder: Location, index: Index, held: Lease) -> None:
    """Deletes from the target what the version has made needless: the index of a stream that was
    published in place, which is kept as a replaced one, and shards that lie in the version too.
    Where the lease was lost they stay for the next run.
    """
    old = Revision.of(folder / INDEX)
    if old.content is not None:
        keep_index(folder, old.content)
        if held.renew():
            old.at.delete()
    # Running jobs may read by a replaced index of the target: the shards that it names stay.
    twice = {shard.stored.basename for shard in index.shards} & {name for name, _ in folder.list()}
    if twice:
        twice -= {
            shard.stored.basename for old in read_replaced_indexes(folder) for shard in old.shards
        }
    map_threads(held.delete, [folder / name for name in twice])


def _fill(version: Location, index: Index, manifest: Manifest, target: Location) -> None:
    """Writes the manifest and the index of a version. A manifest that is there, names this index
    and the same rules stays: if other sources gave the same shards, only the target's manifest
    changes.
    """
    kept = None
    with suppress(Unreachable):  # damaged: it is written anew
        kept = read_manifest(version)
    if kept is None or (kept.index_hash, kept.rules) != (index.hash, manifest.rules):
        kept = manifest
    if beside := [file.stored for file in kept.named_files]:
        copy_missing(version, beside, [target])
    if kept is manifest:
        write_if_changed(version / MANIFEST, manifest.to_bytes())
    write_if_changed(version / INDEX, index.content)


def _mark_replaced(job: Job, place: Location) -> None:
    """Where another version is current, notes for `mdsmix gc` that it is replaced now. Without
    versions the store is not asked.
    """
    if not job.versions:
        return
    with suppress(Unreachable):  # a damaged manifest names none
        before = find_named_version(job.folder)
        if before and before != place and (before / INDEX).stat():
            (job.folder / REPLACED_MARK.format(hash=before.name[-8:])).write(before.name.encode())
