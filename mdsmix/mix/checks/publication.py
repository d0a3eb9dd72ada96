"""Whether what lies at a stream's place is one whole publication, by the rules that `verify` judges by too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdsmix.mix.streams import Loader, Mix, StreamInMix
from mdsmix.shards.contradictions import (
    BESIDE,
    CONTRADICTS,
    INTERRUPTED,
    MISSING,
    SIZE,
    TWICE,
    StreamFault,
)
from mdsmix.shards.verification import BAD_RECORDS, CONTENTS
from mdsmix.training.findings import Finding, Severity, check_streams
from mdsmix.words import plural

AGAIN = "{makers}; or copy the files again."
REPAIR = "`mdsmix repair {folder} --recipe RECIPE` makes it anew."


def _rule(id: str, severity: Severity, why: str, fix: str) -> None:
    """Registers a rule of `mdsmix.shards.contradictions`, or of what only reading finds."""

    def broken(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
        report = mix.verified.get(stream.folder.url)
        every: Sequence[StreamFault] = report.faults if report else stream.contradictions
        if told := [each for each in every if each.rule == id]:
            more = f" (and {plural(len(told) - 1, 'more file')})" if told[1:] else ""
            problem = told[0].problem.rstrip(".")
            advice = fix.format(makers=mix.makers([stream], "publish again"), folder=stream.folder)
            yield Finding(
                f"{told[0].file} of {stream.name}: {problem}{more}.",
                advice.replace("RECIPE", mix.recipe or "RECIPE"),
            )

    check_streams(severity, why, id=id)(broken)


_rule(
    MISSING,
    "error",
    "Streaming raises nothing: without workers the epoch ends early, with workers training hangs.",
    AGAIN,
)
_rule(
    SIZE,
    "error",
    "A shard that was cut off or replaced gives wrong samples, or fails its checksum and ends the epoch without a word.",
    AGAIN,
)
_rule(
    CONTENTS,
    "error",
    "A shard that was changed in place gives wrong samples, or fails its checksum and ends the epoch without a word.",
    REPAIR,
)
_rule(
    TWICE,
    "error",
    "Two entries of the index name one file, so one of the two shards is read twice and the other never.",
    "publish the stream again; merge_index joins folders of one name into this.",
)
_rule(
    INTERRUPTED,
    "error",
    "The index is the one before, or was replaced by hand: what the manifest says of tokens and tokenizer is not about these shards.",
    "run `mdsmix convert` again, which completes the publication; if shards were changed by hand, delete mdsmix.manifest.",
)
_rule(
    CONTRADICTS,
    "error",
    "The manifest counts other data than the shards hold, so nothing that it says can be believed.",
    "convert the stream again.",
)
_rule(
    BESIDE,
    "warning",
    "Training reads none of them; `inspect` names no record without them, and a conversion is refused.",
    REPAIR,
)
_rule(
    BAD_RECORDS,
    "warning",
    "Training reads none of them; what was set aside can no longer be looked at.",
    REPAIR,
)


@check_streams(
    "warning",
    "What is stored is whole, and came damaged once: training reads it the same way.",
)
def damage_in_transit(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    report = mix.verified.get(stream.folder.url)
    for damage in report.in_transit if report else ():
        yield Finding(f"{damage.file} of {stream.name}: {damage.problem}.", f"{damage.fix}.")


@check_streams(
    "warning",
    "What could not be read of a source is in no sample, and bad records are often all of one sort.",
)
def records_bad(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    records = stream.trusted_manifest.records if stream.trusted_manifest else None
    if records and records.has_many_bad:
        reasons = sorted(records.quarantined.items(), key=lambda each: (-each[1], each[0]))
        told = ", ".join(f"{number:,} {reason}" for reason, number in reasons)
        yield Finding(
            f"{records.bad:,} of {plural(records.sampled, 'record')} of {stream.name} ({records.bad / records.sampled:.1%}) were "
            f"bad and set aside: {told}.",
            f"look at them with `mdsmix quarantine {stream.folder}`, and mend the source or what the recipe reads of it.",
        )


@check_streams(
    "warning",
    "What stands in a stream twice is trained twice as often as its weight in the mix says.",
)
def records_duplicate(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    records = stream.trusted_manifest.records if stream.trusted_manifest else None
    if records and records.has_many_duplicates:
        yield Finding(
            f"{records.duplicates:,} of {plural(records.sampled, 'record')} of {stream.name} "
            f"({records.duplicates / records.sampled:.1%}) say the same as an earlier one.",
            f"write duplicates: drop under streams.{stream.name} of its recipe and convert it again, where they are not meant.",
        )


@check_streams("error", "Streaming refuses a stream without samples (RuntimeError).")
def index_empty(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    if not stream.index.samples:
        yield Finding(
            f"the index of {stream.name} lists {plural(len(stream.shards), 'shard')} and 0 samples.",
            "look at what was filtered or quarantined when converting, or take the stream out.",
        )


@check_streams("error", "The loaders of LLM-Foundry are written for MDS shards of version 2.")
def shard_format(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    other = next((s for s in stream.shards if (s.format, s.version) != ("mds", 2)), None)
    if other:
        yield Finding(
            f"{stream.name} holds a shard of format {other.format} version {other.version}.",
            "convert the stream again with `mdsmix convert`.",
        )
