"""The settings that decide speed and disk, and what each should be, with its reason.

Rules are Streaming's own (streaming/base/dataset.py and shuffle/, 0.12 and 0.13) or are called rules of thumb. None of them changes
which samples an epoch holds; num_canonical_nodes and shuffle_block_size change their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdsmix.mix.plan.figures import NodePlan, RestsOn, Setting
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
RULE: RestsOn = "Streaming's rule"
DEFAULT: RestsOn = "Streaming's default"
THUMB: RestsOn = "rule of thumb"
Advice = tuple[str | None, RestsOn, str]
"What to write, what that rests on, and why."


def settings_for(
    loader: Loader, node: NodePlan, world: World, disk: int | None
) -> tuple[Setting, ...]:
    """`disk`: bytes that a node has for its cache; None where nobody said."""
    found: dict[str, Advice] = {
        "num_canonical_nodes": _canonical(loader, world),
        "shuffle_block_size": _block(loader, world),
        "predownload": _predownload(loader, world),
        "cache_limit": _cache_limit(loader, node, disk),
        "num_workers": _workers(loader, world),
    }
    given = {**loader.dataset, "num_workers": loader.section.get("num_workers")}
    return tuple(
        Setting(
            key=key,
            now=None if given.get(key) is None else str(given[key]),
            use=use,
            rests_on=rests_on,
            why=why,
        )
        for key, (use, rests_on, why) in found.items()
    )


def _canonical(loader: Loader, world: World) -> Advice:
    if world.num_canonical_nodes:
        times, rest = divmod(world.canonical, world.nodes)
        kept = f"{times} parts a node" if not rest else "several nodes share a part"
        why = f"it divides by {plural(world.nodes, 'node')} ({kept}), and decides the order of samples: keep it through the run"
        return str(world.canonical), RULE, why
    is_old = world.algo in OLD_SHUFFLES
    which = f"64 a node under shuffle_algo {world.algo}" if is_old else "one a node"
    why = f"the default, {which}; written down, a run that starts again on another number of nodes has the same order of samples"
    return str(world.canonical), DEFAULT, why


def _block(loader: Loader, world: World) -> Advice:
    if world.algo not in ("py1e", "py1br"):
        shuffles = f"{world.algo} shuffles without blocks"
        return (
            None,
            RULE,
            f"nothing reads it: {'nothing is shuffled' if world.algo == 'none' else shuffles}",
        )
    block, is_set = block_of(loader, world), loader.dataset.get("shuffle_block_size") is not None
    largest = max((shard.samples for s in loader.streams for shard in s.shards), default=0)
    if block < SHARDS_A_BLOCK * largest:
        why = f"the largest shard has {largest:,} samples, and a block of {block:,} mixes it with few others: {SHARDS_A_BLOCK} such shards"
        return str(SHARDS_A_BLOCK * largest), THUMB, why
    said = "what is set" if is_set else "the default, max(4,000,000 / num_canonical_nodes, 262,144)"
    why = f"{said}: it spans {block // max(1, largest):,} of the largest shard ({largest:,} samples), so shards mix"
    return str(block), RULE if is_set else DEFAULT, why


def _predownload(loader: Loader, world: World) -> Advice:
    given, drawn = whole(loader.dataset.get("predownload")), plural(world.drawn, "sample")
    if given is not None and given >= world.drawn:
        why = (
            f"at least the {drawn} that a device draws at a time: each worker fetches so far ahead"
        )
        return str(given), RULE, why
    why = f"{BATCHES_AHEAD} batches of {drawn}, the default: each worker fetches the shards of so many samples ahead"
    if given is not None:
        why = f"{given:,} is less than the {drawn} that a device draws at a time, so batches wait for shards; {why}"
    return str(BATCHES_AHEAD * world.drawn), DEFAULT, why


def _cache_limit(loader: Loader, node: NodePlan, disk: int | None) -> Advice:
    use, why = _limit(loader, node, disk)
    now = loader.dataset.get("cache_limit")
    if now and use is None and node.remote_streams == len(loader.streams):
        given, least = in_units(now, BYTE_UNITS) or 0, _least(loader, node)
        if given < least:
            why = f"{now} is less than {size_of(least)}, below which shards are fetched again within an epoch; {why}"
        else:
            use = str(now)
            why = f"it holds what is shuffled at a time, {size_of(least)}; a node reads {size_of(node.kept_bytes)} in the run"
    return use, RULE, why


def _least(loader: Loader, node: NodePlan) -> float:
    """Below it Streaming refuses the limit, or fetches the same shards again and again."""
    indexes = sum(len(stream.index.content) for stream in loader.streams)
    return max(4 * node.largest_shard + indexes, node.working_set)


def _limit(loader: Loader, node: NodePlan, disk: int | None) -> tuple[str | None, str]:
    if local := [s.name for s in loader.streams if not shards_of(s, loader).is_remote]:
        lie = f"{listed(local)} {does(local, 'lies', 'lie')} on the nodes' own disks alone"
        return None, f"{lie}, and under a limit Streaming would delete the only copy"
    keeps, least = node.kept_bytes + node.largest_shard, _least(loader, node)
    wants = f"a node keeps {size_of(keeps)}, one shard unpacked beside it"
    of_least = "4 of the largest shard, and all that is shuffled at a time"
    if disk is None:
        return (
            None,
            f"{wants}; where its disk has less (--disk SIZE), no less than {size_of(least)}: {of_least}",
        )
    if keeps <= ROOM * disk:
        return None, f"{wants}, and {size_of(disk)} hold it: nothing is fetched twice"
    if least > ROOM * disk:
        needed = f"{size_of(disk)} are too few: {size_of(least)} are needed, {of_least}"
        return None, f"{needed}; take a smaller shuffle_block_size, more nodes or a larger disk"
    evicted = f"more than {size_of(disk)}: shards are evicted, and fetched again in later epochs"
    return f"{int(ROOM * disk) >> 20}mb", f"{wants}, {evicted}"


def _workers(loader: Loader, world: World) -> Advice:
    given = whole(loader.section.get("num_workers")) or NUM_WORKERS
    per = "a device" if world.gpus > 1 else "the device"
    why = f"for {per}, {given * world.gpus} processes a node, no more than it has processors; nothing was measured here: `mdsmix bench` measures"
    return str(given), THUMB, why


def unheld(settings: Sequence[Setting]) -> Iterator[str]:
    """The settings that a config holds otherwise."""
    for each in settings:
        if each.now is not None and each.use is not None and each.now != each.use:
            yield each.key
