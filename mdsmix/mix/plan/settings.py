"""The settings that decide speed and disk, and what each should be, with its reason.

Rules are Streaming's own (streaming/base/dataset.py and shuffle/, 0.12 and 0.13) or are called rules of thumb. None of them changes
which samples an epoch holds; num_canonical_nodes and shuffle_block_size change their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdsmix.mix.plan.figures import NodePlan, Setting
from mdsmix.mix.plan.nodes import block_of, shards_of
from mdsmix.mix.sections import NUM_WORKERS
from mdsmix.mix.streams import Loader
from mdsmix.mix.world import OLD_SHUFFLES, World
from mdsmix.table import size_of
from mdsmix.training.keys import BYTE_UNITS, in_units, whole
from mdsmix.words import does, listed, plural

BATCHES_AHEAD = 8
"Streaming's default of predownload, in batches."
SHARDS_A_BLOCK = 4
"A block of fewer of the largest shards mixes little."
ROOM = 0.9
"Of a disk: the rest is for what else is written there."


def settings_for(
    loader: Loader, node: NodePlan, world: World, disk: int | None
) -> tuple[Setting, ...]:
    """`disk`: bytes that a node has for its cache; None where nobody said."""
    return (
        _canonical(loader, world),
        _block(loader, world),
        _predownload(loader, world),
        _cache_limit(loader, node, disk),
        _workers(loader, world),
    )


def _now(loader: Loader, key: str) -> str | None:
    value = loader.dataset.get(key)
    return None if value is None else str(value)


def _canonical(loader: Loader, world: World) -> Setting:
    is_old = world.algo in OLD_SHUFFLES
    which = f"64 a node under shuffle_algo {world.algo}" if is_old else "one a node"
    now = _now(loader, "num_canonical_nodes")
    if now:
        times, rest = divmod(world.canonical, world.nodes)
        kept = f"{times} parts a node" if not rest else "several nodes share a part"
        return Setting(
            key="num_canonical_nodes",
            now=now,
            use=now,
            rests_on="Streaming's rule",
            why=f"it divides by {plural(world.nodes, 'node')} ({kept}), and decides the order of samples: keep it through the run",
        )
    return Setting(
        key="num_canonical_nodes",
        now=None,
        use=str(world.canonical),
        rests_on="Streaming's default",
        why=f"the default, {which}; written down, a run that starts again on another number of nodes has the same order of samples",
    )


def _block(loader: Loader, world: World) -> Setting:
    key, now = "shuffle_block_size", _now(loader, "shuffle_block_size")
    if world.algo not in ("py1e", "py1br"):
        return Setting(
            key=key,
            now=now,
            use=None,
            rests_on="Streaming's rule",
            why=f"nothing reads it: {'nothing is shuffled' if world.algo == 'none' else f'{world.algo} shuffles without blocks'}",
        )
    block = block_of(loader, world)
    largest = max((shard.samples for s in loader.streams for shard in s.shards), default=0)
    if block >= SHARDS_A_BLOCK * largest:
        said = (
            "what is set" if now else "the default, max(4,000,000 / num_canonical_nodes, 262,144)"
        )
        return Setting(
            key=key,
            now=now,
            use=str(block),
            rests_on="Streaming's rule" if now else "Streaming's default",
            why=f"{said}: it spans {block // max(1, largest):,} of the largest shard ({largest:,} samples), so shards mix",
        )
    return Setting(
        key=key,
        now=now,
        use=str(SHARDS_A_BLOCK * largest),
        rests_on="rule of thumb",
        why=f"the largest shard has {largest:,} samples, and a block of {block:,} mixes it with few others: {SHARDS_A_BLOCK} such shards",
    )


def _predownload(loader: Loader, world: World) -> Setting:
    now, most = _now(loader, "predownload"), BATCHES_AHEAD * world.drawn
    given = whole(loader.dataset.get("predownload"))
    if given is not None and given >= world.drawn:
        return Setting(
            key="predownload",
            now=now,
            use=now,
            rests_on="Streaming's rule",
            why=f"at least the {plural(world.drawn, 'sample')} that a device draws at a time: each worker fetches so far ahead",
        )
    why = f"{BATCHES_AHEAD} batches of {plural(world.drawn, 'sample')}, the default: each worker fetches the shards of so many samples ahead"
    if given is not None:
        why = f"{given:,} is less than the {plural(world.drawn, 'sample')} that a device draws at a time, so batches wait for shards; {why}"
    return Setting(
        key="predownload", now=now, use=str(most), rests_on="Streaming's default", why=why
    )


def _cache_limit(loader: Loader, node: NodePlan, disk: int | None) -> Setting:
    use, why = _limit(loader, node, disk)
    now = _now(loader, "cache_limit")
    if now and use is None and node.remote_streams == len(loader.streams):
        given = in_units(now, BYTE_UNITS) or 0
        least = _least(loader, node)
        if given >= least:
            use, why = (
                now,
                f"it holds what is shuffled at a time, {size_of(least)}; a node reads {size_of(node.kept_bytes)} in the run",
            )
        else:
            why = f"{now} is less than {size_of(least)}, below which shards are fetched again within an epoch; {why}"
    return Setting(key="cache_limit", now=now, use=use, rests_on="Streaming's rule", why=why)


def _least(loader: Loader, node: NodePlan) -> float:
    """Below it Streaming refuses the limit, or fetches the same shards again and again."""
    indexes = sum(len(stream.index.content) for stream in loader.streams)
    return max(4 * node.largest_shard + indexes, node.working_set)


def _limit(loader: Loader, node: NodePlan, disk: int | None) -> tuple[str | None, str]:
    local = [s.name for s in loader.streams if not shards_of(s, loader).is_remote]
    if local:
        return (
            None,
            f"{listed(local)} {does(local, 'lies', 'lie')} on the nodes' own disks alone, and under a limit Streaming would delete the only copy",
        )
    keeps, least = node.kept_bytes + node.largest_shard, _least(loader, node)
    wants = f"a node keeps {size_of(keeps)}, one shard unpacked beside it"
    if disk is None:
        return (
            None,
            f"{wants}; where its disk has less (--disk SIZE), no less than {size_of(least)}: 4 of the largest shard, and all that "
            "is shuffled at a time",
        )
    if keeps <= ROOM * disk:
        return None, f"{wants}, and {size_of(disk)} hold it: nothing is fetched twice"
    if least > ROOM * disk:
        return (
            None,
            f"{size_of(disk)} are too few: {size_of(least)} are needed for 4 of the largest shard and all that is shuffled at a time; take "
            "a smaller shuffle_block_size, more nodes or a larger disk",
        )
    return (
        f"{int(ROOM * disk) >> 20}mb",
        f"{wants}, more than {size_of(disk)}: shards are evicted, and fetched again in later epochs",
    )


def _workers(loader: Loader, world: World) -> Setting:
    given = loader.section.get("num_workers")
    per = "a device" if world.gpus > 1 else "the device"
    return Setting(
        key="num_workers",
        now=None if given is None else str(given),
        use=str(given) if given else str(NUM_WORKERS),
        rests_on="rule of thumb",
        why=f"for {per}, {(whole(given) or NUM_WORKERS) * world.gpus} processes a node, no more than it has processors; nothing was "
        "measured here: `mdsmix bench` measures",
    )


def unheld(settings: Sequence[Setting]) -> Iterator[str]:
    """The settings that a config holds otherwise."""
    for each in settings:
        if each.now is not None and each.use is not None and each.now != each.use:
            yield each.key
