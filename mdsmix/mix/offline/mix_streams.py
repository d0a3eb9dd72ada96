"""A planned mix, carried out: deal the drawn samples into buckets, shuffle each, publish.

Nothing reaches the target before every drawn shard was read and verified, and no index names what reached it before all of
it is there. The temporary folder needs room for all drawn samples.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mdsmix.encode.pretrained import cache_folder
from mdsmix.errors import Unreachable
from mdsmix.mix.check import Watcher
from mdsmix.mix.offline.buckets import Buckets
from mdsmix.mix.offline.draw import seed_of
from mdsmix.mix.offline.existing import SPLIT, MixRecord, read_record, refuse_replacing
from mdsmix.mix.offline.mix_plan import MixPlan
from mdsmix.mix.offline.publish_mix import publish, store
from mdsmix.mix.offline.take import take
from mdsmix.shards.index import BASENAME, read_index
from mdsmix.shards.lease import Lease, lease
from mdsmix.storage import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class MixOutcome:
    """What stands at the target."""

    target: str
    record: MixRecord
    shards: int
    bytes: int
    "Of all shards as stored."
    has_manifest: bool
    is_new: bool
    seconds: float


def mix_offline(
    plan: MixPlan, out: Location, *, replace: bool, temporary: Path | None, watcher: Watcher
) -> MixOutcome:
    """Publishes the mix as `out`/train, unless it is there already."""
    began, folder = time.monotonic(), out / SPLIT
    if is_new := not _is_published(plan, folder):
        if not replace:
            refuse_replacing(plan, out)
        with lease(folder, watcher.say) as held:
            if not replace:  # who held it until now may have published
                refuse_replacing(plan, out)
            _mix(plan, folder, temporary, watcher, held)
    return _outcome(plan, folder, is_new, time.monotonic() - began)


def _mix(
    plan: MixPlan, folder: Location, temporary: Path | None, watcher: Watcher, held: Lease
) -> None:
    watcher.begin(folder.parent.name, 2 * plan.bytes)
    with _room(temporary, plan.bytes) as buckets_folder:
        buckets = Buckets(buckets_folder, plan.buckets, seed_of(plan.seed, "shuffle"))
        taken = [take(source, plan.seed, buckets, watcher.on_progress) for source in plan.sources]
        stored = store(plan, buckets, folder, watcher.on_progress)
        publish(plan, taken, stored, folder, held)


def _is_published(plan: MixPlan, folder: Location) -> bool:
    """Whether just this mix is there, whole: its record speaks of the plan and of the index."""
    record = read_record(folder)
    if record is None or record.key != plan.key or (folder / BASENAME).stat() is None:
        return False
    return read_index(folder).hash == record.index_hash


@contextmanager
def _room(place: Path | None, size: int) -> Iterator[Path]:
    """A temporary folder that has room for `size` bytes, deleted in the end."""
    parent = place or cache_folder() / "mix"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < size:
            raise Unreachable(
                f"the temporary folder {parent} has {free / 1e9:.1f} GB left, and the drawn samples are "
                f"{size / 1e9:.1f} GB; name a place with more room by --tmp."
            )
        folder = tempfile.TemporaryDirectory(dir=parent)
    except OSError as error:
        raise Unreachable(
            f"no temporary folder can be made in {parent}: {error.strerror}; name another place by --tmp."
        ) from None
    with folder as path:
        yield Path(path)


def _outcome(plan: MixPlan, folder: Location, is_new: bool, seconds: float) -> MixOutcome:
    record, index = read_record(folder), read_index(folder)
    assert record is not None
    return MixOutcome(
        target=str(folder),
        record=record,
        shards=len(index.shards),
        bytes=index.bytes,
        has_manifest=plan.encoding is not None,
        is_new=is_new,
        seconds=seconds,
    )
