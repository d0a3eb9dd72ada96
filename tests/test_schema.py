"""A mapping, as YAML gives it, becomes a dataclass or one sentence that names the key. Also: lists
of names in sentences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from mdsmix import schema
from mdsmix.foundry_yaml.loader_keys import as_whole_number
from mdsmix.messages import join_names


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner | None = None
    many: list[Inner] = field(default_factory=list)
    named: dict[str, Inner] = field(default_factory=dict)
    kind: Literal["a", "b"] = "a"
    words: list[str] | None = None
    state: str = field(default="", metadata={"set by": "the reader"})
    ratio: int | float = 1
    anything: Any = None


def test_sections_lists_and_mappings_become_dataclasses() -> None:
    tree = {"name": "x", "inner": {"size": 1}, "many": [{"size": 2}], "named": {"k": {"size": 3}}}
    inner = [Inner(size=n) for n in (1, 2, 3)]
    expected = Outer(name="x", inner=inner[0], many=[inner[1]], named={"k": inner[2]})
    assert schema.parse_mapping(Outer, tree) == expected


def test_a_value_that_does_not_fit_is_named() -> None:
    misfits: list[tuple[Any, str]] = [
        ([], "the top level must contain keys and values"),
        ({}, "name is missing."),
        ({"name": None}, "name is empty (null); it must be text."),
        ({"name": "x", "named": None}, "named is empty (null); it must be keys and values."),
        ({"name": 1}, "name is 1; it must be text."),
        ({"name": "x", "knid": "a"}, "knid is not a known key; did you mean kind?"),
        ({"name": "x", "size": 1}, "size is not a known key; write inner.size."),
        ({"name": "x", "state": "c"}, "state is not a known key"),
        ({"name": "x", "words": 3}, "words is 3; it must be text or a list or null."),
        ({"name": "x", "kind": "c"}, "kind is 'c'; it must be a or b."),
        ({"name": "x", "ratio": True}, "ratio is True; it must be a number."),
        ({"name": "x", "inner": {}}, "inner.size is missing."),
        ({"name": "x", "inner": 3}, "inner is 3; it must be"),
        ({"name": "x", "many": [{"size": 1}, {"size": "1"}]}, "many[1].size is '1'"),
        ({"name": "x", "named": {"k": {"sise": 1}}}, "named.k.sise is not a known key"),
    ]
    for tree, sentence in misfits:
        with pytest.raises(schema.Misfit, match=re.escape(sentence)):
            schema.parse_mapping(Outer, tree)


def test_only_an_int_is_a_whole_number() -> None:
    values = (0, 7, -1, True, 1.5, "7", None)
    assert [as_whole_number(value) for value in values] == [0, 7, -1, None, None, None, None]


def test_names_beyond_the_limit_are_counted() -> None:
    for names, joined in (("", ""), ("a", "a"), ("ab", "a, b"), ("abc", "a, b and 1 more")):
        assert join_names([*names], 2) == joined
