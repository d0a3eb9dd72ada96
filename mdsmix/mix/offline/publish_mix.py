"""Shuffled rows -> a published stream: shards as they come, then record and manifest, and the index last of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from mdsmix import __version__
from mdsmix.mix.offline.buckets import Buckets
from mdsmix.mix.offline.existing import RECORD, MixRecord
from mdsmix.mix.offline.mix_plan import MixPlan
from mdsmix.mix.offline.take import Taken
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Index, Shard, make_index
from mdsmix.shards.lease import Lease
from mdsmix.shards.manifest import FORMAT_VERSION, Manifest, UnitShards
from mdsmix.shards.revisions import publish_in_place
from mdsmix.shards.shard_files import copy_missing, distinct, store_shards, write_if_new
from mdsmix.storage import Location


@dataclass(frozen=True, slots=True)
class StoredBucket:
    """What a bucket became."""

    shards: list[Shard]
    samples: int


def store(
    plan: MixPlan, buckets: Buckets, folder: Location, on_progress: Callable[[int, int], None]
) -> list[StoredBucket]:
    """Writes the shards of all buckets; no index names them yet."""
    stored = []
    for rows in buckets.shuffled():
        stored.append(StoredBucket(store_shards(folder, plan.layout, rows), len(rows)))
        on_progress(len(rows.body), 0)
        del rows  # the next bucket takes its room
    return stored


def publish(
    plan: MixPlan, taken: list[Taken], stored: list[StoredBucket], folder: Location, held: Lease
) -> MixRecord:
    """Makes the shards the stream's content. Nothing is written where nothing changed."""
    index = make_index(distinct([shard for each in stored for shard in each.shards]))
    copy_missing(folder, index.files, [folder])
    mixed = [each.mixed for each in taken]
    record = MixRecord(key=plan.key, index_hash=index.hash, seed=plan.seed, mixed=mixed)
    manifest = _manifest(plan, taken, stored, index)
    held.confirm()
    write_if_new(folder / RECORD, record.to_bytes())
    publish_in_place(folder, index, manifest.to_bytes() if manifest else None, held)
    return record


def _manifest(
    plan: MixPlan, taken: list[Taken], stored: list[StoredBucket], index: Index
) -> Manifest | None:
    """None where a stream has none: what it holds would be told as known."""
    if plan.encoding is None or plan.tokenizer is None:
        return None
    manifests = [each.source.stream.trusted_manifest for each in taken]
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version=__version__,
        encoding=plan.encoding,
        tokenizer=plan.tokenizer,
        backend=", ".join(sorted({found.backend for found in manifests if found})),
        totals=sum((each.totals for each in taken), Totals()),
        records=Records(),
        sources=[],
        parts=[
            UnitShards(
                key=xxhash.xxh128_hexdigest(f"{plan.key} {number}"),
                shards=len(each.shards),
                samples=each.samples,
            )
            for number, each in enumerate(stored)
        ],
        index_hash=index.hash,
        complete=True,
        mixed=[each.mixed for each in taken],
        seed=plan.seed,
    )
