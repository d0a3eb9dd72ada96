"""The output of `mdsmix inspect` (a stream's manifest or index, and some of its samples) and of
`mdsmix quarantine` (its bad records).

A quarantine may contain a tenth of a large corpus, so its records are read one at a time: all are
counted, and a few for each reason are kept.
"""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from mdsmix.encode.printed_parts import merge_unread_keys, name_in_records
from mdsmix.errors import Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import (
    choose_verb,
    flatten_error,
    format_field,
    join_names,
    make_printable,
    plural,
)
from mdsmix.report.drawings import Ribbon, choose_colours, make_records_ribbon
from mdsmix.report.result import Result
from mdsmix.report.show import Item, NamedValues, SampleText, Title
from mdsmix.report.shown_samples import (
    Choice,
    Chosen,
    doubles_eos,
    read_chosen_samples,
    sample_to_json,
    split_sample_into_runs,
)
from mdsmix.report.trained_tokens import count_trained_tokens
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
from mdsmix.table import Column, Table, Tree, format_cell, format_grouped
from mdsmix.tokenizer.decoder import Decoder, find_decoder

MOST_SOURCES = 5
(FIRST_COLOUR,) = choose_colours(["a stream alone"]).values()
_NOT_SHOWN = ("samples", "lengths", "given_eos", "not_given_eos")
LENGTHS = (Column("stored tokens", "text"), Column("samples"), Column("share", "share"))


@frozen
class Inspection:
    """The parts of a stream that were read."""

    stream: PublishedStream
    samples: Sequence[Chosen]
    decoder: Decoder | None
    "None if the tokenizer is not on this machine."


@frozen
class InspectedStream(Inspection, Result):
    """A stream and some of its samples, as `mdsmix.inspect` returns them."""

    choice: Choice
    "How the samples were chosen."

    def items(self) -> Iterator[Item]:
        return show_inspection(self, self.choice)

    def items_with_drawings(self) -> Iterator[Item | Ribbon]:
        manifest = self.stream.manifest
        for item in self.items():
            if manifest and isinstance(item, Table):
                if not manifest.mixed:
                    yield make_records_ribbon("records", manifest.records, FIRST_COLOUR)
                yield make_lengths_table(manifest.totals, FIRST_COLOUR)
            else:
                yield item

    def to_dict(self) -> Tree:
        """Return the result as `mdsmix inspect --json` prints it."""
        return inspection_to_json(self) | {"seed": self.choice.seed}


def inspect_stream(stream: str, choice: Choice, tokenizer: str | None) -> Inspection:
    """Read a stream and the chosen samples. Raises Unreachable if no stream is published there."""
    published = open_stream_in(find_published(locate(stream)))
    tokenizer_hash = published.manifest.tokenizer.hash if published.manifest else None
    decoder = find_decoder(tokenizer, tokenizer_hash)
    return Inspection(published, list(read_chosen_samples(published, choice)), decoder)


def show_inspection(inspection: Inspection, choice: Choice) -> Iterator[Item]:
    """Yield the stream's settings and counts, its lengths, and the samples."""
    stream = inspection.stream
    count = stream.index.samples
    yield NamedValues(list_card_rows(stream))
    if stream.manifest:
        yield Table(columns=LENGTHS, rows=list(list_length_rows(stream.manifest.totals)))
    if choice.seed is not None:
        yield f"at random, --seed {choice.seed}"
    for chosen in inspection.samples:
        title = f"sample {chosen.number:,}"
        if chosen.ids:
            title += f", {choose_verb(chosen.ids, 'id', 'ids')} {', '.join(map(str, chosen.ids))}"
        yield Title(title)
        yield SampleText(split_sample_into_runs(chosen.sample, inspection.decoder))
        yield from (f"image {number}: {picture}" for number, picture in enumerate(chosen.pictures))
        yield from (f"{name}: {make_printable(str(chosen.values[name]))}" for name in chosen.values)
    yield from _describe_eos(inspection)
    if choice.is_first and len(inspection.samples) < min(choice.count, count):
        yield (
            f"{len(inspection.samples):,} of {plural(count, 'sample')}: only the first mebibyte of "
            "the first shard is read; --sample N shows any other sample, --random samples from "
            "anywhere"
        )


