"""Whether each stream is one whole publication, by the rules of `verify`, that training nodes can
find and cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import xxhash

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings, Severity
from mdsmix.foundry_yaml.loader_keys import BYTE_UNITS, as_whole_number, is_number, parse_quantity
from mdsmix.mix.epoch.cache_window import CacheNeed, compute_loader_need
from mdsmix.mix.epoch.draws import World, make_world
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix
from mdsmix.shards.counts import BAD_SHARE
from mdsmix.shards.index import INDEX
from mdsmix.shards.published import (
    BESIDE,
    CONTRADICTS,
    INTERRUPTED,
    MISSING,
    SIZE,
    TWICE,
)
from mdsmix.shards.verification import BAD_RECORDS, CONTENTS
from mdsmix.storage import locate
from mdsmix.words import plural

CHECKS = CheckList()

DEVICES_OF_A_NODE = 8
"The devices that a node is taken to have at most, if a YAML says how many the run has."
SMALLER = "or set a smaller predownload or fewer num_workers."


@CHECKS.stream("error", "Samples of this shard cannot be decoded.")
def shard_damaged(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if not stream.trusted_manifest and stream.head.damage:
        yield Finding(f"{stream.head.damage.partition(';')[0]}.", f"{mix.republish_fix()}.")


@CHECKS.stream("error", "Streaming finds no such hash, and gives 0 samples without an error.")
def validate_hash(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    wanted = stream.settings.get("validate_hash") or loader.dataset.get("validate_hash")
    lacking = [
        s.stored.hashes for s in stream.shards if wanted and str(wanted) not in s.stored.hashes
    ]
    if lacking:
        known = ", ".join(sorted(lacking[0])) or "null"
        yield Finding(
            f"{{loader}} sets validate_hash: {wanted}, and hashes in the index of {{streams}} are {known}.",
            f"set validate_hash to one of them: {known}.",
        )


@CHECKS.stream(
    "error",
    "Streaming trusts a cached index for ever: the old stream would be read, or shards that are gone.",
)
def index_stale(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    cached = locate(stream.cache_folder or "") / INDEX
    if not (stream.cache_folder and stream.settings.get("remote") and cached.stat()):
        return
    if (found := xxhash.xxh128_hexdigest(cached.read())) != stream.index.hash:
        yield Finding(
            f"the index cached in {cached.parent} is {found[:8]}, and the one at {stream.folder} is {stream.index.hash[:8]}.",
            "name a new local folder (`mdsmix render-yaml` names one after the index), or delete this one.",
        )


EVICTED = "Streaming evicts shards that a worker still waits for, and may wait for ever; far smaller limits it refuses (ValueError)."


@CHECKS.loader("error", EVICTED)
def cache_limit_small(mix: Mix, loader: Loader) -> Findings:
    rows, gpus = _device_rows(mix, loader), _devices(mix, loader)
    least, where = "", f"a node of {plural(gpus or 1, 'device')}"
    if not gpus:
        least, where = "at least ", f"one device that draws {plural(rows, 'row')}"
    for need, limit, given in _lacks(loader, rows, gpus or 1):
        yield Finding(
            f"{{loader}}, on {where}: {need.describe_lack(given, limit, least)}.",
            f"set cache_limit to {need.bytes} or, better, much more; {SMALLER}",
        )


@CHECKS.loader("warning", EVICTED)
def cache_limit_tight(mix: Mix, loader: Loader) -> Findings:
    """Judge the limit for one node that draws the whole batch, if the devices are not known."""
    rows, batch = _device_rows(mix, loader), mix.yaml.batch_size or 0
    if loader is not mix.train or batch < 1 or _devices(mix, loader) or [*_lacks(loader, rows, 1)]:
        return
    for need, limit, given in _lacks(loader, batch, 1):
        yield Finding(
            f"{{loader}}, if one node draws the whole batch of {batch:,}: {need.describe_lack(given, limit)}.",
            "ask `mdsmix plan` with --nodes and --gpus what a node of the run needs, and set cache_limit to that or more; "
            f"{SMALLER}",
        )


class Lack(NamedTuple):
    """A limit that is too small."""

    need: CacheNeed
    limit: int
    given: object
    "The limit as it is written."


def _lacks(loader: Loader, rows: int, gpus: int) -> Iterator[Lack]:
    """What the loader's limit lacks on a node of these devices, of so many rows each; nothing if it
    is enough.
    """
    given = loader.dataset.get("cache_limit")
    limit = parse_quantity(given, BYTE_UNITS) if given else None
    if limit is None:
        return
    ratio, replication = (
        loader.dataset.get("packing_ratio"),
        as_whole_number(loader.dataset.get("replication")),
    )
    packing = max(1.0, float(ratio)) if ratio is not None and is_number(ratio) else 1.0
    workers = max(0, as_whole_number(loader.section.get("num_workers")) or 0)
    world = World(batch=rows * gpus, gpus=gpus, workers=workers, packing=packing)
    with suppress(RecipeError):  # canonical nodes that fit no such node: other checks say so
        world = make_world(loader, batch=rows * gpus, gpus=gpus, workers=workers, packing=packing)
        if replication and replication > 1:
            world = replace(world, batch=world.batch // replication, replication=replication)
    need = compute_loader_need(loader, world)
    if limit < need.bytes:
        yield Lack(need, limit, given)


def _device_rows(mix: Mix, loader: Loader) -> int:
    """Rows of one device's batch; 1 if the YAML does not say."""
    key = "device_train_batch_size" if loader is mix.train else "device_eval_batch_size"
    return max(1, as_whole_number(mix.yaml.value_at(key)) or 1)


