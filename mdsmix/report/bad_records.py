"""The bad records of a stream by reason, each with its place, as `mdsmix quarantine` shows them.

A quarantine may hold a tenth of a large corpus, so it is read as a stream: all records are counted, a few of each reason kept.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.shards.published import QUARANTINE, find_published, read_quarantine, working_folder
from mdsmix.storage import Location, locate
from mdsmix.words import plural, printable

MOST_SHOWN = 300
"Characters of a record, or of a detail, that are shown."
_NOT_PLACE = ("file", "length", "reason", "raw", "raw_base64", "detail")


@dataclass(slots=True)
class Reason:
    """The bad records of one reason."""

    code: str
    count: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    "The first ones, as the quarantine holds them."


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecords:
    """The quarantine of a stream."""

    where: str
    reasons: Sequence[Reason]
    "The reasons that were asked for, the most frequent first."
    codes: frozenset[str]
    "All reasons."

    @property
    def count(self) -> int:
        return sum(reason.count for reason in self.reasons)


def find_bad_records(
    stream: str, each: int, only: Sequence[str] = (), most: int | None = None
) -> BadRecords:
    """Counts the bad records of a stream, `most` of them where that is given, and keeps the first `each` of every reason, or of the
    reasons in `only`.

    Raises:
        Unreachable: nothing is published or quarantined there, or a file of the quarantine is damaged.
    """
    folder, found = _folder(locate(stream)), dict[str, Reason]()
    for record in islice(read_quarantine(folder), most):
        reason = found.setdefault(code := str(record.get("reason")), Reason(code))
        reason.count += 1
        if reason.count <= each:
            reason.records.append(record)
    wanted = [reason for reason in found.values() if not only or reason.code in only]
    return BadRecords(
        where=str(folder),
        reasons=sorted(wanted, key=lambda r: (-r.count, r.code)),
        codes=frozenset(found),
    )


def refuse_unknown(found: Sequence[BadRecords], only: Sequence[str]) -> None:
    """RecipeError if no record of any stream has a reason of `only`."""
    codes = {code for one in found for code in one.codes}
    for code in only:
        if found and code not in codes:
            known = ", ".join(sorted(codes)) or "none, since no record is bad"
            where = ", ".join(one.where for one in found)
            raise RecipeError(
                f"--reason {code}: no record of {where} is bad for that; the reasons are {known}."
            )


def bad_records_json(found: BadRecords) -> dict[str, Any]:
    """The same for programs, records as the quarantine holds them."""
    reasons = {r.code: {"count": r.count, "records": r.records} for r in found.reasons}
    return {"stream": found.where, "bad": found.count, "reasons": reasons}


def bad_records_shown(found: BadRecords) -> Iterator[str]:
    """Each reason with its number, and the first records below it."""
    yield f"{found.where}: {plural(found.count, 'bad record')}"
    for reason in found.reasons:
        yield from ("", f"{reason.code}: {reason.count:,}")
        for record in reason.records:
            place, *lines = bad_record_lines(record)
            yield from (f"  {place}", *(f"    {line}" for line in lines))


def bad_record_lines(record: dict[str, Any]) -> Iterator[str]:
    """The place of the record, how it begins, and the details of its reason."""
    place = [f"{key} {_number(value)}" for key, value in record.items() if key not in _NOT_PLACE]
    yield ", ".join([printable(record["file"]), *place, f"{record['length']:,} bytes"])
    yield _shown(record.get("raw") or _bytes(record.get("raw_base64", "")))
    for what, value in record.get("detail", {}).items():
        yield f"{what}: {_shown(value)}"


def _bytes(encoded: str) -> str:
    """The bytes as text. A byte that is no text is written as its number."""
    return base64.b64decode(encoded).decode("utf-8", "backslashreplace")


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


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _shown(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"