def _describe_eos(inspection: Inspection) -> Iterator[str]:
    """Yield notes on the EOS that the loader appends to the shown samples."""
    # A sample without token ids is not a list of segments, and gets no EOS.
    samples = [chosen.sample for chosen in inspection.samples if isinstance(chosen.sample, list)]
    appended = [segments[-1] for segments in samples if segments and segments[-1].is_appended]
    if appended:
        ids = appended[0].ids
        eos = inspection.decoder.text(ids) if inspection.decoder else ids[0]
        yield (
            f"the last token, {make_printable(str(eos))}, is the EOS that the loader appends to a "
            "row: trained, not stored"
        )
    if any(map(doubles_eos, samples)):
        yield (
            "the answer already ends in EOS, followed by white space, so EOS is trained twice at "
            "the end of a row, as LLM-Foundry does"
        )


def inspection_to_json(inspection: Inspection) -> Tree:
    """Return the counts of the index, the published manifest, and the samples with their numbers.
    Fields that were not read have the names that people find in their records.
    """
    stream = inspection.stream
    manifest = None
    if stream.manifest:
        manifest = asdict(stream.manifest)
        manifest["records"]["unread"] = merge_unread_keys(stream.manifest.records.unread)
    return {
        "stream": str(stream.folder),
        "samples": stream.index.samples,
        "shards": len(stream.index.shards),
        "bytes": stream.index.bytes,
        "index_hash": stream.index.hash,
        "columns": stream.columns,
        "is_whole": stream.trusted_manifest is not None,
        "manifest": manifest,
        "shown": [
            {
                "number": chosen.number,
                "ids": chosen.ids,
                "sample": sample_to_json(chosen.sample, inspection.decoder),
                "images": [picture.as_json() for picture in chosen.pictures],
                "values": chosen.values,
            }
            for chosen in inspection.samples
        ],
    }


def write_images(inspection: Inspection, folder: Path) -> int:
    """Write the samples' images as stored, and return how many.

    Their names are like `docs-train-12-0.jpeg`: stream, split, sample, image.

    Raises Unreachable if `folder` cannot be written.
    """
    written = 0
    stream_and_split = "-".join(Path(inspection.stream.folder.url).parts[-2:])
    for chosen in inspection.samples:
        for number, picture in enumerate(chosen.pictures):
            name = f"{stream_and_split}-{chosen.number}-{number}.{picture.format.lower()}"
            path = folder / name
            try:
                folder.mkdir(parents=True, exist_ok=True)
                locate(str(path)).write(picture.data)  # whole or not at all
            except OSError as error:
                raise Unreachable(
                    f"cannot write {path} ({error.strerror}): name another folder for --images."
                ) from None
            except Unreachable as error:
                raise Unreachable(
                    f"{flatten_error(error)}; or name another folder for --images."
                ) from None
            written += 1
    return written


def list_card_rows(stream: PublishedStream) -> Iterator[tuple[str, str]]:
    """Yield the stream as lines of a name and a value, such as ("layout", "document"): the settings
    of its manifest that are not at their default, and the counts that are not zero. The names are
    the manifest's.
    """
    index = stream.index
    manifest = stream.manifest
    yield "stream", str(stream.folder)
    yield "samples, shards, bytes", format_grouped((index.samples, len(index.shards), index.bytes))
    if manifest is None:
        yield "manifest", "none: not made by mdsmix convert; all figures are the index's"
        yield "columns", format_grouped(stream.columns)
        return
    yield from (
        (key, format_grouped(value)) for key, value in manifest.encoding.non_defaults.items()
    )
    yield "tokenizer", format_grouped(asdict(manifest.tokenizer))
    yield from _list_total_rows(manifest)
    if manifest.encoding.pack:
        positions = index.samples * manifest.encoding.max_seq_len  # a packed sample is a row
        yield "padding", f"{1 - manifest.totals.tokens / max(1, positions):.2%}"
    yield from _list_source_rows(manifest)
    if stream.trusted_manifest:
        yield "index", manifest.index_hash
    else:
        yield "index", "does not match the manifest: publishing was interrupted, run convert again"


