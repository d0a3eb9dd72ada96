"""Raw records behind a shape: what cannot be read is told by its place among all, and moves no one else's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.encoded import Encoded, encoded
from mdsmix.kinds.read_records import Reading
from mdsmix.ragged import Ragged
from mdsmix.record import FILTERED, Document, detail_of
from mdsmix.shapes import SHAPES
from mdsmix.shapes.condition import parse_where
from mdsmix.shapes.image_parts import with_images

BAD: dict[str, Any] = {
    "missing_field": {"t": "x"},
    "not_an_object": ["text"],
    "field_not_text": {"text": None},
    "lone_surrogate": {"text": "\ud800"},
}


class Refusing:
    """An encoder that refuses every text with a `!`, and gives a row of one token, the text's length, for the others."""

    def encode(self, records: Sequence[Document]) -> Encoded:
        texts = [text for (text,) in records]
        rows = Ragged.of([[len(text)] for text in texts if "!" not in text], np.uint16)
        good = [i for i, text in enumerate(texts) if "!" not in text]
        bad = {i: "too_long" for i, text in enumerate(texts) if "!" in text}
        return encoded({"tokens": rows}, [rows], good, 0, rejected=bad)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["ab", "c!", "", *BAD])))
def test_every_record_is_a_row_or_has_its_reason_at_its_place(drawn: list[str]) -> None:
    records = [BAD.get(word, {"text": word}) for word in drawn]
    encoded = Reading(SHAPES["text"], {"text": "text"}, Refusing()).encode(records)
    expected = {
        i: (word, False) if word in BAD else ("too_long", True)
        for i, word in enumerate(drawn)
        if word in BAD or "!" in word
    }
    assert {at: (why, why in FILTERED) for at, why in encoded.rejected.items()} == expected
    lengths = [len(word) for i, word in enumerate(drawn) if i not in expected]
    assert encoded.columns["tokens"].values.tolist() == lengths


RECORDS = st.fixed_dictionaries(
    {"lang": st.sampled_from(["en", "de", None]), "text": st.sampled_from(["ab", "c!", None])}
)


@settings(max_examples=50, deadline=None)
@given(st.lists(RECORDS))
def test_a_condition_leaves_records_out_before_the_shape_sees_them(drawn: list[Any]) -> None:
    records = [{"id": n, "in": [record]} for n, record in enumerate(drawn)]
    where = parse_where("field('in[0].lang') == 'en'")
    reading = Reading(SHAPES["text"], {"text": "in[0].text"}, Refusing(), where=where, id="id")
    encoded = reading.encode(records)
    expected: dict[int, Any] = {}
    for n, record in enumerate(drawn):
        if record["lang"] != "en":
            expected[n] = ("where", {"id": n})
        elif record["text"] is None:
            expected[n] = ("field_not_text", {"id": n})
        elif "!" in record["text"]:
            expected[n] = ("too_long", {"id": n})
    assert {at: (why, detail_of(why)) for at, why in encoded.rejected.items()} == expected
    assert encoded.totals.tokens == len(records) - len(expected)


def test_a_bad_record_has_its_name_and_what_a_template_lacks() -> None:
    reading = Reading(SHAPES["text"], {"text": "{title} {body}"}, Refusing(), id="id")
    for record, detail in (
        ({"id": "a7", "title": "t"}, {"id": "a7", "missing": "body"}),
        ({"id": ["no", "name"], "title": "t", "body": 1}, {"not text": "body"}),
        ({"id": True, "title": "t", "body": "\ud800"}, {}),
    ):
        (bad,) = reading.encode([record]).rejected.values()
        assert detail_of(bad) == detail
    # A record that is a text is no reason.
    reading = Reading(SHAPES["text"], {"text": "a.b"}, Refusing(), where=parse_where("a.b == 'x'"))
    found = reading.encode(["where", {"a": 1}]).rejected
    assert [*found.values()] == ["not_an_object", "where_missing_field"]


class Taking:
    """An encoder that gives each conversation a row of one token."""

    def encode(self, records: Sequence[Any]) -> Encoded:
        rows = Ragged.of([[1] for _ in records], np.uint16)
        return encoded({"tokens": rows}, [rows], range(len(records)), 0)


def test_nulls_are_counted_in_records_that_are_read_and_not_in_bad_ones() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"city": "Köln", "n": None}}}
    asked = {"role": "user", "content": "a"}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered = {"role": "tool", "content": "x", "tool_call_id": "c"}
    good = {"messages": [asked, called, answered, {"role": "assistant", "content": "b"}]}
    bad = {"messages": [asked, called, {"role": "nobody", "content": "x"}]}
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "a", "image": None}]
    seen = {"messages": [asked | {"content": parts}, good["messages"][-1]], "image": "a.jpg"}
    reading = Reading(with_images(SHAPES["openai"], ()), {"messages": "messages"}, Taking())
    assert [*reading.encode([good, bad, seen]).rejected.values()] == ["unknown_role"]
    assert reading.oddities.counts["nulls"] == {"messages": 1}
