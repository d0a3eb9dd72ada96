"""Sentences on a file that becomes no stream: what it holds, what the nearest shapes lack, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from mdsmix.init.finding import first_bytes
from mdsmix.init.first_records import FirstRecords
from mdsmix.init.recognise import Guess, names_of, nearest
from mdsmix.shapes import SHAPES
from mdsmix.sources import packing_of
from mdsmix.sources.rows import begins_as
from mdsmix.words import listed, printable

LIST_INSIDE = re.compile(rb'\s*\{.*?"(\w+)"\s*:\s*\[\s*\{', re.DOTALL)
MOST_SHOWN = 12
"Fields or paths that a line names."


def named(names: Iterable[str]) -> str:
    """The names, without escape codes."""
    return listed(list(map(printable, names)), MOST_SHOWN)


def described(head: FirstRecords, best: Sequence[Guess]) -> Iterator[str]:
    """A file of no known shape: what it holds, and what the nearest shapes would want."""
    if not head.records and not head.bad:
        yield f"{head.file.name} holds no record"
        return
    if inner := _list_inside(head):
        yield (
            f"{head.file.name} is one object, and its records are in the list {inner}: `jq -c '.{inner}[]'` writes them one on a line, "
            "as JSON Lines have them"
        )
        return
    if not head.fields:
        reasons = ", ".join(f"{n} {reason}" for reason, n in head.bad.most_common())
        yield f"{head.file.name} holds no record that is an object ({reasons or 'other values'}){_instead(head)}"
        return
    yield f"{head.file.name} is of no known shape; its records have the fields {named(head.fields)}"
    for guess in nearest(best):
        if guess.missing:
            wants = " and ".join(_spelled(guess, key) for key in guess.missing)  # fmt: skip
            yield f"  {guess.shape.name}: there is no field {wants}"
        else:
            why = ", ".join(f"{n} {reason}" for reason, n in guess.reasons.items())
            read = ", ".join(guess.fields.values()) or "all fields"
            yield f"  {guess.shape.name}: of {guess.of} records {guess.read} can be read by {read} ({why})"


def _list_inside(head: FirstRecords) -> str:
    """The field whose list holds the records, of a file that is one object; empty where there is none."""
    found = LIST_INSIDE.match(first_bytes(head.file)) if len(head.records) < 2 else None
    lists = {name for shape in SHAPES.values() for key in shape.structured for name in names_of(shape, key)}  # fmt: skip
    return found[1].decode() if found and found[1].decode() not in lists else ""


def _instead(head: FirstRecords) -> str:
    """What a file without records may be, and what to do."""
    looks = "" if packing_of(head.file.name) else begins_as(head.file)
    if looks == "JSON Lines":
        return "; in JSON Lines a record stands on one line, as `jq -c .` writes it"
    if looks:
        return f"; it begins as {looks} does: name it by what it is, or say so by source.format"
    if "invalid_utf8" in head.bad:
        return "; text is read as UTF-8, as `iconv -f LATIN1 -t UTF-8` writes it"
    return ""


def _spelled(guess: Guess, key: str) -> str:
    _, *others = names_of(guess.shape, key)
    return f"{key} (or {', '.join(others)})" if others else key
