"""A rendered mix written into an existing LLM-Foundry config: everything that is not set stays byte
for byte.

A round trip through a YAML library would rewrite numbers, quotes and line breaks all over the file,
and would lose the comment that stands between a replaced section and the next one. So the config is
walked as nodes with their places in the text. A changed value on one line is replaced within the
line; any other change replaces the lines of its key or list entry. The result is parsed again.
Where it differs from the wanted config, as when YAML anchors tie sections together, nothing is
written.

Nothing that a user wrote is replaced in silence: `changes` names every key whose value changed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from operator import itemgetter
from pprint import pformat
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.training_yaml import Settings, read_unresolved
from mdsmix.messages import format_yaml_value

LINK = re.compile(r"\$\{([\w.]+)\}")
MARK = "# mdsmix:"
"Begins every line of the head, so that the next rendering replaces the head and nothing else."
LENGTH = "max_seq_len"
UNSET = "not set"
TAIL = re.compile(r"(?:^[^\S\n]*(?:#.*)?\n)+\Z", re.MULTILINE)
COMMENT = re.compile(r"^[^\S\n]*#.*\n", re.MULTILINE)
TIED = (
    "{} cannot be written into without changing other parts of it, since YAML anchors tie its sections together: "
    "render without --into and copy train_loader and tokenizer by hand."
)


BLOCKS: dict[str, Any] = {"mapping": dict, "sequence": list}


def dump_yaml(tree: Settings | list[Any], in_line: bool = False) -> str:
    """Block YAML in the order of the mapping, or, with `in_line`, flow YAML on one line."""
    import yaml

    style: dict[str, Any] = {"width": 1 << 30, "default_flow_style": in_line}
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, **style))


Edit = tuple[int, int, str]
"(start, stop, new): the characters from start to stop become `new`."


def strip_head(text: str) -> str:
    """The text without the head of an earlier rendering."""
    return re.sub(rf"\A(?:{MARK}.*\n)+", "", text)


def set_sections(
    text: str, was: Settings, tree: Settings, origin: str, without: Set[str] = frozenset()
) -> tuple[str, list[str]]:
    """Return the config `text` with the sections of `tree` set, and a line for each changed key.

    Args:
        was: the keys and values of the text.
        without: keys at the top of the text that are taken out, unless `tree` has them.

    Raises RecipeError if anything else would change.
    """
    import yaml
    from omegaconf import OmegaConf

    text = strip_head(text)
    text += "" if text.endswith("\n") else "\n"
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise RecipeError(
            f"{origin} cannot be written into: its top level must be keys on lines of their own."
        )
    # A max_seq_len that refers to a variable (`${...}`) still does; the variable gets the new
    # length.
    link = LINK.fullmatch(str(was.get(LENGTH)))
    rest = {key: value for key, value in was.items() if key not in without}
    config = OmegaConf.create({**rest, **tree, LENGTH: was.get(LENGTH)})
    is_linked = link and OmegaConf.select(config, link[1])
    OmegaConf.update(config, link[1] if link and is_linked else LENGTH, tree[LENGTH])
    wanted: Any = OmegaConf.to_container(config)
    odd = {name.value: None for name, _ in root.value}  # a merge, or a number: such keys stay
    kept = {key: value for key, value in odd.items() if key not in without}
    edits = sorted(_edits(text, kept | wanted, {**odd, **was}, root, len(text)), key=itemgetter(0))
    for start, stop, new in reversed(edits):  # from the end, so that every place is the old text's
        text = text[:start] + new + text[stop:]
    with suppress(RecipeError):
        if read_unresolved(text, origin) == wanted:
            return text, [*list_changes(was, wanted)]
    raise RecipeError(TIED.format(origin))


def _edits(text: str, new: Any, was: Any, node: Any, stop: int) -> Iterator[Edit]:
    """The edits that turn a block from `was` into `new`; unchanged values keep their spelling.
    `stop`: where the block's lines end.
    """
    if is_list := node.id == "sequence":
        new, was = dict(enumerate(new)), dict(enumerate(was))
    pairs = [(entry, entry) for entry in node.value] if is_list else node.value
    keys = [*range(len(pairs))] if is_list else [name.value for name, _ in pairs]
    stops = [*(_line(text, name) for name, _ in pairs[1:]), stop]
    for key, (name, value), end in zip(keys, pairs, stops, strict=True):
        # Comments and blank lines behind a key belong to the next key.
        start = name.start_mark.index
        stop = start + len(TAIL.sub("", text[start:end]))
        if key not in new:
            yield (_line(text, name), stop, _comments(text[start:stop], value))
        elif _differ(new[key], was.get(key)):
            yield from _changed(text, new[key], was.get(key), (name, value), stop)
    if added := {k: v for k, v in new.items() if k not in keys}:
        lines = dump_yaml([*added.values()] if is_list else added)
        yield (stop, stop, textwrap.indent(lines, " " * node.start_mark.column))


def _changed(text: str, new: Any, was: Any, pair: tuple[Any, Any], stop: int) -> Iterator[Edit]:
    """The edits of one key or list entry. A value on one line is replaced there, a block key by
    key; all else is written anew by lines.
    """
    name, node = pair
    start, is_entry = name.start_mark.index, name is node
    is_nested = isinstance(new, Mapping | list)
    is_here = node.start_mark.index >= start  # an alias stands where its anchor does
    is_line = node.start_mark.line == node.end_mark.line
    at, until = node.start_mark.index, node.end_mark.index
    # What was empty at the top, as `train_loader: {}`, becomes a block, unless a comment stands
    # behind it.
    is_empty = not (node.value or name.start_mark.column or text[until:stop].strip())
    if is_here and is_line and not (is_nested and (node.id == "scalar" or is_empty)):
        said = dump_yaml([new], in_line=True)[1:-2] if is_nested else dump_yaml([new])[2:-1]
        yield (at, until, " " * (at == until) + said)
    elif is_here and not is_line and not is_entry and isinstance(new, BLOCKS.get(node.id, ())):
        yield from _edits(text, new, was, node, stop)
    else:
        column = start - _line(text, name)
        lines = textwrap.indent(dump_yaml(new if is_entry else {name.value: new}), " " * column)
        yield (start, stop, lines[column:] + _comments(text[start:stop], node))


def _differ(one: Any, other: Any) -> bool:
    """Whether two values differ for a reader of YAML: 1, 1.0 and true do, unlike in Python; the
    order of keys does not count.
    """
    return pformat(one) != pformat(other)


def _line(text: str, node: Any) -> int:
    """The place in the text at which the line of a node begins."""
    return text.rfind("\n", 0, node.start_mark.index) + 1


def _comments(lines: str, node: Any) -> str:
    """Comments of a removed block that stand on lines of their own; of a scalar none."""
    return "" if node.id == "scalar" else "".join(COMMENT.findall(lines))


def list_changes(was: Any, now: Any, key: str = "") -> Iterator[str]:
    """A line for each changed key, `path: old -> new`, in the order of `was`, then new keys."""
    one, other = _by_name(was), _by_name(now)
    if one is not None and other is not None:
        for name in one | other:
            below = f"{key}.{name}".lstrip(".")
            yield from list_changes(one.get(name, UNSET), other.get(name, UNSET), below)
    elif _differ(was, now):
        yield f"{key}: {_as_yaml(was)} -> {_as_yaml(now)}"


def _by_name(value: Any) -> dict[Any, Any] | None:
    """A mapping's keys and values, or a list of evaluations by their labels; None for any other
    value.
    """
    if isinstance(value, list) and value and all(isinstance(e, Mapping) for e in value):
        return {str(entry.get("label")): entry for entry in value}
    return dict(value) if isinstance(value, Mapping) else None


def _as_yaml(value: Any) -> str:
    """The value as YAML writes it; of a mapping the names of its keys."""
    keys = _by_name(value)
    return f"{{{', '.join(map(str, keys))}}}" if keys else format_yaml_value(value) or "''"
