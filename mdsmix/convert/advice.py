"""Advice where many records are bad: what most likely has to change, by the commonest reasons, with one record as an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import orjson

from mdsmix.convert.job import Job
from mdsmix.convert.quarantine import first_of
from mdsmix.kinds import shape_of
from mdsmix.record import Document
from mdsmix.shapes import SHAPES, Fields, Shape
from mdsmix.shapes.fields import value_at
from mdsmix.shapes.image_parts import PLACEHOLDER
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.shards.counts import Records
from mdsmix.shards.published import read_quarantine
from mdsmix.typed import brief
from mdsmix.words import plural, printable

ARRAY = (
    "A file begins with [, so it is one JSON array, and its name says that it holds a JSON value a line: name it .json, or say "
    "source.format: json."
)

LISTS = ("messages", "conversations", "conversation")
"The keys of fields that hold the messages of a shape."
READ_OTHERWISE = (
    *(
        "bad_message_keys",
        "unknown_role",
        "content_not_text",
        "messages_not_a_list",
        "repeated_role",
    ),
    *("missing_field", "field_not_text"),
)
"Reasons for which a record may be of another shape."
TEMPLATES = ("template_error", "tools_not_printed", "image_not_printed")
"Reasons whose detail says what a chat template does."
MOST_LOOKED_AT = 1_000


def advice(job: Job, records: Records) -> Iterator[str]:
    """Sentences of advice on the commonest reasons."""
    if "json_array" in records.quarantined:
        yield ARRAY
    if bad := first_of(job.folder, "not_json") if "not_json" in records.quarantined else None:
        yield from _one_object(bad)
    yield from _other_shape(job)
    yield from _template(job, records)
    if "unknown_role" in records.quarantined and (roles := _roles(job)):
        yield roles
    yield from _images(job, records)
    if "missing_field" in records.quarantined and (example := _fields(job)):
        yield example


def _one_object(bad: Mapping[str, Any]) -> Iterator[str]:
    if bad.get("line") == 1 and bad.get("raw", "").strip() == "{":
        yield (
            f"{bad['file']} begins with an object over several lines: a record is a whole line, or an element of the one array "
            "that a .json file is."
        )


def _other_shape(job: Job) -> Iterator[str]:
    """What the first bad records are, where another shape or setting reads half of them or more."""
    bad = (bad for bad in read_quarantine(job.folder) if bad["reason"] in READ_OTHERWISE)
    records = [held for one in islice(bad, MOST_LOOKED_AT) if (held := _record(one)) is not None]
    read = {said: sum(map(reads, records)) for said, reads in _others(job)}
    best = max(read, key=read.__getitem__, default="")
    if records and read[best] * 2 >= len(records):
        yield f"{read[best]:,} of the first {plural(len(records), 'bad record')} can be read: say {best}."


def _record(bad: Mapping[str, Any]) -> Any:
    """A bad record that was kept as JSON; None of one whose file holds something else, such as a row of a table."""
    try:
        return orjson.loads(bad["raw"])
    except (KeyError, orjson.JSONDecodeError):
        return None


def _others(job: Job) -> Iterator[tuple[str, Callable[[Any], bool]]]:
    """(what the recipe would have to say, whether a record is then read), what changes least first."""
    own, fields = shape_of(job.encoding), job.encoding.fields
    for key, value in (("consecutive_roles", "merge"), ("nulls", "drop")):
        if key in own.options:
            options = {**job.encoding.shape_options, key: value}
            yield f"{key}: {value}", partial(_is_read, own, fields, options)
    held = next((fields[key] for key in LISTS if key in fields), None)
    for shape in SHAPES.values():
        if shape is own or shape.gives is Document or not shape.fields:
            continue
        usual = {key: key for key in (*shape.fields, *shape.optional)}
        for named in (usual, {key: held or key if key in LISTS else key for key in usual}):
            renamed = [f"{key}: {field}" for key, field in named.items() if key != field]
            yield ", ".join([f"shape: {shape.name}", *renamed]), partial(_is_read, shape, named, {})


def _is_read(shape: Shape, fields: Fields, options: Mapping[str, Any], record: Any) -> bool:
    return not isinstance(shape.read(record, fields, **options), str)


def _template(job: Job, records: Records) -> Iterator[str]:
    """What the chat template says of the first record that it does not render."""
    for reason in TEMPLATES:
        bad = first_of(job.folder, reason) if reason in records.quarantined else None
        if says := (bad or {}).get("detail", {}).get("template"):
            yield f'{reason} is by the chat template: "{printable(says)}".'


def _images(job: Job, records: Records) -> Iterator[str]:
    """What is wrong with an image of the commonest reason, and which key of the recipe most likely mends it."""
    if not job.kind.has_images or not records.quarantined:
        return
    reason = max(records.quarantined, key=records.quarantined.__getitem__)
    bad = first_of(job.folder, reason)
    if bad and reason == "image_count":
        fields = " or ".join(job.fields_of_bytes)
        yield (
            f"Images are read from {fields} and from parts of messages, and each has its place in a text by {PLACEHOLDER}: where a "
            "record's lie elsewhere, name the field by images.field."
        )
    elif bad and (why := bad.get("detail", {}).get("why")):
        root = f"paths begin at {job.images or 'the folder of the records'}, as images.root says"
        hint = f"; {root}" if reason == "image_not_found" else ""
        yield f"{reason} of {brief(bad['detail'].get('image', 'an image'))}: {printable(why)}{hint}."


def _roles(job: Job) -> str | None:
    """The roles of a record with one that its shape does not know."""
    bad, key = first_of(job.folder, "unknown_role"), TAGS["role_tag"]
    held = next((job.encoding.fields[key] for key in LISTS if key in job.encoding.fields), "")
    items = value_at(held, _record(bad)) if bad else None
    if shape_of(job.encoding).name == "sharegpt":
        key = job.encoding.shape_options.get("tags", {}).get("role_tag", key)
    else:
        key = "role"
    said = [item.get(key) for item in items or () if isinstance(item, dict)]
    roles = dict.fromkeys(role for role in said if isinstance(role, str))
    if not roles or bad is None:
        return None
    named = "shape: sharegpt takes any, named in its tags (assistant_tag: ...)"
    return f"A record of {bad['file']} has the roles {brief(', '.join(roles))}; {named}."


def _fields(job: Job) -> str | None:
    bad = first_of(job.folder, "missing_field")
    if bad is None or not {"raw", "fields"} & bad.keys():
        return None
    has = ", ".join(bad.get("fields") or orjson.loads(bad["raw"])) or "none"
    wanted = job.encoding.fields.values()
    return f"The recipe reads {' and '.join(wanted)}; a bad record of {bad['file']} has the fields {has}."
