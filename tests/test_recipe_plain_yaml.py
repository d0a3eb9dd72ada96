"""YAML that is read without OmegaConf gives what OmegaConf gives; all other YAML is left to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mdsmix.recipe.plain_yaml import fill_in_length, parse_plain_yaml, read_plain_yaml

ROOT = Path(__file__).parents[1]
PLAIN = (
    "max_seq_len: 2048\ntokenizer: ./tokenizer\nlocal: ../mix\n"
    "streams:\n  web: {kind: pretraining, source: {path: [a.jsonl, 'b*.jsonl'], text: text}}\n"
    "mix: {web: {share: 30%}}\nbudget: 2B tokens\n",
    "a: 1\nb: -1.5\nc: true\nd: null\ne: ~\nf:\ng: [1, [2, {h: 3}]]\ni: ''\nj: '1e5'\nk: |\n  text\n",
    "a: .inf\nb: .nan\nc: 1_000\nd: 0x1F\ne: 0b11\nf: 1:30\ng: !!int '3'\nh: !!str 4x\n",
    "max_seq_len: 8\nd: {max_seq_len: '${max_seq_len}', list: ['${max_seq_len}']}\n",
    "price: $5\ncost: 5$ {a}\nbraces: '{a}'\nquestion: '?'\n",
)
FOR_OMEGACONF = (
    *("a: ${b}\nb: 1\n", "a: x${b}\nb: 1\n", "a: ${oc.env:HOME}\n", "a: \"\\x24{b}\"\n"),
    *("max_seq_len: x\na: ${max_seq_len}\n", "a: ${max_seq_len}\n", "a: \\${b}\n"),
    *("a: ???\n", "a: '???'\n", "a: \"\\x3f??\"\n"),
    *("a: 1e5\n", "a: 1E-3\n", "a: -2e5\n", "a: 2024-01-01\n", "a: 2024-01-01 10:00:00\n"),
    *("a: 1\na: 2\n", "1: a\n", "true: a\n", "null: a\n", "1e5: a\n", "[1]: a\n", "a: !!binary aGk=\n"),
    *("a: &x 1\nb: *x\n", "a: &x {b: 1}\nc:\n  <<: *x\n", "<<: {a: 1}\n", "a: &x [*x]\n"),
    *("a: !!set {b}\n", "a: !!python/name:os.system\n", "a: !x 1\n", "a: =\n"),
    *("- 1\n", "text\n", "", "# comment\n", "a: [\n", "a: 1\n---\nb: 2\n", "a: \t1: 2\n"),
    "a: [" + "1," * 6000 + "]\n",
    "a: " + "[" * 3000 + "]" * 3000,
)  # fmt: skip


def read_by_omegaconf(text: str, resolve: bool) -> str:
    """Return what OmegaConf reads. repr tells 1, 1.0 and True apart, and shows NaN."""
    return repr(OmegaConf.to_container(OmegaConf.create(text), resolve=resolve))


@pytest.mark.parametrize("text", PLAIN)
def test_plain_yaml_is_read_as_omegaconf_reads_it(text: str) -> None:
    assert repr(parse_plain_yaml(text)) == read_by_omegaconf(text, resolve=False)
    assert repr(read_plain_yaml(text)) == read_by_omegaconf(text, resolve=True)


@pytest.mark.parametrize("text", FOR_OMEGACONF, ids=lambda text: repr(text[:30]))
def test_other_yaml_is_left_to_omegaconf(text: str) -> None:
    assert read_plain_yaml(text) is None


def test_most_yaml_of_the_pages_is_plain() -> None:
    """So the short cut is the usual way, and not one that nobody takes."""
    texts = [path.read_text() for path in sorted((ROOT / "yamls").rglob("*.yaml"))]
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        texts += re.findall(r"(?ms)^```yaml\n(.*?)^```", path.read_text())
    plain = [text for text in texts if read_plain_yaml(text) is not None]
    assert len(plain) > 0.7 * len(texts) > 10
    for text in plain:
        assert repr(read_plain_yaml(text)) == read_by_omegaconf(text, resolve=True)


SCALARS = st.text("0179+-._:eExXabINFinfnNtrueyo~ '\"$?{}[]&*!<=#%@|>,\\\t", max_size=9)
TEMPLATES = ("a: {0}\n", "{0}: 1\n", "a: [{0}, {1}]\n", "a: {{{0}: {1}}}\n", "a:\n- {0}\n- {1}\n")


@given(st.sampled_from(TEMPLATES), SCALARS, SCALARS)
@settings(max_examples=600)
def test_whatever_is_read_is_read_as_omegaconf_reads_it(
    template: str, first: str, second: str
) -> None:
    text = template.format(first, second)
    tree = read_plain_yaml(text)
    if tree is not None:
        assert repr(tree) == read_by_omegaconf(text, resolve=True)


class Words(str):
    pass


@pytest.mark.parametrize(
    "tree",
    [
        {"a": Words("b")},
        {"a": {1: "b"}},
        {1: "b"},
        {"a": b"b"},
        {"a": ("b",)},
        {"a": Path("b")},
        {"a": np.array([1, 2])},  # cannot be compared with a string
        {"a": "${b}"},
        {"max_seq_len": True, "a": "${max_seq_len}"},
        OmegaConf.create({"a": 1}),
        OmegaConf.create({"a": {"b": 1}}),
        "a: 1",
    ],
    ids=repr,
)
def test_a_config_that_is_no_plain_tree_is_left_to_omegaconf(tree: Any) -> None:
    assert fill_in_length(tree) is None


def test_the_length_is_filled_into_a_copy() -> None:
    tree = {"max_seq_len": 8, "a": {"b": ["${max_seq_len}"], "c": [["d"], None]}}
    filled = fill_in_length(tree)
    assert filled == {"max_seq_len": 8, "a": {"b": [8], "c": [["d"], None]}}
    assert tree["a"] == {"b": ["${max_seq_len}"], "c": [["d"], None]}
    assert filled == OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
