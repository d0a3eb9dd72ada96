"""A rendered mix written into an existing LLM-Foundry config: everything that is not set stays byte for byte.

A round trip through a YAML library would rewrite numbers, quotes and line breaks all over the file, and would lose the
comment that stands between a replaced section and the next one. So the config is walked as nodes with their places in the text, and the
smallest one that says something else is replaced: a key of a block mapping, an entry of a block list, else the whole value. The result is
parsed again and compared with what was there; where YAML anchors tie sections together, nothing is written.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.training.training_yaml import unresolved

INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
DASH = re.compile(r" *- +")
MARK = "# mdsmix:"
"Begins every line of the head, so that the next rendering replaces it and nothing else."
LENGTH = "max_seq_len"
MERGE = "<<"
TIED = (
    "{} cannot be written into without changing other parts of it, since YAML anchors tie its sections together: "
    "render without --into and copy train_loader and tokenizer by hand."
)


def dump(tree: Mapping[str, Any] | list[Any]) -> str:
    """Block YAML in the order of the mapping."""
    import yaml

    return str(yaml.safe_dump(tree, sort_keys=False, width=1 << 20, allow_unicode=True))


def without_head(text: str) -> str:
    """The text without the head of an earlier rendering."""
    lines = text.splitlines(keepends=True)
    kept = next((i for i, line in enumerate(lines) if not line.startswith(MARK)), len(lines))
    return "".join(lines[kept:])


class Edit(NamedTuple):
    """Characters `start` to `stop` become `text`."""

    start: int
    stop: int
    text: str


class WrittenOtherwise(Exception):
    """The value is not written a key or an entry a line, so it is replaced as a whole."""


def set_into(text: str, tree: Mapping[str, Any], origin: str) -> str:
    """The config `text` with the sections of `tree` set; RecipeError where that would change anything else."""
    text = without_head(text)
    root = _composed(text, origin)
    before = unresolved(text, origin)
    path = _length_path(root)
    sections = {key: value for key, value in tree.items() if key != LENGTH or not path}
    there = {key: pair for key in sections if (pair := _child(root, key))}
    edits = _length_edit(root, path, tree[LENGTH])
    try:
        for key, (name, node) in there.items():
            edits += _value_edits(text, sections[key], before.get(key), name, node)
    except WrittenOtherwise:
        raise RecipeError(TIED.format(origin)) from None
    result = _applied(text, edits)
    result += "\n" if result and not result.endswith("\n") else ""
    if added := {key: value for key, value in sections.items() if key not in there}:
        result += dump(added)
    _prove(text, result, tree, path, origin)
    return result


def _composed(text: str, origin: str) -> Any:
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise RecipeError(f"{origin} is not a readable YAML: {reason}.") from None
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise RecipeError(
            f"{origin} cannot be written into: its top level must be keys on lines of their own."
        )
    return root


def _child(node: Any, key: str) -> tuple[Any, Any] | None:
    """The key's node and its value's."""
    pairs = node.value if node.id == "mapping" else []
    return next((pair for pair in pairs if pair[0].value == key), None)


def _length_path(root: Any) -> list[str]:
    """Where the length is written: max_seq_len, or the variable that it resolves to; empty where there is none."""
    path, seen = [LENGTH], set()
    while (node := _at(root, path)) is not None:
        link = INTERPOLATION.fullmatch(str(node.value))
        if not link or link[1] in seen or _at(root, link[1].split(".")) is None:
            return path
        seen.add(link[1])
        path = link[1].split(".")
    return []


def _at(node: Any, path: list[str]) -> Any:
    for key in path:
        pair = _child(node, key)
        if pair is None:
            return None
        node = pair[1]
    return node


def _length_edit(root: Any, path: list[str], length: int) -> list[Edit]:
    node = _at(root, path) if path else None
    if node is None or node.value == str(length):
        return []
    return [Edit(node.start_mark.index, node.end_mark.index, str(length))]


def _value_edits(text: str, new: Any, was: Any, name: Any, node: Any) -> list[Edit]:
    """The edits by which the key `name` says `new`; `node` says `was`. What it says already keeps its spelling."""
    if new == was and type(new) is type(was):
        return []
    if not node.start_mark.index >= name.end_mark.index:  # an alias: its value is written elsewhere
        raise WrittenOtherwise
    with suppress(WrittenOtherwise):
        if isinstance(new, Mapping):
            return _mapping_edits(text, new, was, node)
        if isinstance(new, list):
            return _list_edits(text, new, was, node)
    return [_replaced(text, new, name, node)]


def _mapping_edits(text: str, new: Mapping[str, Any], was: Any, node: Any) -> list[Edit]:
    if not _is_block(node, "mapping") or not isinstance(was, Mapping):
        raise WrittenOtherwise
    edits, there = list[Edit](), set[str]()
    for name, value in node.value:
        before = _before(text, name.start_mark.index)
        if not name.tag.endswith(":str") or (before.strip() and not DASH.fullmatch(before)):
            raise WrittenOtherwise
        there.add(name.value)
        if name.value in new:
            edits += _value_edits(text, new[name.value], was.get(name.value), name, value)
        else:
            edits.append(_removed(text, name, value))
    added = {key: value for key, value in new.items() if key not in there}
    return [*edits, *_added(text, added, node, node.start_mark.column)]


def _list_edits(text: str, new: list[Any], was: Any, node: Any) -> list[Edit]:
    """The edits of a list of mappings that has grown, or of a lone mapping that becomes its first entry."""
    if not all(isinstance(entry, Mapping) for entry in new):
        raise WrittenOtherwise
    if isinstance(was, Mapping) and _is_block(node, "mapping"):
        return _listed(text, new, was, node)
    if not _is_block(node, "sequence") or not isinstance(was, list) or len(new) < len(was):
        raise WrittenOtherwise
    edits = [
        edit
        for entry, value, before in zip(node.value, new, was, strict=False)
        for edit in _entry_edits(text, value, before, entry, node)
    ]
    return [*edits, *_added(text, new[len(was) :], node, node.start_mark.column)]


def _listed(text: str, new: list[Any], was: Mapping[str, Any], node: Any) -> list[Edit]:
    """The first entry needs room for its dash, and stays as it is."""
    start, column = node.start_mark.index, node.start_mark.column
    is_kept = {k: v for k, v in new[0].items() if k in was} == was
    if column < 2 or _before(text, start).strip() or not is_kept:
        raise WrittenOtherwise
    label = "" if "label" in was else f"label: {new[0]['label']}\n{' ' * column}"
    return [Edit(start - 2, start, f"- {label}"), *_added(text, new[1:], node, column - 2)]


def _entry_edits(text: str, new: Any, was: Any, entry: Any, node: Any) -> list[Edit]:
    """The edits of an entry that stands behind its dash; an alias stands elsewhere."""
    start = entry.start_mark.index
    is_here = node.start_mark.index <= start < node.end_mark.index
    if not is_here or not DASH.fullmatch(_before(text, start)):
        raise WrittenOtherwise
    if new == was:
        return []
    with suppress(WrittenOtherwise):
        return _mapping_edits(text, new, was, entry)
    return [_written(text, start, _without_tail(text, start, entry.end_mark.index), new, entry)]


def _removed(text: str, name: Any, node: Any) -> Edit:
    """All its lines but the comments among them."""
    start, stop = name.start_mark.index, _stop(text, name, node)
    before = _before(text, start)
    if before.strip() or stop < start:  # the dash of an entry stays; an alias is written elsewhere
        raise WrittenOtherwise
    if text[stop - 1] != "\n":
        stop = (text.find("\n", stop) + 1) or len(text)
    start -= len(before)
    return Edit(start, stop, _comments(text[start:stop]) if node.id != "scalar" else "")


def _replaced(text: str, value: Any, name: Any, node: Any) -> Edit:
    """A plain value behind the key as it is written; anything else with its key."""
    start, stop = node.start_mark.index, _stop(text, name, node)
    new = dump({"": value}).partition(": ")[2].rstrip("\n")
    if not isinstance(value, Mapping | list) and not _has_lines(node) and "\n" not in new:
        return Edit(start, stop, new if start < stop else f" {new}")
    return _written(text, name.start_mark.index, stop, {name.value: value}, node)


def _written(text: str, start: int, stop: int, tree: Mapping[str, Any], node: Any) -> Edit:
    """The lines of `node` as those of `tree`, with the comments that stood among them behind."""
    column = len(_before(text, start))
    lines = textwrap.indent(dump(tree), " " * column)[column:]
    if text[stop - 1] != "\n":
        return Edit(start, stop, lines.rstrip("\n"))
    return Edit(start, stop, lines + (_comments(text[start:stop]) if node.id != "scalar" else ""))


def _added(text: str, new: Mapping[str, Any] | list[Any], node: Any, column: int) -> list[Edit]:
    """New keys or entries behind the last one, before the comments that belong to what follows."""
    if not new:
        return []
    stop = _without_tail(text, node.start_mark.index, node.end_mark.index)
    lines = textwrap.indent(dump(new), " " * column)
    return [Edit(stop, stop, lines if text[stop - 1] == "\n" else f"\n{lines}".rstrip("\n"))]


def _is_block(node: Any, kind: str) -> bool:
    """Whether it is a mapping or sequence with its keys or entries on lines of their own."""
    return bool(node.id == kind and not node.flow_style and node.value)


def _has_lines(node: Any) -> bool:
    return node.style in ("|", ">") if node.id == "scalar" else not node.flow_style


def _before(text: str, start: int) -> str:
    """What stands before it on its line."""
    return text[text.rfind("\n", 0, start) + 1 : start]


def _stop(text: str, name: Any, node: Any) -> int:
    """Where the value ends: behind its last character, or its last line where it is a block."""
    stop = int(node.end_mark.index)
    return _without_tail(text, name.start_mark.index, stop) if _has_lines(node) else stop


def _without_tail(text: str, start: int, stop: int) -> int:
    """Where the section ends: comments and blank lines behind it belong to what follows."""
    lines = text[start:stop].splitlines(keepends=True)
    while len(lines) > 1 and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        stop -= len(lines.pop())
    return stop


def _comments(lines: str) -> str:
    """Those on lines of their own, as they stand."""
    return "".join(line for line in lines.splitlines(True) if line.lstrip().startswith("#"))


def _applied(text: str, edits: Sequence[Edit]) -> str:
    """The text with all of them made; of those at one place the first comes first."""
    parts, at = list[str](), 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        parts += [text[at : edit.start], edit.text]
        at = edit.stop
    return "".join([*parts, text[at:]])


def _prove(old: str, new: str, tree: Mapping[str, Any], path: list[str], origin: str) -> None:
    """Raises unless the new text says what the tree says, and of everything else what the old one said."""
    import yaml
    from omegaconf import OmegaConf

    try:
        before, after = (OmegaConf.to_container(OmegaConf.create(t or "{}")) for t in (old, new))
    except (yaml.YAMLError, ValueError):
        before, after = None, {}
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise RecipeError(TIED.format(origin))
    wrong = any(after.get(key) != tree[key] for key in tree if key != LENGTH)
    for config in (before, after):
        for key in tree if not path else set(tree) - {LENGTH}:
            config.pop(key, None)
        _forget(config, path)
    if wrong or before != after:
        raise RecipeError(TIED.format(origin))


def _forget(config: Any, path: list[str]) -> None:
    for key in path[:-1]:
        config = config.get(key, {})
    if path:
        config.pop(path[-1], None)
