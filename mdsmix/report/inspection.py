"""A published stream as `mdsmix inspect` shows it: its manifest, or its index alone, and some of
its samples. Also its bad records as `mdsmix quarantine` shows them.

A quarantine may hold a tenth of a large corpus, so its records are read one by one: all are
counted, and a few of each reason kept.
"""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mdsmix.errors import Unreachable
from mdsmix.kinds import kind_of
from mdsmix.messages import choose_verb, join_names, make_printable, plural
from mdsmix.report.show import Item, NamedValues, SampleText, Title
from mdsmix.report.shown_samples import (
    Choice,
    Chosen,
    choose,
    doubles_eos,
    runs_of,
    sample_json,
)
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.published import (
    QUARANTINE,
    PublishedStream,
    find_published,
    find_working_folder,
    open_stream_in,
    read_quarantine,
)
from mdsmix.storage import Location, locate
from mdsmix.table import Column, Table, Tree, format_cell, format_grouped, mark_estimate
from mdsmix.tokenizer.decoder import Decoder, find_decoder

MOST_SOURCES = 5
_NOT_SHOWN = ("samples", "lengths", "given_eos", "not_given_eos")
LENGTHS = (Column("stored tokens", "text"), Column("samples"), Column("share", "share"))


@dataclass(frozen=True)
class Inspection:
    """The parts of a stream that were read."""

    stream: PublishedStream
    samples: Sequence[Chosen]
    decoder: Decoder | None
    "None: this machine does not know the tokenizer."


def inspect(stream: str, choice: Choice, tokenizer: str | None) -> Inspection:
    """Reads the stream; Unreachable where no stream is published there."""
    found = open_stream_in(find_published(locate(stream)))
    made_by = found.manifest.tokenizer.hash if found.manifest else None
    return Inspection(found, list(choose(found, choice)), find_decoder(tokenizer, made_by))


def inspection_shown(found: Inspection, choice: Choice) -> Iterator[Item]:
    """The stream's settings and counts, its lengths, and the samples."""
    count = found.stream.index.samples
    yield NamedValues(card_rows(found.stream))
    if found.stream.manifest:
        yield Table(columns=LENGTHS, rows=list(by_length(found.stream.manifest.totals)))
    if choice.seed is not None:
        yield f"at random, --seed {choice.seed}"
    for chosen in found.samples:
        ids = f", {choose_verb(chosen.ids, 'id', 'ids')} {', '.join(map(str, chosen.ids))}"
        yield Title(f"sample {chosen.number:,}{ids * bool(chosen.ids)}")
        yield SampleText(runs_of(chosen.sample, found.decoder))
        yield from (f"image {number}: {picture}" for number, picture in enumerate(chosen.pictures))
    yield from _of_appended(found)
    if choice.is_first and len(found.samples) < min(choice.count, count):
        yield (
            f"{len(found.samples):,} of {plural(count, 'sample')}: the first are read from the first mebibyte of the first "
            "shard; --sample N shows any other, --random some from anywhere"
        )


def _of_appended(found: Inspection) -> Iterator[str]:
    """Sentences on the EOS that the loader appends to the samples shown."""
    shown = [chosen.sample for chosen in found.samples if isinstance(chosen.sample, list)]
    ends = [parts[-1] for parts in shown if parts and parts[-1].is_appended]
    if ends:
        eos = found.decoder.text(ends[0].ids) if found.decoder else ends[0].ids[0]
        yield (
            f"the last token, {make_printable(str(eos))}, is the EOS that the loader appends to a row: trained, not stored"
        )
    if any(map(doubles_eos, shown)):
        yield "the answer ends in EOS already, with white space behind it, so EOS is trained twice at the end of a row, as by LLM-Foundry"


def inspection_json(found: Inspection) -> Tree:
    """The counts of the index, the manifest as it is published, and the samples with their
    numbers.
    """
    stream = found.stream
    return {
        "stream": str(stream.folder),
        "samples": stream.index.samples,
        "shards": len(stream.index.shards),
        "bytes": stream.index.bytes,
        "index_hash": stream.index.hash,
        "columns": stream.columns,
        "is_whole": stream.trusted_manifest is not None,
        "manifest": stream.manifest and asdict(stream.manifest),
        "shown": [
            {
                "number": chosen.number,
                "ids": chosen.ids,
                "sample": sample_json(chosen.sample, found.decoder),
                "images": [picture.as_json() for picture in chosen.pictures],
            }
            for chosen in found.samples
        ],
    }


