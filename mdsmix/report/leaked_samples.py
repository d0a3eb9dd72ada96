"""What `mdsmix leaks` shows: a table of evaluation samples, the passages of the first ones, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mdsmix.encode.pretrained import Decoder
from mdsmix.leaks.audit import Audit, Ids, Leak, passage
from mdsmix.leaks.evaluation_grams import LENGTH
from mdsmix.mix.streams import StreamInMix
from mdsmix.report.show import Item, SampleText, Title
from mdsmix.report.shown_samples import Segment, runs_of, shortened
from mdsmix.table import Column, Table
from mdsmix.words import plural

ROWS = 20
"Rows of the table; the JSON has all."
LONGEST = 160
"Tokens of a shared run that are shown."
BOUND = (
    "a lower bound, of one tokenizer: what was worded anew, translated or cut into other tokens is not seen; and a finding, no verdict: "
    "both may quote a third"
)


def leaks_shown(found: Audit, decoder: Decoder | None, samples: int) -> Iterator[Item]:
    """The table, both passages of the first `samples` findings, and what there is to say."""
    if found.leaks:
        yield table(found)
    for leak in found.leaks[:samples]:
        yield from _passages(found, leak, decoder)
    yield from summary(found)


def table(found: Audit) -> Table:
    """The evaluation samples with the largest shares; of packed rows each document."""
    leaks = [_leak_json(found, leak) for leak in found.leaks[:ROWS]]
    columns = [
        Column("evaluation", "text"),
        Column("sample"),
        Column("document"),
        Column("found", "share", key="share"),
        Column("grams", key="of"),
    ]
    if all(leak["document"] is None for leak in leaks):
        del columns[2]
    keys = [column.key or column.heading for column in columns]
    rows = []
    for leak in leaks:
        most = "{stream} sample {sample:,} ({found:,})".format(**leak["places"][0])
        rows.append((*(leak[key] for key in keys), most))
    return Table(columns=[*columns, Column("most in", "text")], rows=rows)


def _passages(found: Audit, leak: Leak, decoder: Decoder | None) -> Iterator[Item]:
    """Both passages of a finding, each with its headline; what they share stands in ⟦ ⟧."""
    where, at = leak.places[0], found.items.places[leak.item]
    each = passage(found, leak, where)
    stream, evaluation = found.streams[where.stream], found.evaluations[at.stream]
    document = "" if at.document is None else f", document {at.document}"
    named = f"{_named(evaluation, at.sample)}{document}"
    yield Title(f"{named}: {leak.found:,} of its {leak.of:,} grams found")
    yield _text(each.item, each.shared, decoder)
    yield Title(f"{_named(stream, where.sample)}: {where.grams:,} of them")
    yield _text(each.training, each.shared, decoder)


def _named(stream: StreamInMix, sample: int) -> str:
    name = stream.id_of(sample)
    return f"{stream.name} sample {sample:,}" + ("" if name is None else f", id {name}")


def _text(around: tuple[Ids, Ids], shared: Ids, decoder: Decoder | None) -> SampleText:
    before, behind = (side.tolist() for side in around)
    ids: list[int] = shared.tolist()
    run = shortened([Segment(ids, True, before=next(reversed(before), None))], LONGEST)
    parts = [Segment(before, False), *run, Segment(behind, False, before=ids[-1])]
    return SampleText(runs_of([part for part in parts if part.ids], decoder))


def summary(found: Audit) -> Iterator[str]:
    """What was looked at, what was found, and what was left out: a sentence for each count that is not zero."""
    items, leaks = found.items, len(found.leaks)
    half, tokens = sum(leak.share >= 0.5 for leak in found.leaks), sum(s.tokens for s in found.scanned)  # fmt: skip
    pairs = list(zip(found.streams, found.scanned, strict=True))
    common = sum(scanned.common for _, scanned in pairs) + items.left_out
    left = [f"{items.left_out:,} that stand in more than {items.common} samples of the evaluations"]
    left += [f"{each.common:,} in more than {items.common} of {s.name}" for s, each in pairs]
    said: tuple[tuple[object, str], ...] = (
        (
            leaks > ROWS,
            f"the first {ROWS:,} of {plural(leaks, 'sample')} are listed, --json has all",
        ),
        (
            True,
            f"{plural(len(items.rows), 'sample')} of {_names(found.evaluations)} with {plural(len(items.hashes), f'different {LENGTH}-gram')}, "
            f"looked for in {plural(tokens, 'token')} of {_names(found.streams)}: of {plural(leaks, 'sample')} something was found, of {half:,} "
            "at least half",
        ),
        (items.common and common, f"left out as common (--common): {', '.join(left)}"),
        (
            found.both,
            f"evaluated on and trained too, so its samples are found where they stand: {', '.join(found.both)}",
        ),
        (
            found.unnamed,
            f"no manifest says which tokenizer made the ids of {', '.join(found.unnamed)}: of two tokenizers they mean different texts, and "
            "what both share would not be found",
        ),
        (
            found.shorts,
            f"skipped {plural(found.shorts, 'sample')} of fewer than {LENGTH} tokens, which have no gram",
        ),
        (
            found.unknown,
            f"skipped {plural(found.unknown, 'sample')} of which every {LENGTH}-gram occurs in more than {items.common} samples of the "
            "evaluations",
        ),
        (
            found.hidden,
            f"of {plural(found.hidden, 'sample')} at least half the grams were left out as common in a stream, which hides a sample that is "
            "trained often too: --common 0 looks for all",
        ),
        (True, BOUND),
    )
    yield from (sentence for count, sentence in said if count)


def _names(streams: Sequence[StreamInMix]) -> str:
    return ", ".join(stream.name for stream in streams)


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
            _leak_json(found, leak) | (_passage_json(found, leak, decoder) if n < samples else {})
            for n, leak in enumerate(found.leaks)
        ],
    }


def _stream_json(stream: StreamInMix) -> dict[str, Any]:
    return {"name": stream.name, "folder": str(stream.folder)}


def _leak_json(found: Audit, leak: Leak) -> dict[str, Any]:
    at = found.items.places[leak.item]
    places = []
    for where in leak.places:
        stream = found.streams[where.stream]
        shard = stream.shard_with(where.sample)[0].stored.basename
        place = {"stream": stream.name, "shard": shard}
        places.append(place | {"sample": where.sample, "found": where.grams})
    return {
        "evaluation": found.evaluations[at.stream].name,
        "sample": at.sample,
        "document": at.document,
        "share": leak.share,
        "found": leak.found,
        "of": leak.of,
        "places": places,
    }


def _passage_json(found: Audit, leak: Leak, decoder: Decoder | None) -> dict[str, Any]:
    def text(ids: Ids) -> str | None:
        return decoder.text(ids.tolist()) if decoder else None

    at, where = found.items.places[leak.item], leak.places[0]
    shared = passage(found, leak, where)
    return {
        "id": found.evaluations[at.stream].id_of(at.sample),
        "training_id": found.streams[where.stream].id_of(where.sample),
        "passage": {
            "ids": shared.shared.tolist(),
            "shared": text(shared.shared),
            "evaluation": list(map(text, shared.item)),
            "training": list(map(text, shared.training)),
        },
    }
