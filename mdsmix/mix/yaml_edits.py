"""Keys and entries of a YAML text replaced in place: all that is not set stays byte for byte."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.mix.head import dump
from mdsmix.training.training_yaml import unresolved

DASH = re.compile(r" *- +")


class Edit(NamedTuple):
    """Characters `start` to `stop` become `text`."""

    start: int
    stop: int
    text: str


def applied(text: str, edits: Sequence[Edit]) -> str:
    """The text with all of them made; of those at one place the first comes first."""
    parts, at = list[str](), 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        parts += [text[at : edit.start], edit.text]
        at = edit.stop
    return "".join([*parts, text[at:]])


def comments(lines: str) -> str:
    """Those on lines of their own, as they stand."""
    return "".join(line for line in lines.splitlines(True) if line.lstrip().startswith("#"))


def without_tail(text: str, start: int, stop: int) -> int:
    """Where the section ends: comments and blank lines behind it belong to what follows."""
    lines = text[start:stop].splitlines(keepends=True)
    while len(lines) > 1 and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        stop -= len(lines.pop())
    return stop


MERGE = "<<"


class WrittenOtherwise(Exception):
    """The mapping is not written a key a line, so it cannot be set key by key."""


def mapping_edits(text: str, value: Any, said: Any, old: Any) -> list[Edit]:
    """The edits that make the mapping `value` of the node `old`, which says `said`; what it says already keeps its spelling."""
    pairs = {name.value: (name, node) for name, node in _pairs(text, old)}
    edits: list[Edit] = []
    for key, (name, node) in pairs.items():
        before = said.get(key) if isinstance(said, Mapping) else None
        if key not in value:
            edits.append(_removed(text, name, node))
        elif isinstance(value[key], Mapping) and _is_block(node) and _is_behind(name, node):
            edits += mapping_edits(text, value[key], before, node)
        elif before != value[key] or type(before) is not type(value[key]):
            edits.append(_replaced(text, value[key], name, node))
    return [*edits, _added(text, {k: v for k, v in value.items() if k not in pairs}, old)]


def _pairs(text: str, old: Any) -> list[tuple[Any, Any]]:
    if not _is_block(old) or not old.value:
        raise WrittenOtherwise
    for name, _ in old.value:
        head = text[_line(text, name) : name.start_mark.index]
        if name.value == MERGE or (head.strip() and not DASH.fullmatch(head)):
            raise WrittenOtherwise
    return list(old.value)


def _is_block(node: Any) -> bool:
    """Whether it is a mapping with its keys on lines of their own."""
    return getattr(node, "flow_style", True) is False and node.id == "mapping"


def _is_behind(name: Any, node: Any) -> bool:
    """Whether the value stands behind its key; that of an alias stands elsewhere."""
    return bool(node.start_mark.index >= name.end_mark.index)


def _line(text: str, name: Any) -> int:
    return text.rfind("\n", 0, name.start_mark.index) + 1


def _stop(text: str, name: Any, node: Any) -> int:
    """Where the value ends: behind its last character, or its last line where it is a block."""
    if not _is_behind(name, node):
        raise WrittenOtherwise
    stop = int(node.end_mark.index)
    return without_tail(text, name.start_mark.index, stop) if _has_lines(node) else stop


def _has_lines(node: Any) -> bool:
    return getattr(node, "flow_style", None) is False or getattr(node, "style", None) in ("|", ">")


def _removed(text: str, name: Any, node: Any) -> Edit:
    """All its lines but the comments among them."""
    start, stop = _line(text, name), _stop(text, name, node)
    if text[start : name.start_mark.index].strip():
        raise WrittenOtherwise  # the dash of an entry stays
    if text[stop - 1] != "\n":
        stop = (text.find("\n", stop) + 1) or len(text)
    return Edit(start, stop, comments(text[start:stop]) if node.id != "scalar" else "")


def _replaced(text: str, value: Any, name: Any, node: Any) -> Edit:
    """A plain value behind the key as it is written; anything else with its key, and the comments that stood in it."""
    start, stop = node.start_mark.index, _stop(text, name, node)
    new = dump({"": value}).partition(": ")[2].rstrip("\n")
    if not isinstance(value, Mapping | list) and not _has_lines(node) and "\n" not in new:
        return Edit(start, stop, new if start < stop else f" {new}")
    column = name.start_mark.column
    lines = textwrap.indent(dump({name.value: value}), " " * column)[column:]
    if text[stop - 1] != "\n":
        return Edit(name.start_mark.index, stop, lines.rstrip("\n"))
    kept = comments(text[start:stop]) if node.id != "scalar" else ""
    return Edit(name.start_mark.index, stop, lines + kept)


def _added(text: str, keys: Mapping[str, Any], old: Any) -> Edit:
    """New keys behind the last one, before the comments that belong to what follows."""
    stop = without_tail(text, old.start_mark.index, old.end_mark.index)
    lines = textwrap.indent(dump(keys), " " * old.start_mark.column) if keys else ""
    is_open = bool(lines) and text[stop - 1] != "\n"
    return Edit(stop, stop, f"\n{lines}".rstrip("\n") if is_open else lines)


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