def _devices(mix: Mix, loader: Loader) -> int | None:
    """The devices of a node, as far as the YAML says: those of the run, 8 of them at most; None if
    it does not say.
    """
    batch, rows = mix.yaml.batch_size, as_whole_number(mix.yaml.value_at("device_train_batch_size"))
    if not batch or not rows or min(batch, rows) < 1 or batch % rows:
        return None
    if loader is not mix.train and not as_whole_number(mix.yaml.value_at("device_eval_batch_size")):
        return None
    return min(DEVICES_OF_A_NODE, batch // rows)


AGAIN = "{again}; or copy the files again."
REPAIR = "`mdsmix repair {folder} --recipe {recipe}` makes it anew."
FAULTS: dict[str, tuple[Severity, str, str]] = {
    MISSING: (
        "error",
        "Streaming raises nothing: without workers the epoch ends early, with workers training hangs.",
        AGAIN,
    ),
    SIZE: (
        "error",
        "A shard that was cut off or replaced gives wrong samples, or fails its checksum and ends the epoch without a word.",
        AGAIN,
    ),
    CONTENTS: (
        "error",
        "A shard that was changed in place gives wrong samples, or fails its checksum and ends the epoch without a word.",
        REPAIR,
    ),
    TWICE: (
        "error",
        "Two entries of the index name one file, so one of the two shards is read twice and the other never.",
        "publish the stream again; merge_index joins folders of one name into this.",
    ),
    INTERRUPTED: (
        "error",
        "The index is the one before, or was replaced by hand: what the manifest says of tokens and tokenizer is not about these shards.",
        "run `mdsmix convert` again, which completes the publication; if shards were changed by hand, delete mdsmix.manifest.",
    ),
    CONTRADICTS: (
        "error",
        "The manifest counts other data than the shards hold, so nothing that it says can be believed.",
        "convert the stream again.",
    ),
    BESIDE: (
        "warning",
        "Training reads none of them; `inspect` names no record without them, and a conversion is refused.",
        REPAIR,
    ),
    BAD_RECORDS: (
        "warning",
        "Training reads none of them; what was set aside can no longer be looked at.",
        REPAIR,
    ),
}
"Rule of a fault, found by names and sizes or by reading -> severity, consequence and fix."


def faults(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    report = mix.verified.get(stream.folder.url)
    every = report.faults if report else stream.contradictions
    again, recipe = mix.republish_fix(), mix.recipe_path or "RECIPE"
    for rule, (_, _, fix) in FAULTS.items():
        if told := [fault for fault in every if fault.rule == rule]:
            more = f" (and {plural(len(told) - 1, 'more file')})" if told[1:] else ""
            yield Finding(
                f"{told[0].file} of {{streams}}: {told[0].problem.rstrip('.')}{more}.",
                fix.format(again=again, folder=stream.folder, recipe=recipe),
                id=rule,
            )


for rule, (severity, why, _) in FAULTS.items():
    CHECKS.stream(severity, why, rule)(faults)


@CHECKS.stream(
    "warning",
    "The stored file is whole, and came damaged once: training reads it over the same way.",
)
def damage_in_transit(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    report = mix.verified.get(stream.folder.url)
    for damage in report.in_transit if report else ():
        yield Finding(
            f"{damage.file} of {{streams}}: {damage.problem}.",
            "look at the network, its caches and this machine's memory; what is stored needs no repair.",
        )


@CHECKS.stream(
    "warning",
    "A record that is in a stream twice counts twice: in training beyond the stream's weight in the mix, in an evaluation in its result.",
    "records-duplicate",
)
@CHECKS.stream(
    "warning",
    "Bad records are in no sample, and they are often all of one sort.",
    "records-bad",
)
def records(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    found = stream.trusted_manifest.records if stream.trusted_manifest else None
    if not found:
        return
    if found.bad > BAD_SHARE * found.asked:
        share = found.bad / max(1, found.asked)
        of = f"{plural(found.asked, 'record')} of {{streams}} ({share:.1%})"
        yield Finding(
            f"{found.bad:,} of {of} were bad and set aside.",
            f"look at them with `mdsmix quarantine {stream.folder}`, and mend the source or what the recipe reads of it.",
            id="records-bad",
        )
    if found.has_many_duplicates:
        share = found.duplicates / max(1, found.written)
        of = f"{plural(found.written, 'record')} of {{streams}} ({share:.1%})"
        yield Finding(
            f"{found.duplicates:,} of {of} say the same as an earlier one.",
            "write duplicates: drop in its recipe and convert it again, where they are not meant.",
            id="records-duplicate",
        )


@CHECKS.loader(
    "warning", "Nothing was read there, so whether its samples fit this loader is not known."
)
def remote_unseen(mix: Mix, loader: Loader) -> Findings:
    for stream in loader.unopened:
        yield Finding(
            f"{stream.name} is at {stream.url}, which Streaming reads and mdsmix does not: not looked at.",
            "nothing, if the stream is known to fit; else copy it to a folder or an s3:// URL and check it there.",
            [stream.name],
        )


@CHECKS.stream("error", "Streaming refuses a stream without samples (RuntimeError).")
def index_empty(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if not stream.index.samples:
        yield Finding(
            f"the index of {{streams}} lists {plural(len(stream.shards), 'shard')} and 0 samples.",
            "look at what was filtered or quarantined when converting, or take the stream out.",
        )


@CHECKS.stream("error", "The loaders of LLM-Foundry are written for MDS shards of version 2.")
def shard_format(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if others := {(s.format, s.version) for s in stream.shards} - {("mds", 2)}:
        yield Finding(
            f"shards of {{streams}} have the format and version {sorted(others)}.",
            "convert again with `mdsmix convert`.",
        )