def write_images(found: Inspection, folder: Path) -> int:
    """Writes the samples' images as stored, `<stream>-<split>-<sample>-0.jpeg` and so on, and
    returns their number. Unreachable where `folder` cannot be written.
    """
    written, of = 0, "-".join(Path(found.stream.folder.url).parts[-2:])
    for chosen in found.samples:
        for number, picture in enumerate(chosen.pictures):
            path = folder / f"{of}-{chosen.number}-{number}.{picture.format.lower()}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(picture.data)
            except OSError as error:
                raise Unreachable(
                    f"cannot write {path} ({error.strerror}): name a folder that can be written by --images."
                ) from None
            written += 1
    return written


def card_rows(stream: PublishedStream) -> Iterator[tuple[str, str]]:
    """The stream as (name, value) lines: every setting of its manifest that is not at its default,
    and every count that is not zero. The names are the manifest's.
    """
    index, manifest = stream.index, stream.manifest
    yield "stream", str(stream.folder)
    yield "samples, shards, bytes", format_grouped((index.samples, len(index.shards), index.bytes))
    if manifest is None:
        yield "manifest", "none: not made by mdsmix convert; only the index speaks"
        yield "columns", format_grouped(stream.columns)
        return
    records = manifest.records
    yield from ((key, format_grouped(value)) for key, value in manifest.encoding.stated.items())
    yield "tokenizer", format_grouped(asdict(manifest.tokenizer))
    tokens = Column("tokens")
    for key, count in asdict(manifest.totals).items():
        if key == "tokens":
            appended = manifest.totals.given_eos
            more = f", with {appended:,} EOS that the loader appends" if appended else ""
            yield key, format_cell(tokens, trained_tokens(manifest)) + more
        elif count and key not in _NOT_SHOWN:
            yield key, f"{count:,}"
    if manifest.encoding.pack:
        places = index.samples * manifest.encoding.max_seq_len
        yield "padding", f"{1 - manifest.totals.tokens / max(1, places):.2%}"
    if manifest.mixed:
        yield from (("mixed from", format_grouped(asdict(part))) for part in manifest.mixed)
        yield "seed", str(manifest.seed)
    else:
        yield "records", fate(records)
        for what in ("filtered", "quarantined"):
            if reasons := getattr(records, what):
                yield what, format_grouped(reasons)
        paths = join_names([source.path for source in manifest.sources], MOST_SOURCES)
        yield "sources", plural(manifest.source_count, "file") + (paths and f": {paths}")
    damaged = "does not fit the manifest: a publication was interrupted, run convert again"
    yield "index", manifest.index_hash if stream.trusted_manifest else damaged


def by_length(totals: Totals) -> Iterator[tuple[str, int, float]]:
    """(`fewest-most tokens`, samples, their share) for each power of two that samples have, from
    short to long.
    """
    samples = sum(totals.lengths.values())
    for power, count in sorted((int(key[2:]), count) for key, count in totals.lengths.items()):
        most = min((2 << power) - 1, totals.longest)
        yield f"{1 << power:,}-{most:,}", count, count / samples


CUT_SHARE = 0.05
"A warning is given if a larger share of the tokens is cut off."


def trained_tokens(manifest: Manifest) -> float:
    """Count the tokens of all samples as they are trained; an Estimate if an earlier commit did not
    count the EOS that the loader appends.
    """
    is_counted = manifest.totals.is_eos_counted or not kind_of(manifest.encoding).gets_eos
    return mark_estimate(manifest.totals.seen_tokens, is_counted)


def untrained(manifest: Manifest) -> Iterator[str]:
    """Yield a sentence on tokens that are cut off at max_seq_len, by the loader or when converting,
    and one on other tokens that no sample holds.
    """
    totals, encoding = manifest.totals, manifest.encoding
    if totals.cut_rows:
        share = totals.cut_tokens / max(1, totals.tokens)
        yield (
            f"{'WARNING: ' if share > CUT_SHARE else ''}{totals.cut_rows:,} of {plural(totals.samples, 'row')} are longer than max_seq_len: "
            f"the loader cuts off {totals.cut_tokens:,} tokens, {share:.1%} of all, which are not counted above"
        )
    if totals.truncated_tokens:
        share = totals.truncated_tokens / (totals.tokens + totals.truncated_tokens)
        rows = plural(totals.documents or totals.samples, "document" if encoding.pack else "row")
        is_asked = encoding.too_long == "first_turns"
        why = "too_long: first_turns" if is_asked else "longer than max_seq_len"
        yield (
            f"{'WARNING: ' if share > CUT_SHARE and not is_asked else ''}{plural(totals.truncated_tokens, 'token')} truncated in "
            f"{totals.truncated_rows:,} of {rows} ({why}), {share:.1%} of all, which are not counted above"
        )
    if lost := totals.lost_tokens - totals.truncated_tokens:
        yield f"{plural(lost, 'token')} dropped ({_lost_as(manifest)})"


