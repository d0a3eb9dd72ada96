"""Whether each stream is one whole publication, by the rules of `verify`, that training nodes can find and cache."""

import xxhash

from mdsmix.mix.streams import Loader, Mix, StreamInMix
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
from mdsmix.training.findings import Finding, Findings, Severity, check
from mdsmix.training.loader_keys import BYTE_UNITS, in_units
from mdsmix.words import plural

SHARDS_CACHED = 4
"The largest shards that a cache must hold: Streaming refuses a cache that holds fewer."


@check("error", "Samples of this shard cannot be decoded.")
def shard_damaged(mix: Mix, stream: StreamInMix) -> Findings:
    if not stream.trusted_manifest and stream.head.damage:
        yield Finding(f"{stream.head.damage.partition(';')[0]}.", f"{mix.again()}.")


@check("error", "Streaming finds no such hash, and gives 0 samples without an error.")
def validate_hash(loader: Loader, stream: StreamInMix) -> Findings:
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


@check(
    "error",
    "Streaming trusts a cached index for ever: the old stream would be read, or shards that are gone.",
)
def index_stale(stream: StreamInMix) -> Findings:
    cached = locate(stream.cache_folder or "") / INDEX
    if not (stream.cache_folder and stream.settings.get("remote") and cached.stat()):
        return
    if (found := xxhash.xxh128_hexdigest(cached.read())) != stream.index.hash:
        yield Finding(
            f"the index cached in {cached.parent} is {found[:8]}, and the one at {stream.folder} is {stream.index.hash[:8]}.",
            "name a new local folder (`mdsmix render-yaml` names one after the index), or delete this one.",
        )


@check("error", "Streaming refuses the limit (ValueError).")
def cache_limit_small(loader: Loader) -> Findings:
    given = loader.dataset.get("cache_limit")
    limit = in_units(given, BYTE_UNITS) if given else None
    sizes = [
        s.raw_data.bytes + (s.zip_data.bytes if s.zip_data else 0)
        for stream in loader.streams
        for s in stream.shards
    ]
    least = max(SHARDS_CACHED * max(sizes, default=0), loader.index_bytes + 1)
    if limit is not None and limit < least:
        yield Finding(
            f"cache_limit of {{loader}} is {given} ({limit} bytes), and four of the largest shard and all indexes need {least}.",
            f"set cache_limit to {least} or, better, much more.",
        )


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


def faults(mix: Mix, stream: StreamInMix) -> Findings:
    report = mix.verified.get(stream.folder.url)
    every = report.faults if report else stream.contradictions
    again, recipe = mix.again(), mix.recipe or "RECIPE"
    for rule, (_, _, fix) in FAULTS.items():
        if told := [fault for fault in every if fault.rule == rule]:
            more = f" (and {plural(len(told) - 1, 'more file')})" if told[1:] else ""
            yield Finding(
                f"{told[0].file} of {{streams}}: {told[0].problem.rstrip('.')}{more}.",
                fix.format(again=again, folder=stream.folder, recipe=recipe),
                id=rule,
            )


for rule, (severity, why, _) in FAULTS.items():
    check(severity, why, rule)(faults)


@check(
    "warning",
    "The stored file is whole, and came damaged once: training reads it over the same way.",
)
def damage_in_transit(mix: Mix, stream: StreamInMix) -> Findings:
    report = mix.verified.get(stream.folder.url)
    for damage in report.in_transit if report else ():
        yield Finding(
            f"{damage.file} of {{streams}}: {damage.problem}.",
            "look at the network, its caches and this machine's memory; what is stored needs no repair.",
        )


@check(
    "warning",
    "A record that is in a stream twice counts twice: in training beyond the stream's weight in the mix, in an evaluation in its result.",
    "records-duplicate",
)
@check(
    "warning",
    "Bad records are in no sample, and they are often all of one sort.",
    "records-bad",
)
def records(stream: StreamInMix) -> Findings:
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


@check("warning", "Nothing was read there, so whether its samples fit this loader is not known.")
def remote_unseen(loader: Loader) -> Findings:
    for stream in loader.unopened:
        yield Finding(
            f"{stream.name} is at {stream.place}, which Streaming reads and mdsmix does not: not looked at.",
            "nothing, if the stream is known to fit; else copy it to a folder or an s3:// URL and check it there.",
            [stream.name],
        )


@check("error", "Streaming refuses a stream without samples (RuntimeError).")
def index_empty(stream: StreamInMix) -> Findings:
    if not stream.index.samples:
        yield Finding(
            f"the index of {{streams}} lists {plural(len(stream.shards), 'shard')} and 0 samples.",
            "look at what was filtered or quarantined when converting, or take the stream out.",
        )


@check("error", "The loaders of LLM-Foundry are written for MDS shards of version 2.")
def shard_format(stream: StreamInMix) -> Findings:
    if others := {(s.format, s.version) for s in stream.shards} - {("mds", 2)}:
        yield Finding(
            f"shards of {{streams}} have the format and version {sorted(others)}.",
            "convert again with `mdsmix convert`.",
        )
