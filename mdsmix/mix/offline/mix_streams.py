"""Carries out a planned mix: deals the drawn samples into buckets, shuffles each, publishes.

Nothing reaches the target before every drawn shard was read and verified, and the index is written
after all shards are there. The temporary folder needs room for all drawn samples.

Every mix leaves a record, `.mdsmix/mixed`, beside its manifest or in place of one. Its key says
whether the wanted mix is there already. The record also proves that `mdsmix mix` made the stream,
so that it may be replaced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from dataclasses import replace as replaced
from pathlib import Path

import orjson
import xxhash

from mdsmix import schema
from mdsmix.cache import cache_folder
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.mix.offline.drawn_samples import Buckets, deal_stream, derive_seed
from mdsmix.mix.offline.mix_plan import MixPlan
from mdsmix.recipe import Recipe
from mdsmix.shards.counts import Totals
from mdsmix.shards.index import INDEX, Index, Shard, make_index, parse_index
from mdsmix.shards.lease import Lease, hold_lease, publish_in_place
from mdsmix.shards.manifest import MixedStream, UnitShards
from mdsmix.shards.shard_files import (
    copy_missing,
    make_names_distinct,
    refuse_links,
    store_shards,
    write_if_changed,
)
from mdsmix.shards.verification import ReadingWatcher
from mdsmix.storage import Location

RECORD = ".mdsmix/mixed"
SPLIT = "train"
"Only streams of this split are mixed, so the mix has this split."


@dataclass(frozen=True, kw_only=True)
class MixRecord:
    """The draw of a published mix: its streams, seed and index."""

    key: str
    draw: str
    "`key` and `draw` are those of MixPlan."
    index_hash: str
    seed: int
    mixed: list[MixedStream]

    def to_bytes(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


@dataclass(frozen=True, kw_only=True)
class MixOutcome:
    """The mix that is published at the target."""

    target: str
    record: MixRecord
    index: Index
    has_manifest: bool
    is_new: bool


def refuse_sources(recipe: Recipe, out: Location) -> None:
    """RecipeError where the mix would land in the folder of a stream of the recipe."""
    for name, spec in recipe.streams.items():
        if f"{_real(str(out / SPLIT))}/".startswith(f"{_real(recipe.published(spec))}/"):
            raise RecipeError(
                f"--out {out} is where the stream {name} of the recipe lies, which the mix would overwrite; publish "
                "it elsewhere."
            )


def _real(place: str) -> str:
    return place if "://" in place else os.path.realpath(place)


def mix_offline(
    plan: MixPlan, out: Location, *, replace: bool, temporary: Path | None, watcher: ReadingWatcher
) -> MixOutcome:
    """Publishes the mix as `out`/train, unless it is there already."""
    folder = out / SPLIT
    refuse_links(out, SPLIT)
    record, found = _read_record(folder), (folder / INDEX).fetch()
    content = found[1] if found else b""
    is_there = record and (record.key, record.index_hash) == (
        plan.key,
        xxhash.xxh128_hexdigest(content),
    )
    if record and content and is_there:
        index = parse_index(content, str(folder))
    else:
        _refuse_replacing(plan, out, replace)
        with hold_lease(folder, watcher.say) as held:
            _refuse_replacing(plan, out, replace)  # the last holder of the lease may have published
            record, index = _mix(plan, folder, temporary or cache_folder() / "mix", watcher, held)
    return MixOutcome(
        target=str(folder),
        record=record,
        index=index,
        has_manifest=plan.manifest is not None,
        is_new=not is_there,
    )


def _read_record(folder: Location) -> MixRecord | None:
    """The record of the mix in `folder`; None where there is none that can be read."""
    found = (folder / RECORD).fetch()
    return schema.parse_json_if_fit(MixRecord, found[1]) if found else None


def _refuse_replacing(plan: MixPlan, out: Location, replace: bool) -> None:
    """RecipeError where `out` holds another stream than an earlier mix of the same draw (streams,
    weights, seed).
    """
    folder = out / SPLIT
    held = next((f for f in (out, folder) if (f / INDEX).stat()), None)
    record = _read_record(folder) if held is folder else None
    if not replace and held is not None and (record is None or record.draw != plan.draw):
        was = (
            f"another draw, {record.draw}" if record else "a stream that `mdsmix mix` did not make"
        )
        raise RecipeError(
            f"{held} holds {was}, and this one is {plan.draw}; publish elsewhere, or pass --replace to put the new mix in its place."
        )


def _mix(
    plan: MixPlan, folder: Location, temporary: Path, watcher: ReadingWatcher, held: Lease
) -> tuple[MixRecord, Index]:
    """Publishes the drawn samples: shards, record and manifest, and the index last."""
    watcher.begin(folder.parent.name, 2 * plan.bytes)
    with _room(temporary, plan.bytes) as buckets_folder:
        buckets = Buckets(buckets_folder, plan.buckets, derive_seed(plan.seed, "shuffle"))
        drawn = [deal_stream(source, plan.seed, buckets, watcher) for source in plan.sources]
        shards = _store(plan, buckets, folder, watcher)
    index = make_index(make_names_distinct(shards))
    copy_missing(folder, index.files, [folder])
    record = MixRecord(
        key=plan.key,
        draw=plan.draw,
        index_hash=index.hash,
        seed=plan.seed,
        mixed=[mixed for mixed, _ in drawn],
    )
    manifest = plan.manifest and replaced(
        plan.manifest,
        totals=sum((totals for _, totals in drawn), Totals()),
        parts=[UnitShards(key=plan.key, shards=len(shards), samples=index.samples)],
        index_hash=index.hash,
        mixed=record.mixed,
    )
    held.confirm()
    write_if_changed(folder / RECORD, record.to_bytes())
    publish_in_place(folder, index, manifest.to_bytes() if manifest else None, held)
    return record, index


@contextmanager
def _room(parent: Path, size: int) -> Iterator[Path]:
    """A temporary folder with room for `size` bytes, deleted in the end. Unreachable where there is
    no room.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < size:
            raise Unreachable(
                f"the temporary folder {parent} has {free / 1e9:.1f} GB left, and the drawn samples are "
                f"{size / 1e9:.1f} GB; name a place with more room by --tmp."
            )
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise Unreachable(
            f"the temporary folder {parent} cannot be used: {error.strerror}; nothing is published. Name another place with --tmp."
        ) from None


def _store(
    plan: MixPlan, buckets: Buckets, folder: Location, watcher: ReadingWatcher
) -> list[Shard]:
    """Writes the shards of all buckets; no index names them yet."""
    shards = list[Shard]()
    for rows in buckets.shuffled():
        shards += store_shards(folder, plan.layout, rows)
        watcher.on_progress(len(rows.values), 0)
        del rows  # makes room for the next bucket
    return shards
