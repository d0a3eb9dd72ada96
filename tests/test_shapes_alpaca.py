"""Alpaca's records: a question of two parts, what was said before, and the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.kinds.encodings import fields_read, make_encoding, open_recipe
from mdsmix.record import Conversation, RichConversation
from mdsmix.shapes.texts import ALPACA as SHAPE
from tests.converting import write_recipe
from tests.styles import letters

read = SHAPE.read
FIELDS = {key: key for key in (*SHAPE.fields, *SHAPE.optional)}
NAMED = {"instruction": "instruction", "output": "output"}
GOOD = {"instruction": "Add", "input": "1, 2", "output": "3"}
TEXTS = st.text("ab\n", max_size=3)
RECORDS = st.fixed_dictionaries(
    {"instruction": TEXTS, "output": TEXTS},
    optional={
        "input": st.none() | TEXTS,
        "system": st.none() | TEXTS,
        "history": st.none() | st.lists(st.tuples(TEXTS, TEXTS).map(list), max_size=2),
    },
)


def said(record: dict[str, Any], between: str) -> list[tuple[str, str]]:
    """The conversation as (role, text), put together otherwise."""
    question = record["instruction"]
    if record.get("input"):
        question += (between if question else "") + record["input"]
    before = [(role, text) for pair in record.get("history") or () for role, text in zip(("user", "assistant"), pair, strict=True)]  # fmt: skip
    head = [("system", record["system"])] if record.get("system") else []
    return [*head, *before, ("user", question), ("assistant", record["output"])]


@settings(deadline=None)
@given(RECORDS, st.sampled_from(["\n", "", " | "]))
def test_a_record_is_its_exchanges_in_order(record: dict[str, Any], between: str) -> None:
    found, expected = read(record, FIELDS, joined_by=between), said(record, between)
    if not expected[-2][1]:
        assert found == "empty_question"
    elif not expected[-1][1]:
        assert found == "empty_answer"
    else:
        assert isinstance(found, Conversation)
        assert [(m["role"], m["content"]) for m in found.messages] == expected
        assert found.trained is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"output": None}, "field_not_text"),
        ({"instruction": 3}, "field_not_text"),
        ({"input": ["x"]}, "field_not_text"),
        ({"system": "\ud800"}, "lone_surrogate"),
        ({"history": "before"}, "bad_history"),
        ({"history": [["q"]]}, "bad_history"),
        ({"history": [["q", None]]}, "bad_history"),
        ({"history": [["q", "\ud800"]]}, "lone_surrogate"),
        ({"tools": "no list"}, "bad_tools"),
        ({"tools": '[{"name": "\\ud800"}]'}, "lone_surrogate"),
    ],
)
def test_what_is_wrong_has_its_reason(change: dict[str, Any], reason: str) -> None:
    assert read(GOOD | change, FIELDS) == reason


def test_tools_are_those_that_the_template_is_given() -> None:
    found = read(GOOD | {"tools": '[{"name": "sum"}]'}, FIELDS)
    assert type(found) is RichConversation
    assert found.tools == [{"type": "function", "function": {"name": "sum"}}]
    assert found.messages == read(GOOD, FIELDS).messages
    for none in ("[]", "", None, []):
        assert read(GOOD | {"tools": none}, FIELDS) == read(GOOD, FIELDS)


def test_a_record_without_what_it_must_have() -> None:
    assert read({"instruction": "a"}, FIELDS) == "missing_field"
    assert read([GOOD], FIELDS) == "json_array"


@pytest.mark.parametrize(
    ("source", "fields", "options"),
    [
        ({"shape": "alpaca"}, FIELDS, {}),
        (NAMED, NAMED, {}),
        (NAMED | {"input": "input"}, NAMED | {"input": "input"}, {}),
        (NAMED | {"input": "input", "joined_by": ""}, NAMED | {"input": "input"}, {"joined_by": ""}),
    ],
)  # fmt: skip
def test_fields_tell_the_shape_and_only_these_are_read(
    tmp_path: Path, source: dict[str, str], fields: dict[str, str], options: dict[str, str]
) -> None:
    """A shape that is named alone reads all of its fields."""
    streams = {"a": {"kind": "finetuning", "source": {"path": "a", **source}}}
    recipe = open_recipe(write_recipe(tmp_path, tmp_path, streams=streams))
    encoding = make_encoding(recipe, recipe.streams["a"], letters(tmp_path))
    assert (encoding.fields, encoding.shape, encoding.shape_options) == (fields, None, options)
    assert fields_read(encoding) == {*fields.values()}
