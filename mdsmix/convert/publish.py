"""Unit records -> a published stream: the last part made of leftovers, the index and the manifest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mdsmix import __version__
from mdsmix.convert.advice import advice
from mdsmix.convert.job import Job
from mdsmix.convert.ledger import UnitRecord
from mdsmix.convert.pretrained_folders import tokenizer_card
from mdsmix.convert.put import is_put, put, put_shards
from mdsmix.convert.target_state import TargetState
from mdsmix.convert.verdict import refuse_too_many_bad
from mdsmix.errors import MdsmixError, TooManyBadRecords
from mdsmix.kinds.assemble import JoinedRows
from mdsmix.kinds.membership import NOT_HELD_OUT
from mdsmix.shapes.where import NO_FIELD, parse_where
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Index, make_index
from mdsmix.shards.lease import Lease
from mdsmix.shards.manifest import FORMAT_VERSION, Manifest, UnitShards
from mdsmix.shards.shard_files import distinct, store_shards
from mdsmix.shards.side_files import LISTED, SourceEntry, named_anew, store_sources
from mdsmix.words import likest_first, listed


def publish(
    job: Job,
    units: Sequence[UnitRecord],
    sources: list[SourceEntry],
    held: Lease,
    noticed: Records | None = None,
) -> tuple[Manifest, Index]:
    """Makes the units, in the order of the plan, the stream's content. Nothing is written where nothing changed.
    `noticed`: counts that no unit knows for itself."""
    last = _join_leftovers(job, units) if job.joins_units else None
    units = [*units, last] if last else units
    records = sum((unit.records for unit in units), noticed or Records())
    totals = sum((unit.totals for unit in units), Totals())
    _refuse_losses(job, records, totals)
    shards = distinct([shard for unit in units for shard in unit.shards])
    side_files = named_anew([side for unit in units for side in unit.side_files], shards)
    index = make_index(shards)
    put_shards(job, index)
    source_parts = store_sources(job.folder, sources) if len(sources) > LISTED else []
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version=__version__,
        encoding=job.encoding,
        tokenizer=tokenizer_card(job),
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
    )
    put(job, index, manifest, held)
    return manifest, index


def is_published(job: Job, manifest: Manifest, target: TargetState, keys: list[str]) -> bool:
    """Whether the manifest at the target says just these units, and the index is the one it names."""
    last = [leftover_key(job, keys)] if job.joins_units else []
    parts = [part.key for part in manifest.parts]
    if parts not in (keys, keys + last) or manifest.tool_version != __version__:
        return False
    if manifest.encoding.duplicates != job.encoding.duplicates:
        return False
    if not all(map(job.trusts, manifest.backend.split(" + "))):
        return False
    return is_put(job, manifest, target)


def leftover_key(job: Job, keys: list[str]) -> str:
    """The key of the last part: what is left over follows from the units before it."""
    return job.key("leftovers " + " ".join(keys))


def _join_leftovers(job: Job, units: Sequence[UnitRecord]) -> UnitRecord | None:
    """The units' leftovers, in order, as the stream's last part; less than one row is lost, and counted."""
    rows = JoinedRows(job.layout, job.encoding.max_seq_len, job.tokenizer.dtype)
    for unit in units:
        if unit.leftover:
            rows.add_tokens(unit.leftover_tokens(job.tokenizer.dtype))
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
    """What must never be published: counts that do not add up, or a stream without a sample."""
    if not records.adds_up:
        raise MdsmixError(
            f"stream {job.name}: {records.read} records read, but {records.written} written, {records.dropped} "
            f"filtered and {records.bad} quarantined; nothing is published. This is a defect of mdsmix."
        )
    if not totals.samples:
        raise TooManyBadRecords(
            f"stream {job.name}: not one sample came of its source ({_why_empty(records, totals)}), and Streaming "
            f"refuses an empty stream; nothing is published. {_look(job, records)}"
        )
    refuse_too_many_bad(job, records)


def _look(job: Job, records: Records) -> str:
    if NO_FIELD in records.filtered and job.encoding.where:
        return _fields(job.encoding.where, job.encoding.fields.values(), records)
    if records.bad:
        return f"{' '.join(advice(job, records))} The bad records lie in {job.target}/quarantine; mdsmix quarantine shows them.".lstrip()
    if set(records.filtered) == {NOT_HELD_OUT}:
        return "No record is among the share that is held out: raise the stream's holdout, or take it out."
    if records.read and not records.sampled and not job.limit:
        return "No record is in the sample that is taken of it: raise the stream's sample, or the budget that decides it."
    if job.limit:
        return f"--limit {job.limit} reads no more of it: raise it, or leave it out."
    return "Look at the source, or take the stream out of the recipe."


def _fields(where: str, read: Collection[str], records: Records) -> str:
    """The fields of a condition that no record may have, and the fields that the records have."""
    roots = {name.partition(".")[0] for name in parse_where(where).roots}
    wanted = sorted(roots.difference(read) or roots)
    others = likest_first(wanted[0], [*records.unread, *records.unseen])
    return (
        f"The condition where: {where} reads {' and '.join(wanted)}, and {records.filtered[NO_FIELD]:,} records lack it; they have the "
        f"fields {listed([*others, *read], 12)}."
    )


def _why_empty(records: Records, totals: Totals) -> str:
    if not records.read:
        return "it holds no record"
    reasons = {**records.filtered, **records.quarantined}
    said = [f"{n} {reason}" for reason, n in reasons.items()]
    if totals.lost_tokens:
        said.append(f"{totals.lost_tokens} tokens, less than one row")
    return f"{records.read} records: {', '.join(said)}"
