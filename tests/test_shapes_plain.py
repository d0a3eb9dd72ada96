"""Records of texts and plain messages are read field by field, and come out as they do one by one."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.shapes import SHAPES

VALUES = st.sampled_from(["", "a", "é 数", "\ud800", None, 7, ["a"], {"a": 1}])
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, 7, "prompt", ["prompt"], [{"prompt": "a"}], {}]
)
TEXT = st.text(max_size=3)


@settings(max_examples=60)
@given(st.sampled_from(["text", "prompt_response"]), st.data())
def test_texts_are_read_as_one_by_one(name: str, data: st.DataObject) -> None:
    shape = SHAPES[name]
    fields = {key: f"my {key}" for key in shape.fields}
    good = st.fixed_dictionaries(dict.fromkeys(fields.values(), TEXT))
    records: list[Any] = data.draw(st.lists(good, min_size=1, max_size=4))
    alone = [shape.read(record, fields) for record in records]
    found = shape.read_plain(records, fields)
    assert found == alone
    odd = data.draw(ODD | st.fixed_dictionaries(dict.fromkeys(fields.values(), VALUES)))
    records.insert(data.draw(st.integers(0, len(records))), odd)
    if isinstance(shape.read(odd, fields), str):
        assert shape.read_plain(records, fields) is None


def turn(answer: Any = "b", role: Any = "assistant", **more: Any) -> list[Any]:
    return [{"role": "user", "content": "a"}, {"role": role, "content": answer, **more}]


ODD_MESSAGES = [
    *(None, 7, "ab", [], {}, turn()[:1], turn()[1:], [*turn(), "ab"], [*turn(), ["role", "content"]]),
    *(turn(role=role) for role in ("user", "bot", None, ["user"], True)),
    *(turn(answer) for answer in (None, 7, ["b"], "\ud800")),
    *(turn(weight=1), turn() + turn(role="user"), [*turn(), *turn()[:1]], turn()[::-1]),
    [{"role": "user", "text": "a"}, turn()[1]],
]  # fmt: skip


def test_messages_are_read_as_one_by_one() -> None:
    shape, fields = SHAPES["messages"], {"messages": "said"}
    system = {"role": "system", "content": "é"}
    good = [{"said": each} for each in (turn(), turn() * 3, [system, *turn()])]
    found = shape.read_plain(good, fields)
    assert found == [shape.read(record, fields) for record in good]
    assert [*map(type, found or ())] == [shape.gives] * len(good)
    for odd in (None, 7, [turn()], {}, *({"said": each} for each in ODD_MESSAGES)):
        assert isinstance(shape.read(odd, fields), str), odd
        assert shape.read_plain([good[0], odd, good[1]], fields) is None, odd