def _lost_as(manifest: Manifest) -> str:
    """Say what tokens that no sample holds, and that are not counted as truncated, were."""
    encoding = manifest.encoding
    if kind_of(encoding).joins_units:
        return "last partial row"
    if encoding.kind == "pretraining":
        return "last pieces of one token, which train nothing"
    if encoding.rewritten_history == "each":
        return "in rows that train nothing, or cut off"
    return "cut off, in rows that an earlier commit did not count"


def fate(records: Records) -> str:
    """A sum in words: read = written + filtered + quarantined."""
    return f"{records.read:,} read = {records.written:,} written + {records.dropped:,} filtered + {records.bad:,} quarantined"


MOST_SHOWN = 300
"The most characters that are shown of a record or of a detail."
_NOT_PLACE = ("file", "length", "reason", "raw", "raw_base64", "detail")


def find_bad_records(
    stream: str, each: int, only: Sequence[str] = (), most: int | None = None
) -> Tree:
    """The bad records of a stream for the reasons in `only`; an empty `only` means all reasons.

    Args:
        each: records to keep of each reason.
        most: records of the quarantine to read; None: all.

    Returns:
        {"stream": ..., "bad": number of records, "reasons": {reason: {"count": ..., "records": the
        first `each` as the quarantine holds
        them}}, the most frequent reason first, "others": {reason that is not in `only`: its
        count}}.

    Raises:
        Unreachable: the place has no published stream and no quarantine, or a file of the
        quarantine is damaged.
    """
    folder, counts, kept = (
        _folder(locate(stream)),
        Counter[str](),
        defaultdict[str, list[Any]](list),
    )
    for record in islice(read_quarantine(folder), most):
        code = str(record.get("reason"))
        counts[code] += 1
        if counts[code] <= each:
            kept[code].append(record)
    ordered = sorted(counts, key=lambda code: (-counts[code], code))
    asked = [code for code in ordered if not only or code in only]
    return {
        "stream": str(folder),
        "bad": sum(counts[code] for code in asked),
        "reasons": {code: {"count": counts[code], "records": kept[code]} for code in asked},
        "others": {code: counts[code] for code in ordered if code not in asked},
    }


def bad_records_shown(found: Tree) -> Iterator[str]:
    """Each reason with its count, and its first records below."""
    others = f"; of other reasons: {format_grouped(found['others'])}" if found["others"] else ""
    yield f"{found['stream']}: {plural(found['bad'], 'bad record')}{others}"
    for code, reason in found["reasons"].items():
        yield from ("", f"{code}: {reason['count']:,}")
        for record in reason["records"]:
            place, *lines = bad_record_lines(record)
            yield from (f"  {place}", *(f"    {line}" for line in lines))


def bad_record_lines(record: Tree) -> Iterator[str]:
    """Lines on one record: its place, its beginning, and the details of its reason."""
    place = [
        f"{key} {format_grouped(value)}" for key, value in record.items() if key not in _NOT_PLACE
    ]
    yield ", ".join([make_printable(record["file"]), *place, f"{record['length']:,} bytes"])
    # A byte that is not UTF-8 is written as its number.
    raw = base64.b64decode(record.get("raw_base64", "")).decode("utf-8", "backslashreplace")
    yield cut_text(record.get("raw") or raw)
    for what, value in record.get("detail", {}).items():
        yield f"{what}: {cut_text(value)}"


def _folder(at: Location) -> Location:
    """The folder of the split, which holds its bad records: `at` itself, or the only such split
    below `at`.
    """
    folders = (find_working_folder(at), *(at / name for name in at.folders()))
    bad = [folder for folder in folders if any((folder / QUARANTINE).list())]
    return bad[0] if len(bad) == 1 else find_working_folder(find_published(at))


def cut_text(value: Any, most: int = MOST_SHOWN, keep: str = "") -> str:
    """The first `most` characters of the value as text, without escape codes. `keep`: as in
    `printable`.
    """
    text = str(value)
    more = f"... ({len(text):,} characters)" if len(text) > most else ""
    return make_printable(text[:most], keep) + more
