"""Advice where many records are bad: what most likely has to change, by the commonest reasons, with one record as an example."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from mdsmix.convert.job import Job
from mdsmix.convert.quarantine import first_of
from mdsmix.shards.manifest import Records

ARRAY = (
    "A file begins with [, so it is one JSON array, and its name says that it holds a JSON value a line: name it .json, or say "
    "source.format: json."
)


def advice(job: Job, records: Records) -> Iterator[str]:
    """Sentences of advice on the commonest reasons."""
    if "json_array" in records.quarantined:
        yield ARRAY
    if "missing_field" in records.quarantined and (example := _fields(job)):
        yield example


def _fields(job: Job) -> str | None:
    bad = first_of(job.folder, "missing_field")
    if bad is None or not {"raw", "fields"} & bad.keys():
        return None
    has = ", ".join(bad.get("fields") or orjson.loads(bad["raw"])) or "none"
    wanted = job.encoding.fields.values()
    return f"The recipe reads {' and '.join(wanted)}; a bad record of {bad['file']} has the fields {has}."
