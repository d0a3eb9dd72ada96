"""A stream on the page: the lengths of its samples, how many records were written, bad records, shards."""

from __future__ import annotations

from typing import Any

from mdsmix.report.bad_records import BadRecords, Reason, bad_record_lines
from mdsmix.report.length_bars import by_power
from mdsmix.report.page import svg
from mdsmix.report.page.gather import MOST_BAD, NOT_YET, OneStream
from mdsmix.report.targets import TRAINED
from mdsmix.shards.manifest import Manifest
from mdsmix.words import plural

UNSEEN = "Not known: what could not be looked at is said at the top."
"The page says a failure once, at its top, and this in all other places."


def drawn(stream: OneStream, css: str) -> dict[str, Any]:
    """A stream's drawings and figures."""
    found = stream.found
    manifest = found.stream.trusted_manifest if found else None
    sizes = [shard.stored.bytes for shard in found.stream.index.shards] if found else []
    name = stream.place.name
    return {
        "one": stream,
        "name": name,
        "css": css,
        "loader": "" if stream.place.loader == TRAINED else stream.place.loader,
        "problem": NOT_YET if stream.problem == NOT_YET else UNSEEN,
        "index": found.stream.index if found else None,
        "manifest": manifest,
        "lengths": _lengths(name, manifest, css) if manifest else None,
        "fate": _fate(name, manifest, css) if manifest and not manifest.mixed else None,
        "smallest": min(sizes, default=0),
        "largest": max(sizes, default=0),
        "bad": _bad(stream.bad) if stream.bad else [],
        "bad_is_cut": bool(stream.bad and stream.bad.count >= MOST_BAD),
    }


def _bad(found: BadRecords) -> list[tuple[Reason, list[tuple[str, list[str]]]]]:
    """Each reason, with the places of its first records and what they hold."""
    return [(reason, list(map(_bad_record, reason.records))) for reason in found.reasons]


def _bad_record(record: dict[str, Any]) -> tuple[str, list[str]]:
    place, *lines = bad_record_lines(record)
    return place, lines


def _lengths(name: str, manifest: Manifest, css: str) -> dict[str, Any]:
    totals, limit = manifest.totals, manifest.encoding.max_seq_len
    counts = by_power(totals.lengths)
    rows = [(f"{1 << k:,}", f"{min((2 << k) - 1, totals.longest):,}", n) for k, n in counts.items()]
    label = f"{name}: {plural(totals.samples, 'sample')} by length, the longest {totals.longest:,} tokens"
    return {
        "drawing": svg.histogram(label, counts, totals.longest, limit, bool(totals.cut_rows), css),
        "rows": rows,
    }


def _fate(name: str, manifest: Manifest, css: str) -> dict[str, Any]:
    """How many records were written, filtered and quarantined, as a ribbon."""
    records = manifest.records
    of = max(1, records.read)
    parts = [("written", css, records.written)]
    parts += [(f"filtered: {reason}", "filtered", n) for reason, n in records.filtered.items()]
    parts += [(f"quarantined: {reason}", "bad", n) for reason, n in records.quarantined.items()]
    said = [f"{what}: {count:,} ({count / of:.1%})" for what, _, count in parts]
    label = f"{name}: {plural(records.read, 'record')} read: {', '.join(said)}"
    drawn = [(css, n / of, text) for (_, css, n), text in zip(parts, said, strict=True)]
    return {
        "drawing": svg.ribbon(label, drawn, 18),
        "parts": [(what, css, n, n / of) for what, css, n in parts],
        "records": records,
    }