def _list_total_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the counts of the stream that are not zero, as `list_card_rows`."""
    tokens = Column("tokens")
    for key, count in asdict(manifest.totals).items():
        if key == "tokens":
            appended = manifest.totals.given_eos
            text = format_cell(tokens, count_trained_tokens(manifest))
            if appended:
                text += f", with {appended:,} EOS that the loader appends"
            yield key, text
        elif count and key not in _NOT_SHOWN:
            yield key, format_grouped(count) if isinstance(count, dict) else f"{count:,}"


def _list_source_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield what the stream was made from, as `list_card_rows`: other streams, or records."""
    if manifest.mixed:
        for stream in manifest.mixed:
            yield "mixed from", format_grouped(asdict(stream))
        yield "seed", str(manifest.seed)
        return
    records = manifest.records
    yield "records", sum_in_words(records)
    if records.filtered:
        yield "filtered", format_grouped(records.filtered)
    if records.quarantined:
        yield "quarantined", format_grouped(records.quarantined)
    yield from _list_diagnoses(manifest)
    sources = plural(manifest.source_count, "file")
    if manifest.sources:
        paths = join_names([source.path for source in manifest.sources], MOST_SOURCES)
        sources += f": {paths}"
    yield "sources", sources


def _list_diagnoses(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the counts of records with likely mistakes, most frequent first: fields that are not
    read, nulls, placeholders that are trained as text, and so on.
    """
    for key in ("unread", "unseen", "placeholders", "nulls", "absent"):
        counts: dict[str, int] = getattr(manifest.records, key)
        phrases = list[str]()
        for name, count in sorted(merge_unread_keys(counts).items(), key=lambda pair: -pair[1]):
            shown = format_field(name_in_records(name, manifest.encoding.fields))
            phrases.append(f"{count:,} {shown}")
        if phrases:
            yield key, join_names(phrases, MOST_SOURCES)


def list_length_rows(totals: Totals) -> Iterator[tuple[str, int, float]]:
    """Yield the samples and their share for each power of two of their length, short ones first,
    as in ("128-255", 1034, 0.21). A class of one length is only that number: ("2,048", 9, 1.0).
    """
    samples = sum(totals.lengths.values())
    # A key such as `2^7` counts the samples of 128 to 255 tokens.
    for power, count in sorted((int(key[2:]), count) for key, count in totals.lengths.items()):
        shortest = 1 << power
        longest = min((2 << power) - 1, totals.longest)
        bounds = f"{shortest:,}" if longest <= shortest else f"{shortest:,}-{longest:,}"
        yield bounds, count, count / samples


def make_lengths_table(totals: Totals, css: str) -> Table:
    """Return the rows of `list_length_rows` with a bar in each.

    Args:
        totals: the counts of the stream.
        css: the class of the stream's colour.
    """
    largest = max(totals.lengths.values(), default=0)
    rows = []
    for bounds, count, share in list_length_rows(totals):
        rows.append((bounds, (count / largest, css), count, share))
    return Table(columns=(LENGTHS[0], Column("histogram", "bar"), *LENGTHS[1:]), rows=rows)


def sum_in_words(records: Records) -> str:
    """Return the counts of records as a sum: `10 read = 7 written + 2 filtered + 1 quarantined`."""
    return (
        f"{records.read:,} read = {records.written:,} written + {records.dropped:,} filtered + "
        f"{records.bad:,} quarantined"
    )


MOST_SHOWN = 300
"Characters to show of a record or of a detail, at most."
_NOT_POSITION = ("file", "length", "reason", "raw", "raw_base64", "detail")


def find_bad_records(
    stream: str, per_reason: int, reasons: Sequence[str] = (), limit: int | None = None
) -> Tree:
    """Count a stream's bad records by reason, and keep the first of each reason.

    Args:
        per_reason: records to keep of each reason.
        reasons: the reason codes to list; empty means all.
        limit: records of the quarantine to read; None means all.

    Returns:
        {"stream": url, "bad": number of records, "reasons": {code: {"count": ..., "records": the
        first records as the quarantine has them}}, "others": {code that is not listed: count}}.
        The most frequent reason comes first.

    Raises:
        Unreachable: no stream and no quarantine is there, or a file of the quarantine is damaged.
    """
    folder = _find_quarantine_folder(locate(stream))
    counts = Counter[str]()
    records = defaultdict[str, list[Any]](list)
    for record in islice(read_quarantine(folder), limit):
        code = str(record.get("reason"))
        counts[code] += 1
        if counts[code] <= per_reason:
            records[code].append(record)
    codes = sorted(counts, key=lambda code: (-counts[code], code))
    listed_codes = [code for code in codes if not reasons or code in reasons]
    return {
        "stream": str(folder),
        "bad": sum(counts[code] for code in listed_codes),
        "reasons": {
            code: {"count": counts[code], "records": records[code]} for code in listed_codes
        },
        "others": {code: counts[code] for code in codes if code not in listed_codes},
    }


def show_bad_records(tree: Tree) -> Iterator[str]:
    """Yield each reason with its count, followed by its first records (`find_bad_records`)."""
    line = f"{tree['stream']}: {plural(tree['bad'], 'bad record')}"
    if tree["others"]:
        line += f"; with other reasons: {format_grouped(tree['others'])}"
    yield line
    for code, reason in tree["reasons"].items():
        yield from ("", f"{code}: {reason['count']:,}")
        for record in reason["records"]:
            position, *lines = describe_bad_record(record)
            yield f"  {position}"
            yield from (f"    {line}" for line in lines)


def describe_bad_record(record: Tree) -> Iterator[str]:
    """Yield the lines of one record: its position, its beginning, and the details of its reason."""
    position = []
    for key, value in record.items():
        if key not in _NOT_POSITION:
            position.append(f"{key} {format_grouped(value)}")
    size = f"{record['length']:,} bytes"
    yield ", ".join([make_printable(record["file"]), *position, size])
    raw = record.get("raw")
    if not raw:  # a record that is not UTF-8: such bytes are written as their numbers
        content = base64.b64decode(record.get("raw_base64", ""))
        raw = content.decode("utf-8", "backslashreplace")
    yield cut_text(raw)
    for key, value in record.get("detail", {}).items():
        yield f"{key}: {cut_text(value)}"


def _find_quarantine_folder(folder: Location) -> Location:
    """Return the folder of the split whose bad records to show: the only one with a quarantine (a
    folder of bad records) among `folder` and the folders in it. If none has one, or several have,
    return the split of the stream that is published in `folder`.
    """
    candidates = (find_working_folder(folder), *(folder / name for name in folder.folders()))
    with_quarantine = [split for split in candidates if any((split / QUARANTINE).list())]
    if len(with_quarantine) == 1:
        return with_quarantine[0]
    return find_working_folder(find_published(folder))


def cut_text(value: Any, limit: int = MOST_SHOWN, keep: str = "") -> str:
    """Return the first `limit` characters of a value, without escape codes.

    Args:
        keep: control characters that stay as they are; see `make_printable`.
    """
    text = str(value)
    if len(text) <= limit:
        return make_printable(text, keep)
    return f"{make_printable(text[:limit], keep)}... ({len(text):,} characters)"
