"""A condition is what Python makes of it, found by Python itself over a grammar of known conditions; nothing else is let in."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.shapes.condition import BadCondition, parse_where
from tests.alarm import at_most

FIELDS = ("lang", "score", "tags", "meta")
LITERALS = st.sampled_from(
    ["'en'", "'e'", "''", "0", "1", "-1.5", "True", "None", "['en', 1]", "['de']"]
)
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=", "in", "not in")
VALUES = st.sampled_from(["en", "", 0, 1, 0.5, True, None, ["en"], [], {"en": 1}])


def operands() -> st.SearchStrategy[str]:
    places = st.sampled_from([*FIELDS, "meta.lang", "tags[0]", "tags[-1]"])
    return places | LITERALS | places.map("len({})".format)


def chains() -> st.SearchStrategy[str]:
    more = st.lists(st.tuples(st.sampled_from(COMPARISONS), operands()), min_size=1, max_size=2)
    return st.builds(
        lambda one, rest: " ".join([one, *(f"{op} {x}" for op, x in rest)]), operands(), more
    )


CONDITIONS = st.recursive(
    chains() | operands() | st.sampled_from(["lang is None", "score is not None"]),
    lambda part: st.one_of(
        part.map("not ({})".format),
        st.builds("({}) and ({})".format, part, part),
        st.builds("({}) or ({})".format, part, part),
    ),
    max_leaves=4,
)


class Attributes(dict[str, Any]):
    """A record's object for Python: `meta.lang` is its item."""

    __getattr__ = dict.__getitem__


def by_python(condition: str, record: dict[str, Any]) -> str | None:
    """The reason that Python's own evaluation gives."""
    names = {k: Attributes(v) if isinstance(v, dict) else v for k, v in record.items()}
    # A letter of a text is no item of a list here, and a part of what has no parts is missing.
    for place in set(re.findall(r"tags\[-?\d\]|meta\.lang", condition)):
        whole = record.get(place[:4])
        if type(whole) is not (list if place.startswith("tags") else dict):
            condition = condition.replace(place, "MISSING")
    try:
        return None if eval(condition, {"__builtins__": {"len": len}}, names) else "where"
    except (NameError, LookupError):
        return "where_missing_field"
    except TypeError:
        return "where_not_comparable"


@settings(max_examples=150)
@given(CONDITIONS, st.dictionaries(st.sampled_from(FIELDS), VALUES | st.just({"lang": "en"})))
def test_a_condition_says_what_python_says(condition: str, record: dict[str, Any]) -> None:
    where = parse_where(condition)
    assert where.refused(record) == by_python(condition, record)
    entered = {name for name, sign in (("tags", "tags["), ("meta", "meta."))
               if sign in condition}  # fmt: skip
    assert where.entered == entered
    read = {name: value for name, value in record.items() if name in where.roots}
    assert where.refused(read) == where.refused(record), "its roots are all that it reads"


MORE: list[tuple[str, dict[str, Any], str | None]] = [
    ("matches(url, '^https?://')", {"url": "http://x"}, None),
    ("matches(url, '^https?://')", {"url": "-"}, "where"),
    (r"matches(url, '\\d{2}')", {"url": "a12"}, None),
    (r"matches(url, '\\d{2}')", {"url": "a1"}, "where"),
    ("not matches(url, 'x')", {"url": "y"}, None),
    ("not matches(url, 'x')", {"url": "x"}, "where"),
    ("matches(url, 'x')", {"url": None}, "where_not_comparable"),
    ("matches(url, 'x')", {"url": "\ud800"}, "where_not_comparable"),
    ("exists(url) and len(url) > 3", {"url": "long"}, None),
    ("exists(url)", {"url": None}, "where"),
    ("exists(a.b)", {"a": 1}, "where"),
    ("lang in ('en', 'de') and lang in {'en'}", {"lang": "en"}, None),
    ("field('odd name') == 1", {"odd name": 1}, None),
    ("field('odd name') == 1", {}, "where_missing_field"),
    ("field('meta.n') == 1", {"meta": {"n": 1}}, None),
    ("meta.n == 1", {"meta.n": 1, "meta": {"n": 2}}, None),
    ("field('from') == 'a' \n and x", {"from": "a", "x": True}, None),
    ("a > 1", {"a": "2"}, "where_not_comparable"),
    *((condition, {"a": True}, None) for condition in ("a == true", "a is True", "a != false and a is not null", "not -a == 1")),
    *((condition, {"a": False}, "where") for condition in ("a == true", "a is True", "a != false and a is not null")),
    *(("a == 1", value, None) for value in (["list"], "text", None, 3)),
]  # fmt: skip
"Where Python has no word for it. What is no object is left to its shape."


def test_what_python_has_no_word_for() -> None:
    for condition, record, reason in MORE:
        assert parse_where(condition).refused(record) == reason, (condition, record)
    assert parse_where("a == true").roots == {"a"}


def test_a_regular_expression_takes_time_linear_in_the_text() -> None:
    where = parse_where("matches(a, '^(a+)+$')")
    with at_most(60):  # by backtracking 2^200,000 steps
        assert where.refused({"a": "a" * 200_000 + "b"}) == "where"


def test_deep_values_are_compared_or_said() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    assert parse_where("a == b").refused({"a": deep, "b": [deep]}) in (
        "where",
        "where_not_comparable",
    )


BAD = {
    "": "invalid syntax",
    "lang = 'en'": "at character 6 of \"lang = 'en'\": invalid syntax",
    "lang == 'en' and 2 ** 9 ** 9": "'2 ** 9 ** 9': it may hold fields",
    "__import__('os').system('x')": "it may hold fields",
    "lang.lower() == 'en'": "'lang.lower()': it may hold fields",
    "len(a, b)": "it may hold fields",
    "[x for x in a]": "it may hold fields",
    "a[b]": "is no field",
    "(a + b).c == 1": "is no field",
    "a[0:1]": "is no field",
    "matches(a, b)": "it may hold fields",
    "matches(a, '(?=x)')": "invalid perl operator",
    "matches(a, '((a{500}){500}){500}')": "RE2 does not read the regular expression",
    "field(a) == 1": "is no field",
    "field('{') == 1": "{title} is a field",
    "from == 1": "at character 1",
    "a\x00": "null byte",
    "(" * 5_000 + "a" + ")" * 5_000: "too many nested parentheses",
    "not " * 2_000 + "a": "recursion|too deep",
    "a" + ".b" * 4_900: "recursion|too deep",
    "-" * 9_000 + "1": "recursion|too deep",
    "a == " + "9" * 5_000: "Exceeds the limit",
    "matches(a, '\ud800')": "utf-8",
}


def test_what_is_no_condition_is_one_sentence_with_its_place() -> None:
    for condition, words in BAD.items():
        with pytest.raises(BadCondition) as refusal:
            parse_where(condition)
        said = str(refusal.value)
        assert any(word in said for word in words.split("|")), condition[:30]
        assert len(said) < 400
        assert "\n" not in said
