"""The bad records of a stream by reason, each with its place, as `mdsmix quarantine` shows them.

A quarantine may hold a tenth of a large corpus, so it is read as a stream: all records are counted, a few of each reason kept.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from mdsmix.shards.published import QUARANTINE, find_published, read_quarantine, working_folder
from mdsmix.storage import Location, locate
from mdsmix.table import grouped
from mdsmix.words import plural, printable

MOST_SHOWN = 300
"Characters of a record, or of a detail, that are shown."
_NOT_PLACE = ("file", "length", "reason", "raw", "raw_base64", "detail")


def find_bad_records(
    stream: str, each: int, only: Sequence[str] = (), most: int | None = None
) -> dict[str, Any]:
    """The bad records of a stream for the reasons in `only`, all without one; `most`: of so many that are read.

    Returns:
        {"stream": ..., "bad": their number, "reasons": {reason: {"count": ..., "records": the first `each` as the quarantine holds
        them}}, the most frequent first, "others": {reason that was not asked for: its count}}.

    Raises:
        Unreachable: nothing is published or quarantined there, or a file of the quarantine is damaged.
    """
    folder, reasons = _folder(locate(stream)), dict[str, Any]()
    for record in islice(read_quarantine(folder), most):
        reason = reasons.setdefault(str(record.get("reason")), {"count": 0, "records": []})
        reason["count"] += 1
        reason["records"] += [record] if reason["count"] <= each else []
    ordered = sorted(reasons.items(), key=lambda item: (-item[1]["count"], item[0]))
    asked = {code: reason for code, reason in ordered if not only or code in only}
    return {
        "stream": str(folder),
        "bad": sum(reason["count"] for reason in asked.values()),
        "reasons": asked,
        "others": {code: reason["count"] for code, reason in ordered if code not in asked},
    }


def bad_records_shown(found: dict[str, Any]) -> Iterator[str]:
    """Each reason with its number, and the first records below it."""
    others = f"; of other reasons: {grouped(found['others'])}" if found["others"] else ""
    yield f"{found['stream']}: {plural(found['bad'], 'bad record')}{others}"
    for code, reason in found["reasons"].items():
        yield from ("", f"{code}: {reason['count']:,}")
        for record in reason["records"]:
            place, *lines = bad_record_lines(record)
            yield from (f"  {place}", *(f"    {line}" for line in lines))


def bad_record_lines(record: dict[str, Any]) -> Iterator[str]:
    """The place of the record, how it begins, and the details of its reason."""
    place = [f"{key} {grouped(value)}" for key, value in record.items() if key not in _NOT_PLACE]
    yield ", ".join([printable(record["file"]), *place, f"{record['length']:,} bytes"])
    # A byte that is no text is written as its number.
    raw = base64.b64decode(record.get("raw_base64", "")).decode("utf-8", "backslashreplace")
    yield cut_text(record.get("raw") or raw)
    for what, value in record.get("detail", {}).items():
        yield f"{what}: {cut_text(value)}"


def _folder(at: Location) -> Location:
    """The split's own folder, where its bad records lie, however it is published: `at`, or the one split below."""
    folders = (working_folder(at), *(at / name for name in at.folders()))
    bad = [folder for folder in folders if any((folder / QUARANTINE).list())]
    return bad[0] if len(bad) == 1 else working_folder(find_published(at))


def cut_text(value: Any, most: int = MOST_SHOWN, keep: str = "") -> str:
    """The value as text that steers no terminal, `most` characters of it. `keep`: as of `printable`."""
    text = str(value)
    more = f"... ({len(text):,} characters)" if len(text) > most else ""
    return printable(text[:most], keep) + more
