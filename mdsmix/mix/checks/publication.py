"""Whether what lies at a stream's place is one whole publication: index and manifest of one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mdsmix.mix.findings import check_streams
from mdsmix.mix.streams import Loader, Mix, Stream
from mdsmix.training.rules import Hit
from mdsmix.words import plural


@check_streams(
    "publication-interrupted",
    "error",
    "The index is the one before, or was replaced by hand: what the manifest says of tokens and tokenizer is not about these shards.",
)
def publication_interrupted(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    if stream.manifest and not stream.trusted_manifest:
        yield Hit(
            f"the manifest of {stream.name} was written for the index {stream.manifest.short_hash}, and the index there is {stream.index.hash[:8]}.",
            "run `mdsmix convert` again, which completes the publication; if shards were changed by hand, delete mdsmix.manifest.",
        )


@check_streams(
    "manifest-contradicts",
    "error",
    "The manifest counts other data than the index lists, so nothing that it says can be believed.",
)
def manifest_contradicts(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    manifest = stream.trusted_manifest
    if not manifest or not stream.shards:
        return
    for what, said, found in (
        ("samples", manifest.totals.samples, stream.index.samples),
        ("columns", manifest.encoding.columns, dict(stream.columns)),
    ):
        if said != found:
            yield Hit(
                f"the manifest of {stream.name} says {what}: {said}, and it is {found}.",
                "convert the stream again.",
            )


@check_streams(
    "records-bad",
    "warning",
    "What could not be read of a source is in no sample, and bad records are often all of one sort.",
)
def records_bad(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    records = stream.trusted_manifest.records if stream.trusted_manifest else None
    if records and records.has_many_bad:
        reasons = sorted(records.quarantined.items(), key=lambda each: (-each[1], each[0]))
        told = ", ".join(f"{number:,} {reason}" for reason, number in reasons)
        yield Hit(
            f"{records.bad:,} of {plural(records.sampled, 'record')} of {stream.name} ({records.bad / records.sampled:.1%}) were "
            f"bad and set aside: {told}.",
            f"look at them with `mdsmix quarantine {stream.folder}`, and mend the source or what the recipe reads of it.",
        )


@check_streams(
    "records-duplicate",
    "warning",
    "What stands in a stream twice is trained twice as often as its weight in the mix says.",
)
def records_duplicate(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    records = stream.trusted_manifest.records if stream.trusted_manifest else None
    if records and records.has_many_duplicates:
        yield Hit(
            f"{records.duplicates:,} of {plural(records.sampled, 'record')} of {stream.name} "
            f"({records.duplicates / records.sampled:.1%}) say the same as an earlier one.",
            f"write duplicates: drop under streams.{stream.name} of its recipe and convert it again, where they are not meant.",
        )


@check_streams("index-empty", "error", "Streaming refuses a stream without samples (RuntimeError).")
def index_empty(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    if not stream.index.samples:
        yield Hit(
            f"the index of {stream.name} lists {plural(len(stream.shards), 'shard')} and 0 samples.",
            "look at what was filtered or quarantined when converting, or take the stream out.",
        )


@check_streams(
    "shard-basenames",
    "error",
    "Two entries of the index name one file, so one of the two shards is read twice and the other never.",
)
def shard_basenames(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    counts = Counter(shard.stored.basename for shard in stream.shards)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        yield Hit(
            f"the index of {stream.name} names {twice[0]} {counts[twice[0]]} times.",
            "publish the stream again; merge_index joins folders of one name into this.",
        )


@check_streams(
    "shard-format", "error", "The loaders of LLM-Foundry are written for MDS shards of version 2."
)
def shard_format(mix: Mix, loader: Loader, stream: Stream) -> Iterator[Hit]:
    other = next((s for s in stream.shards if (s.format, s.version) != ("mds", 2)), None)
    if other:
        yield Hit(
            f"{stream.name} holds a shard of format {other.format} version {other.version}.",
            "convert the stream again with `mdsmix convert`.",
        )
