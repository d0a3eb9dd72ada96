"""The bad records of a stream by reason, each with its place, as `mdsmix quarantine` shows them.

A quarantine may hold a tenth of a large corpus, so it is read as a stream: all records are counted, a few of each reason kept.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.shards.published import QUARANTINE, find_published, read_quarantine, working_folder
from mdsmix.storage import Location, locate
from mdsmix.table import grouped
from mdsmix.words import plural, printable

MOST_SHOWN = 300
"Characters of a record, or of a detail, that are shown."
_NOT_PLACE = ("file", "length", "reason", "raw", "raw_base64", "detail")


def find_bad_records(stream: str, each: int, most: int | None = None) -> dict[str, Any]:
    """The bad records of a stream, `most` of them where that is given: {"stream": ..., "bad": their number, "reasons": {reason:
    {"count": ..., "records": the first `each` as the quarantine holds them}}}, the most frequent reason first.

    Raises:
        Unreachable: nothing is published or quarantined there, or a file of the quarantine is damaged.
    """
    folder, reasons = _folder(locate(stream)), dict[str, Any]()
    for record in islice(read_quarantine(folder), most):
        reason = reasons.setdefault(str(record.get("reason")), {"count": 0, "records": []})
        reason["count"] += 1
        reason["records"] += [record] if reason["count"] <= each else []
    ordered = sorted(reasons.items(), key=lambda item: (-item[1]["count"], item[0]))
    return _result(str(folder), dict(ordered))


def _result(stream: str, reasons: dict[str, Any]) -> dict[str, Any]:
    bad = sum(reason["count"] for reason in reasons.values())
    return {"stream": stream, "bad": bad, "reasons": reasons}


def of_reasons(found: dict[str, Any], only: Sequence[str]) -> dict[str, Any]:
    """Those of the reasons in `only`; all without one."""
    reasons = {code: r for code, r in found["reasons"].items() if not only or code in only}
    return _result(found["stream"], reasons)


def refuse_unknown(found: Sequence[dict[str, Any]], only: Sequence[str]) -> None:
    """RecipeError if no record of any stream has a reason of `only`."""
    codes = {code for one in found for code in one["reasons"]}
    for code in only if found else ():
        if code not in codes:
            known = ", ".join(sorted(codes)) or "none, since no record is bad"
            where = ", ".join(one["stream"] for one in found)
            raise RecipeError(
                f"--reason {code}: no record of {where} is bad for that; the reasons are {known}."
            )


def bad_records_shown(found: dict[str, Any]) -> Iterator[str]:
    """Each reason with its number, and the first records below it."""
    yield f"{found['stream']}: {plural(found['bad'], 'bad record')}"
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
    yield _shown(record.get("raw") or raw)
    for what, value in record.get("detail", {}).items():
        yield f"{what}: {_shown(value)}"


def _folder(at: Location) -> Location:
    """The split's own folder, where its bad records lie, however it is published: `at`, or the one split below."""
    own = working_folder(at)
    if _has_bad(own):
        return own
    splits = [at / name for name in at.folders() if _has_bad(at / name)]
    if len(splits) > 1:
        raise Unreachable(
            f"{at} holds {len(splits)} splits with bad records ({', '.join(split.name for split in splits)}); name one, for "
            f"example {splits[0]}."
        )
    return splits[0] if splits else working_folder(find_published(at))


def _has_bad(folder: Location) -> bool:
    return any((folder / QUARANTINE).list())


def _shown(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"
