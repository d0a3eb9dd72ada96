"""Records of texts alone are read field by field, and come out as they do one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.shapes import SHAPES
from mdsmix.shapes.shape import read_plain

VALUES = st.sampled_from(["", "a", "é 数", "\ud800", None, 7, ["a"], {"a": 1}])
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, 7, "prompt", ["prompt"], [{"prompt": "a"}], {}]
)


@pytest.mark.parametrize("name", ["text", "prompt_response"])
@given(data=st.data())
def test_they_are_read_as_one_by_one(name: str, data: st.DataObject) -> None:
    shape = SHAPES[name]
    fields = {key: f"my {key}" for key in shape.fields}
    good = st.fixed_dictionaries(dict.fromkeys(fields.values(), st.text(max_size=3)))
    records: list[Any] = data.draw(st.lists(good, min_size=1, max_size=4))
    alone = [shape.read(record, fields) for record in records]
    found = read_plain(shape, records, fields)
    assert found == alone
    assert [*map(type, found or ())] == [shape.gives] * len(records)
    odd = data.draw(ODD | st.fixed_dictionaries(dict.fromkeys(fields.values(), VALUES)))
    records.insert(data.draw(st.integers(0, len(records))), odd)
    if isinstance(shape.read(odd, fields), str):
        assert read_plain(shape, records, fields) is None
