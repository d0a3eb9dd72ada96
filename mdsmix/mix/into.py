"""A rendered mix written into an existing LLM-Foundry config: everything that is not set stays byte for byte.

A round trip through a YAML library would rewrite numbers, quotes and line breaks all over the file, and would lose the
comment that stands between a replaced section and the next one. So only the characters of the sections that are set are
replaced, key by key (`mappings.py`) or entry by entry (`entries.py`). The result is parsed again and compared with
what was there; where YAML anchors tie sections together, nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.mix.head import dump, without_head
from mdsmix.mix.yaml_edits import (
    Edit,
    WrittenOtherwise,
    applied,
    entry_edits,
    mapping_edits,
    without_tail,
)
from mdsmix.training.training_yaml import unresolved

INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
LENGTH = "max_seq_len"


def set_into(text: str, tree: Mapping[str, Any], origin: str) -> str:
    """The config `text` with the sections of `tree` set; RecipeError where that would change anything else."""
    text = without_head(text)
    root = _composed(text, origin)
    said = unresolved(text, origin)
    path = _length_path(root)
    edits = [_length_edit(root, path, tree[LENGTH])]
    added = "" if path else dump({LENGTH: tree[LENGTH]})
    for key in (k for k in tree if k != LENGTH):
        found = _child(root, key)
        if found is None:
            added += dump({key: tree[key]})
        else:
            edits += entry_edits(text, tree[key], said.get(key), found[1]) or _section_edits(
                text, key, tree[key], said.get(key), *found
            )
    result = applied(text, [edit for edit in edits if edit])
    result += ("\n" if result and not result.endswith("\n") else "") + added
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
    pairs = node.value if isinstance(node.value, list) else []
    return next((p for p in pairs if isinstance(p, tuple) and p[0].value == key), None)


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


def _length_edit(root: Any, path: list[str], length: int) -> Edit | None:
    node = _at(root, path) if path else None
    if node is None or node.value == str(length):
        return None
    return Edit(node.start_mark.index, node.end_mark.index, str(length))


def _section_edits(text: str, key: str, value: Any, said: Any, name: Any, old: Any) -> list[Edit]:
    """Those of its keys, else of all its lines; comments and blank lines behind it belong to what follows."""
    with suppress(WrittenOtherwise, RecipeError):
        edits = mapping_edits(text, value, said, old) if isinstance(value, Mapping) else []
        if edits and unresolved(applied(text, edits), key).get(key) == value:
            return edits
    start = name.start_mark.index
    stop = without_tail(text, start, old.end_mark.index)
    new = dump({key: value})
    return [Edit(start, stop, new if text[stop - 1] == "\n" else new.rstrip("\n"))]


def _prove(old: str, new: str, tree: Mapping[str, Any], path: list[str], origin: str) -> None:
    """Raises unless the new text says what the tree says, and of everything else what the old one said."""
    import yaml
    from omegaconf import OmegaConf

    try:
        before, after = (OmegaConf.to_container(OmegaConf.create(t or "{}")) for t in (old, new))
    except (yaml.YAMLError, ValueError):
        before, after = None, {}
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise RecipeError(_TIED.format(origin))
    wrong = any(after.get(key) != tree[key] for key in tree if key != LENGTH)
    for config in (before, after):
        for key in tree if not path else set(tree) - {LENGTH}:
            config.pop(key, None)
        _forget(config, path)
    if wrong or before != after:
        raise RecipeError(_TIED.format(origin))


def _forget(config: Any, path: list[str]) -> None:
    for key in path[:-1]:
        config = config.get(key, {})
    if path:
        config.pop(path[-1], None)


_TIED = (
    "{} cannot be written into without changing other parts of it, since YAML anchors tie its sections together: "
    "render without --into and copy train_loader and tokenizer by hand."
)
