"""The text fields of a batch of records, and which records have none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import filterfalse
from typing import Any

from mdsmix.encode.base import Rejected
from mdsmix.encode.special import is_encodable


def read_texts(
    records: list[Any], fields: Sequence[str]
) -> tuple[list[list[str]], list[int], list[Rejected]]:
    """One list of texts per field, the positions of the records they come from, and the bad records.

    A batch without a bad record, nearly every batch, costs one list comprehension a field.
    """
    try:
        columns = [[record[field] for record in records] for field in fields]
        if all(map(_are_texts, columns)):
            return columns, list(range(len(records))), []
    except (KeyError, TypeError, IndexError):
        pass
    faults = [_fault(record, fields) for record in records]
    good = [i for i, fault in enumerate(faults) if fault is None]
    rejected = [Rejected(i, fault, False) for i, fault in enumerate(faults) if fault is not None]
    return [[records[i][field] for i in good] for field in fields], good, rejected


def _are_texts(values: list[Any]) -> bool:
    """All are strings that UTF-8 can hold; asking ASCII first asks nothing of nearly all of them."""
    return set(map(type, values)) <= {str} and all(
        map(is_encodable, filterfalse(str.isascii, values))
    )


def _fault(record: Any, fields: Sequence[str]) -> str | None:
    """The reason code of a record that cannot be read, None for a good one."""
    if not isinstance(record, dict):
        return "not_an_object"
    for field in fields:
        if field not in record:
            return "missing_field"
        if not isinstance(record[field], str):
            return "field_not_text"
        if not is_encodable(record[field]):
            return "lone_surrogate"
    return None
