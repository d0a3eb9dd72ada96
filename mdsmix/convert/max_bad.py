"""Whether too many records are bad, of the whole stream and already after its first units, and what most likely has to change then.

`max_bad` limits the share of all records. A run stops early where the first units of the plan are nearly all bad (the wrong file, the
wrong field). Units are looked at in the order of the plan, so any number of workers gives the same sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

import orjson

from mdsmix.convert.job import Job
from mdsmix.convert.stored import UnitResult
from mdsmix.errors import TooManyBadRecords
from mdsmix.kinds import shape_of
from mdsmix.record import Document
from mdsmix.shapes import SHAPES
from mdsmix.shards.counts import Records
from mdsmix.shards.published import read_quarantine
from mdsmix.typed import brief
from mdsmix.words import plural, printable

FIRST_UNITS = 3
NEARLY_ALL = Fraction(9, 10)
MOST_LOOKED_AT = 1_000
ARRAY = (
    "A file begins with [, so it is one JSON array, and its name says that it holds a JSON value a line: name it .json, or say "
    "source.format: json."
)
UNREADABLE = {"bad_message_keys", "content_not_text", "messages_not_a_list"}
"Reasons for which a record may be of another shape."
ADVICE = {
    "json_array": ARRAY,
    "repeated_role": "consecutive_roles: merge joins messages of one role that follow each other.",
    "unknown_role": "shape: sharegpt takes any role, named in its tags (assistant_tag: ...).",
    "image_count": "Each image has its place in a text by <image>; a field of images is named by images.field.",
    "image_not_found": "Paths begin at images.root, or at the folder of the records.",
}
"Of a reason: what most likely mends it."


def refuse_too_many_bad(job: Job, records: Records) -> None:
    """TooManyBadRecords where more records of the whole stream were bad than the recipe's max_bad allows."""
    if records.bad > job.max_bad * records.sampled:
        raise _refusal(job, records, f", more than max_bad {_percent(job.max_bad)}")


def first_units(results: Mapping[int, UnitResult]) -> list[UnitResult]:
    """The results of the first units, where all of them are done. `results`: by the numbers of their units."""
    first = [results[number] for number in range(FIRST_UNITS) if number in results]
    return first if len(first) == FIRST_UNITS else []


def are_nearly_all_bad(job: Job, first: Sequence[UnitResult]) -> bool:
    records = _records(first)
    return records.bad > max(NEARLY_ALL, job.max_bad) * records.sampled


def refusal_of_first(job: Job, first: Sequence[UnitResult], units: int) -> TooManyBadRecords:
    """Of so many units."""
    of = f" in the first {len(first)} of {units} work units, and max_bad is {_percent(job.max_bad)}, so the others were not waited for"
    return _refusal(job, _records(first), of)


def _records(results: Sequence[UnitResult]) -> Records:
    return sum((record.records for result in results for record in result.records), Records())


def _refusal(job: Job, records: Records, why: str) -> TooManyBadRecords:
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in records.quarantined.items())
    return TooManyBadRecords(
        f"stream {job.name}: {records.bad:,} of {records.sampled:,} records are bad ({reasons}){why}; nothing new is published, finished "
        f"units are kept. {advice(job, records)} They lie in {job.target}/quarantine (mdsmix quarantine shows them): mend the source, or "
        "raise max_bad (1.0 allows any number)."
    )


def _percent(share: Fraction) -> str:
    return f"{float(100 * share):.4f}".rstrip("0").rstrip(".") + "%"


def advice(job: Job, records: Records) -> str:
    """What most likely has to change, with the first record of each reason as an example."""
    bad, first = list(islice(read_quarantine(job.folder), MOST_LOOKED_AT)), dict[str, Any]()
    for record in bad:
        first.setdefault(record["reason"], record)
    said = [ADVICE[reason] for reason in records.quarantined if reason in ADVICE]
    said += _other_shape(job, bad)
    if not said and UNREADABLE & records.quarantined.keys():
        said.append("mdsmix init SOURCE says which shape and settings read such records.")
    said += (
        each for reason in records.quarantined for each in _example(job, first.get(reason, {}))
    )
    return " ".join(said)


def _other_shape(job: Job, bad: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The shape that reads half of the bad records or more."""
    records = [value for record in bad if (value := _value(record)) is not None]
    for shape in SHAPES.values():
        fields = {key: key for key in (*shape.fields, *shape.optional)}
        if shape.fields and shape.gives is not Document and shape is not shape_of(job.encoding):
            read = sum(not isinstance(shape.read(record, fields), str) for record in records)
            if records and read * 2 >= len(records):
                yield f"{read:,} of the first {plural(len(records), 'bad record')} can be read: say shape: {shape.name}."
                return


def _value(bad: Mapping[str, Any]) -> Any:
    """A bad record that was kept as JSON; None of one whose file holds something else, such as a row of a table."""
    try:
        return orjson.loads(bad["raw"])
    except (KeyError, orjson.JSONDecodeError):
        return None


def _example(job: Job, bad: Mapping[str, Any]) -> Iterator[str]:
    detail = bad.get("detail") or {}
    if says := detail.get("template"):
        yield f'{bad["reason"]} is by the chat template: "{printable(says)}".'
    elif why := detail.get("why"):
        image = brief(detail.get("image", "an image"))
        yield f"{bad['reason']} of {image}: {printable(why)}."
    elif bad.get("reason") == "missing_field" and (has := bad.get("fields") or _value(bad)):
        reads = " and ".join(job.encoding.fields.values())
        yield f"The recipe reads {reads}; a bad record of {bad['file']} has the fields {', '.join(has)}."
    elif (
        bad.get("reason") == "not_json"
        and bad.get("line") == 1
        and bad.get("raw", "").strip() == "{"
    ):
        yield (
            f"{bad['file']} begins with an object over several lines: a record is a whole line, or an element of the one array "
            "that a .json file is."
        )
