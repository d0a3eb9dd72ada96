"""Reads YAML that does not need OmegaConf: it has no anchors, no tags, no variables except
`${max_seq_len}`, and no values whose type OmegaConf and PyYAML may see differently. Most recipes,
and the configs that mdsmix renders, are such YAML.

In doubt a function returns None, and the caller asks OmegaConf. So errors too are always those of
OmegaConf. Importing OmegaConf and making its configs took 50 of the 330 ms of an unchanged `check`;
PyYAML alone takes 10.
"""

from __future__ import annotations

import re
from typing import Any

NUMBER_LIKE = re.compile(r"[-+.0-9][-+.:0-9_eE]*")
"""A string without quotes that may be a number for OmegaConf. To PyYAML `1e5` and `1:30.5e3` are
strings.
"""
VARIABLE = "${"
MISSING = "???"
"OmegaConf's sign of a value that must still be set."
LENGTH = "max_seq_len"
LENGTH_VARIABLE = "${max_seq_len}"
MOST_NODES = 5_000
"A longer YAML is left to OmegaConf, which refuses one of more than 10,000 nodes."
_YAML_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_YAML_TAG}{name}" for name in ("str", "int", "float", "bool", "null")}


class _NotPlainError(Exception):
    """Raised if OmegaConf must read the YAML."""


def parse_plain_yaml(text: str) -> dict[str, Any] | None:
    """Return the keys and values of a YAML. `${max_seq_len}` stays as it is written. Return None if
    OmegaConf must read the YAML.
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        tree = _construct(loader, loader.get_single_node(), set())
    except (_NotPlainError, yaml.YAMLError, ValueError, RecursionError):
        return None
    finally:
        loader.dispose()
    return tree if isinstance(tree, dict) else None


def read_plain_yaml(text: str) -> dict[str, Any] | None:
    """Return the keys and values of a YAML, with `${max_seq_len}` filled in. Return None if
    OmegaConf must read the YAML.
    """
    tree = parse_plain_yaml(text)
    return None if tree is None else fill_in_length(tree)


def _construct(loader: Any, node: Any, node_ids: set[int]) -> Any:
    """Return the value of a YAML node: keys and values, a list, or a scalar.

    Raises _NotPlainError if OmegaConf must read it.

    Args:
        loader: the PyYAML loader that parsed the node.
        node: the node; None for an empty YAML.
        node_ids: ids (of Python) of the nodes so far, to which this node's id is added. An alias
            (`*name`) gives a node that is in the set.
    """
    if node is None or id(node) in node_ids or len(node_ids) > MOST_NODES:
        raise _NotPlainError
    node_ids.add(id(node))
    if node.tag == f"{_YAML_TAG}map":
        tree: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _construct(loader, key_node, node_ids)
            if not isinstance(key, str) or key in tree:
                raise _NotPlainError
            tree[key] = _construct(loader, value_node, node_ids)
        return tree
    if node.tag == f"{_YAML_TAG}seq":
        return [_construct(loader, item, node_ids) for item in node.value]
    if node.tag not in _SCALARS:
        raise _NotPlainError
    value = loader.construct_object(node)
    if isinstance(value, str):
        is_quoted = bool(node.style)  # a quotation mark, or | or > of a block
        if NUMBER_LIKE.fullmatch(value) and not is_quoted:
            raise _NotPlainError
        _refuse_syntax(value)
    return value


def fill_in_length(tree: Any) -> dict[str, Any] | None:
    """Return a copy of a config with its max_seq_len in place of `${max_seq_len}`. Return None if
    OmegaConf must read the config: it has other variables, or values that YAML does not have.
    """
    if type(tree) is not dict:
        return None
    try:
        return {_plain_key(key): _fill_in(value, tree.get(LENGTH)) for key, value in tree.items()}
    except (_NotPlainError, RecursionError):
        return None


def _fill_in(value: Any, length: Any) -> Any:
    """Return a copy of a value with the length in place of `${max_seq_len}`.

    Raises _NotPlainError if OmegaConf must read it.
    """
    if type(value) is dict:
        return {_plain_key(key): _fill_in(item, length) for key, item in value.items()}
    if type(value) is list:
        return [_fill_in(item, length) for item in value]
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is not str:
        raise _NotPlainError
    if value == LENGTH_VARIABLE:
        if type(length) is not int:
            raise _NotPlainError
        return length
    _refuse_syntax(value)
    return value


def _plain_key(key: Any) -> str:
    """Return a key. Raises _NotPlainError if it is not a string."""
    if type(key) is not str:
        raise _NotPlainError
    return key


def _refuse_syntax(value: str) -> None:
    """Raise _NotPlainError if a string has a meaning for OmegaConf: a variable, or a missing value.
    `${max_seq_len}` is accepted.
    """
    if value != LENGTH_VARIABLE and (VARIABLE in value or MISSING in value):
        raise _NotPlainError
