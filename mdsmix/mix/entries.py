"""Entries of a YAML list, set one by one: those that stay are not touched by a character, those that change are set key by key.

A list that is not written in the usual way, a dash on every entry's own line, is left to be written anew as a whole.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.mix.edits import DASH, Edit, applied, comments, without_tail
from mdsmix.mix.head import dump
from mdsmix.mix.mappings import WrittenOtherwise, mapping_edits
from mdsmix.training.training_yaml import unresolved


def entry_edits(text: str, value: Any, said: Any, old: Any) -> list[Edit]:
    """The edits that make the list `value` of the node `old`, which says `said`; none where it is written otherwise."""
    if not isinstance(value, list) or getattr(old, "flow_style", True) or not said:
        return []
    if isinstance(said, dict):
        return _listed(text, value, said, old)
    places = [_place(text, node, old) for node in old.value]
    if len(places) != len(said) or None in places:
        return []
    dash = min(column for _, _, column in filter(None, places))
    edits = [
        edit
        for place, node, new, was in zip(filter(None, places), old.value, value, said, strict=False)
        if new != was
        for edit in _set(text, new, was, node, *place)
    ]
    return [*edits, _appended(text, value[len(said) :], old, dash - 2)]


def _place(text: str, node: Any, old: Any) -> tuple[int, int, int] | None:
    """Start, stop and column of an entry that stands behind its dash; an alias stands elsewhere."""
    start = node.start_mark.index
    head = text[text.rfind("\n", 0, start) + 1 : start]
    if not old.start_mark.index <= start < old.end_mark.index or not DASH.fullmatch(head):
        return None
    return start, without_tail(text, start, node.end_mark.index), node.start_mark.column


def _set(
    text: str, new: Any, was: Any, node: Any, start: int, stop: int, column: int
) -> list[Edit]:
    """Those of its keys, else of all its lines, with the comments among them behind it."""
    with suppress(WrittenOtherwise, RecipeError):
        edits = mapping_edits(text, new, was, node) if isinstance(new, Mapping) else []
        if edits and unresolved(" " * column + applied(text[:stop], edits)[start:], "") == new:
            return edits
    before = text[start:stop]
    kept = comments(before) if before.endswith("\n") and node.id != "scalar" else ""
    return [Edit(start, stop, _entry(new, before, column) + kept)]


def _entry(entry: Any, before: str, column: int) -> str:
    lines = textwrap.indent(dump(entry), " " * column)[column:]
    return lines if before.endswith("\n") else lines.rstrip("\n")


def _appended(text: str, entries: Sequence[Any], old: Any, dash: int) -> Edit:
    """New entries behind the last one, before the comments that belong to what follows."""
    stop = without_tail(text, old.start_mark.index, old.end_mark.index)
    added = "".join(f"{' ' * dash}- {_entry(entry, chr(10), dash + 2)}" for entry in entries)
    is_open = bool(added) and text[stop - 1] != "\n"
    return Edit(stop, stop, f"\n{added}".rstrip("\n") if is_open else added)


def _listed(text: str, value: list[Any], said: dict[str, Any], old: Any) -> list[Edit]:
    """A lone mapping becomes the first entry, where there is room for its dash and it stays as it is."""
    start, column = old.start_mark.index, old.start_mark.column
    head = text[text.rfind("\n", 0, start) + 1 : start]
    if column < 2 or head.strip() or {k: v for k, v in value[0].items() if k in said} != said:
        return []
    label = "" if "label" in said else f"label: {value[0]['label']}\n{' ' * column}"
    return [
        Edit(start - 2, start, f"- {label}"),
        _appended(text, value[1:], old, column - 2),
    ]
