"""Who does the work units of a run: processes of this machine, or a Ray cluster, with what a recipe and its streams ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from mdsmix.convert.ledger import FOLDER
from mdsmix.convert.outcome import Watcher
from mdsmix.convert.planning import Options, StreamPlan
from mdsmix.encode.processor_server import BYTES, processes, shared
from mdsmix.engines.limits import cpu_count, default_cap
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory import is_told
from mdsmix.engines.ray_cluster import address_of
from mdsmix.engines.tasks import Engine
from mdsmix.recipe import Recipe

UNTOLD = (
    "this system does not tell what a process holds (no /proc/PID/smaps_rollup), so --memory is not enforced: "
    "give fewer --workers where memory is short"
)


def engine_of(
    recipe: Recipe, plans: Sequence[StreamPlan], options: Options, watcher: Watcher
) -> Engine:
    address = address_of(options.engine)
    if address is None:
        return local_engine(plans, options, watcher)
    from mdsmix.engines.ray_engine import RayEngine, RaySettings

    return RayEngine(
        RaySettings(
            address=address,
            pool=PoolSettings(
                workers=options.workers or 0,
                memory=options.memory or 0,
                aside=BYTES if _counts(plans) else 0,
                beside=processes,
                set_aside=options.quarantine_crashes,
            ),
            local=() if recipe.shared else _local_places(plans),
            meeting=plans[0].job.folder / FOLDER,
        )
    )


def _local_places(plans: Sequence[StreamPlan]) -> list[str]:
    """Folders that tasks read and write, those of this machine."""
    found = {plan.job.root.url: plan.job.root.is_store for plan in plans}
    for plan in plans:
        found |= {file.location.parent.url: file.location.is_store for file in plan.files}
        if root := plan.job.images_root:
            found[root.url] = root.is_store
    return [url for url, is_store in found.items() if not is_store]


def local_engine(plans: Sequence[StreamPlan], options: Options, watcher: Watcher) -> LocalEngine:
    """A process per processor; one more with a store, so that one loads or uploads while the others tokenize."""
    if not is_told():
        watcher.say(UNTOLD)
    with_store = any(
        plan.job.folder.is_store or any(file.location.is_store for file in plan.files)
        for plan in plans
    )
    return LocalEngine(
        PoolSettings(
            workers=options.workers or cpu_count() + with_store,
            memory=options.memory or default_cap(),
            aside=BYTES if _counts(plans) else 0,
            beside=processes,
            set_aside=options.quarantine_crashes,
        )
    )


def counting(plans: Sequence[StreamPlan]) -> AbstractContextManager[None]:
    """The workers of streams of images ask one process how many tokens these become."""
    return shared() if _counts(plans) else nullcontext()


def _counts(plans: Sequence[StreamPlan]) -> bool:
    """Whether tokens of images are counted."""
    return any(plan.job.processor for plan in plans)
