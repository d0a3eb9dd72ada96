"""A YAML mapping set key by key: of what stays no character is touched, and a comment on a line of its own stays whatever goes.

A mapping in braces, an alias that would change and a merge (`<<`) are left to be written anew as a whole.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from mdsmix.mix.edits import DASH, Edit, comments, without_tail
from mdsmix.mix.head import dump

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
