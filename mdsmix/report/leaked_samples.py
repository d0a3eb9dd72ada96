"""The output of `mdsmix leaks`: a table of evaluation samples, passages of the first samples, and
counts of what was left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.leaks.audit import Audit, Leak, read_passage
from mdsmix.leaks.evaluation_grams import LENGTH, Int
from mdsmix.messages import plural
from mdsmix.mix.streams.mix import list_stream_names
from mdsmix.report.show import Item, SampleText, Title
from mdsmix.report.shown_samples import SHARED, Segment, runs_of, shortened
from mdsmix.table import Column, Row, Table, Tree
from mdsmix.tokenizer.card import Decoder

ROWS = 20
"The most rows of the table; the JSON has all leaks."
COLUMNS = (
    Column("evaluation", "text"),
    Column("sample"),
    Column("found", "share"),
    Column("grams"),
    Column("most in", "text"),
)
LONGEST = 160
"The most tokens that are shown of a shared run."
BOUND = (
    "a lower bound, of one tokenizer: what was worded anew, translated or cut into other tokens is not seen; and a finding, no verdict: "
    "both may quote a third"
)


def leaks_shown(found: Audit, decoder: Decoder | None, samples: int) -> Iterator[Item]:
    """A table of the evaluation samples with the largest shares, both passages of the first
    `samples` leaks, and a summary.
    """
    if found.leaks:
        yield Table(columns=COLUMNS, rows=[_row(found, leak) for leak in found.leaks[:ROWS]])
    for leak in found.leaks[:samples]:
        yield from _passages(found, leak, decoder)
    if found.leaks[:samples]:
        yield f"in {' '.join(SHARED)} is the longest run of tokens that both passages share"
    yield from summary(found)


def _row(found: Audit, leak: Leak) -> Row:
    where = leak.places[0]
    most = f"{found.streams[where.stream].name} sample {where.sample:,} ({where.grams:,})"
    return found.evaluations[leak.stream].name, leak.sample, leak.share, leak.of, most


def _passages(found: Audit, leak: Leak, decoder: Decoder | None) -> Iterator[Item]:
    """Both passages of a leak, each under a headline. The shared tokens are in ⟮ ⟯."""
    where, each = leak.places[0], read_passage(found, leak)
    mine, its = found.evaluations[leak.stream], found.streams[where.stream]
    for stream, sample, around, said in (
        (mine, leak.sample, each.item, f"{leak.found:,} of its {leak.of:,} grams found"),
        (its, where.sample, each.training, f"{where.grams:,} of them"),
    ):
        id = stream.id_of(sample)
        named = "" if id is None else f", id {id}"
        yield Title(f"{stream.name} sample {sample:,}{named}: {said}")
        yield _text(around, each.shared, decoder)


def _text(around: tuple[Int, Int], shared: Int, decoder: Decoder | None) -> SampleText:
    before, behind = (side.tolist() for side in around)
    ids: list[int] = shared.tolist()
    run = shortened([Segment(ids, True, before=next(reversed(before), None))], LONGEST)
    parts = [Segment(before, False), *run, Segment(behind, False, before=ids[-1])]
    return SampleText(runs_of([part for part in parts if part.ids], decoder, SHARED))


def summary(found: Audit) -> Iterator[str]:
    """A sentence on the samples and grams that were searched, and one for each count, if not zero,
    of data that was left out.
    """
    items, leaks = found.items, found.leaks
    if leaks[ROWS:]:
        yield f"the first {ROWS:,} of {plural(len(leaks), 'sample')} are listed, --json has all"
    yield (
        f"{plural(len(items.rows), 'sample')} of {list_stream_names(found.evaluations)} with {plural(len(items.hashes), f'different {LENGTH}-gram')}, "
        f"looked for in {plural(sum(s.tokens for s in found.scanned), 'token')} of {list_stream_names(found.streams)}: of "
        f"{plural(len(leaks), 'sample')} something was found"
    )
    if common := items.left_out + sum(each.left_out for each in found.scanned):
        yield (
            f"left out as common are {plural(common, 'gram')} in more than {items.common} samples; what is trained often is hidden so too: "
            "--common 0 looks for all"
        )
    if found.unnamed:
        yield (
            f"no manifest says which tokenizer made the ids of {', '.join(found.unnamed)}: of two tokenizers they mean different texts, and "
            "what both share would not be found"
        )
    if items.shorts:
        yield f"skipped {plural(items.shorts, 'sample')} of fewer than {LENGTH} tokens, which have no gram"
    yield BOUND


def leaks_json(found: Audit, decoder: Decoder | None, samples: int) -> Tree:
    """The result for programs: all leaks, and for the first `samples` of them the record ids and
    passages too.
    """
    items = found.items
    return {
        "common": items.common,
        "evaluations": [
            {"name": each.name, "folder": each.folder.url} for each in found.evaluations
        ],
        "samples": len(items.rows),
        "grams": len(items.hashes),
        "left_out": items.left_out,
        "too_short": items.shorts,
        "unnamed": found.unnamed,
        "streams": [
            {
                "name": stream.name,
                "folder": stream.folder.url,
                "tokens": each.tokens,
                "left_out": each.left_out,
            }
            for stream, each in zip(found.streams, found.scanned, strict=True)
        ],
        "leaks": [
            {
                "evaluation": found.evaluations[leak.stream].name,
                "sample": leak.sample,
                "share": leak.share,
                "found": leak.found,
                "of": leak.of,
                "places": [
                    {
                        "stream": found.streams[at.stream].name,
                        "sample": at.sample,
                        "found": at.grams,
                    }
                    for at in leak.places
                ],
            }
            | (_passage_json(found, leak, decoder) if n < samples else {})
            for n, leak in enumerate(found.leaks)
        ],
    }


def _passage_json(found: Audit, leak: Leak, decoder: Decoder | None) -> Tree:
    where = leak.places[0]
    shared: list[int] = read_passage(found, leak).shared.tolist()
    return {
        "id": found.evaluations[leak.stream].id_of(leak.sample),
        "training_id": found.streams[where.stream].id_of(where.sample),
        "shared_ids": shared,
        "shared": decoder.text(shared) if decoder else None,
    }
