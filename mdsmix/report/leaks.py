"""What `mdsmix leaks` shows: a table of evaluation samples, the passages of the first ones, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mdsmix.encode.decoder import Decoder
from mdsmix.leaks.audit import Audit, Ids, Leak, Passage, Where, passage
from mdsmix.leaks.items import LENGTH
from mdsmix.report.segments import Segment, runs_of
from mdsmix.report.show import Item, Run, SampleText, Title
from mdsmix.table import Column, Table
from mdsmix.words import does, plural

ROWS = 20
"Rows of the table; the JSON has all."
LONGEST = 160
"Tokens of a shared run that are shown."
BOUND = (
    "a lower bound, of one tokenizer: what was worded anew, translated or cut into other tokens is not seen; and a finding, no verdict: "
    "both may quote a third"
)


def table(found: Audit) -> Table:
    """The evaluation samples with the largest shares; of packed rows each document."""
    leaks = found.leaks[:ROWS]
    is_packed = any(found.items.places[leak.item].document is not None for leak in leaks)
    return Table(
        columns=[
            Column("evaluation", "text"),
            Column("sample"),
            *[Column("document")] * is_packed,
            Column("found", "share"),
            Column("grams"),
            Column("most in", "text"),
        ],
        rows=[_row(found, leak, is_packed) for leak in leaks],
    )


def _row(found: Audit, leak: Leak, is_packed: bool) -> tuple[Any, ...]:
    at, first = found.items.places[leak.item], leak.places[0]
    most = f"{found.streams[first.stream].name} sample {first.sample:,} ({first.grams:,})"
    evaluation = found.evaluations[at.stream].name
    return evaluation, at.sample, *[at.document] * is_packed, leak.share, leak.of, most


def summary(found: Audit) -> Iterator[str]:
    """What was looked at, what was found, and what was left out."""
    if len(found.leaks) > ROWS:
        yield f"the first {ROWS:,} of {plural(len(found.leaks), 'sample')} are listed, --json has all"
    items, half = found.items, sum(leak.share >= 0.5 for leak in found.leaks)
    tokens = sum(each.tokens for each in found.scanned)
    yield (
        f"{plural(len(items.rows), 'sample')} of {_names(found.evaluations)} with {plural(len(items.hashes), f'different {LENGTH}-gram')}, looked for "
        f"in {plural(tokens, 'token')} of {_names(found.streams)}: of {plural(len(found.leaks), 'sample')} something was found, of {half:,} at least half"
    )
    left = [f"{items.left_out:,} that stand in more than {items.common} samples of the evaluations"]
    left += [
        f"{each.common:,} in more than {items.common} of {stream.name}"
        for stream, each in zip(found.streams, found.scanned, strict=True)
    ]
    if items.common and (items.left_out or any(each.common for each in found.scanned)):
        yield f"left out as common (--common): {', '.join(left)}"
    if found.both:
        yield f"evaluated on and trained too, so its samples are found where they stand: {', '.join(found.both)}"
    if found.unnamed:
        yield f"no manifest says which tokenizer made the ids of {', '.join(found.unnamed)}: of two tokenizers they mean different texts, and what both share would not be found"
    if found.shorts:
        yield f"{plural(found.shorts, 'sample')} {does(range(found.shorts), 'has', 'have')} fewer than {LENGTH} tokens, so no gram: nothing is known of {does(range(found.shorts), 'it', 'them')}"
    if found.unknown:
        yield f"skipped {plural(found.unknown, 'sample')}: every {LENGTH}-gram of {does(range(found.unknown), 'it', 'them')} occurs in more than {items.common} samples of the evaluations"
    if found.hidden:
        yield f"of {plural(found.hidden, 'sample')} at least half the grams were left out as common in a stream, which hides a sample that is trained often too: --common 0 looks for all"
    yield BOUND


def _names(streams: Sequence[Any]) -> str:
    return ", ".join(stream.name for stream in streams)


def passages(found: Audit, leak: Leak, decoder: Decoder | None) -> Iterator[tuple[str, list[Run]]]:
    """Both passages of a finding, each with its headline; what they share stands in ⟦ ⟧."""
    where = leak.places[0]
    each = passage(found, leak, where)
    at, stream = found.items.places[leak.item], found.streams[where.stream]
    evaluation = found.evaluations[at.stream]
    document = "" if at.document is None else f", document {at.document}"
    head = f"{evaluation.name} sample {at.sample:,}{document}{_named(evaluation, at.sample)}: {leak.found:,} of its {leak.of:,} grams found"
    yield head, _runs(each.shared, each.item, decoder)
    head = f"{stream.name} sample {where.sample:,}{_named(stream, where.sample)}, {stream.shard_with(where.sample)[0].stored.basename}: {where.grams:,} of them"
    yield head, _runs(each.shared, each.training, decoder)


def _named(stream: Any, sample: int) -> str:
    name = stream.id_of(sample)
    return "" if name is None else f", id {name}"


def _runs(shared: Ids, around: tuple[Ids, Ids], decoder: Decoder | None) -> list[Run]:
    """A long run is shown by its two ends."""
    before, behind = around
    if len(shared) <= LONGEST:
        return _marked([(before, False), (shared, True), (behind, False)], decoder)
    ends = LONGEST // 2
    return [
        *_marked([(before, False), (shared[:ends], True)], decoder),
        (f" ... {plural(len(shared) - 2 * ends, 'token')} more that both share ... ", "mark"),
        *_marked([(shared[-ends:], True), (behind, False)], decoder),
    ]


def _marked(parts: Sequence[tuple[Ids, bool]], decoder: Decoder | None) -> list[Run]:
    return runs_of([Segment(ids.tolist(), mark) for ids, mark in parts if len(ids)], decoder)


def leaks_shown(found: Audit, decoder: Decoder | None, samples: int) -> Iterator[Item]:
    """The table, both passages of the first `samples` findings, and what there is to say."""
    if found.leaks:
        yield table(found)
    for leak in found.leaks[:samples]:
        for headline, runs in passages(found, leak, decoder):
            yield from (Title(headline), SampleText(runs))
    yield from summary(found)


def leaks_json(found: Audit, decoder: Decoder | None, samples: int) -> dict[str, Any]:
    """Everything, for machines; names of records and passages of the first `samples` findings."""
    items = found.items
    return {
        "gram": LENGTH,
        "common": items.common,
        "evaluations": [_stream_json(stream) for stream in found.evaluations],
        "samples": len(items.rows),
        "grams": len(items.hashes),
        "left_out": items.left_out,
        "too_short": found.shorts,
        "unknown": found.unknown,
        "hidden": found.hidden,
        "both": found.both,
        "unnamed": found.unnamed,
        "streams": [
            _stream_json(stream)
            | {"samples": each.samples, "tokens": each.tokens, "left_out": each.common}
            for stream, each in zip(found.streams, found.scanned, strict=True)
        ],
        "leaks": [
            _leak_json(found, leak, decoder if number < samples else None, number < samples)
            for number, leak in enumerate(found.leaks)
        ],
    }


def _stream_json(stream: Any) -> dict[str, Any]:
    return {"name": stream.name, "folder": str(stream.folder)}


def _leak_json(found: Audit, leak: Leak, decoder: Decoder | None, is_shown: bool) -> dict[str, Any]:
    at = found.items.places[leak.item]
    evaluation = found.evaluations[at.stream]
    tree = {
        "evaluation": evaluation.name,
        "sample": at.sample,
        "document": at.document,
        "share": leak.share,
        "found": leak.found,
        "of": leak.of,
        "places": [_where_json(found, where) for where in leak.places],
    }
    if is_shown:
        each = passage(found, leak, leak.places[0])
        tree |= {
            "id": evaluation.id_of(at.sample),
            "training_id": found.streams[leak.places[0].stream].id_of(leak.places[0].sample),
            "passage": _passage_json(each, decoder),
        }
    return tree


def _where_json(found: Audit, where: Where) -> dict[str, Any]:
    stream = found.streams[where.stream]
    return {
        "stream": stream.name,
        "shard": stream.shard_with(where.sample)[0].stored.basename,
        "sample": where.sample,
        "found": where.grams,
    }


def _passage_json(each: Passage, decoder: Decoder | None) -> dict[str, Any]:
    def text(ids: Ids) -> str | None:
        return decoder.text(ids.tolist()) if decoder else None

    return {
        "ids": each.shared.tolist(),
        "shared": text(each.shared),
        "evaluation": [text(side) for side in each.item],
        "training": [text(side) for side in each.training],
    }
