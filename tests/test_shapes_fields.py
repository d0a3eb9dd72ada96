"""A path or a template is its value in a record, found by another way; a field that is named just so wins."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.record import RecordRefused
from mdsmix.shapes.fields import BadField, derived, parse, value_at

NAMES = st.text("ab é-", min_size=1, max_size=2)
VALUES = st.recursive(
    st.one_of(st.text("xy{}.[0]", max_size=3), st.none(), st.integers(0, 2), st.booleans()),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(NAMES, inside, max_size=2),
    max_leaves=6,
)
RECORDS = st.dictionaries(NAMES, VALUES, max_size=3)
Steps = list[str | int]


def places(value: Any, steps: Steps) -> dict[str, Any]:
    """Every path of a value, written as a recipe writes it, and what is there."""
    written = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps).lstrip(".")
    found = {written: value} if steps else {}
    if isinstance(value, (dict, list)):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for step, part in inside:
            found |= places(part, [*steps, step])
    return found


@given(RECORDS)
def test_every_place_of_a_record_has_a_path(record: dict[str, Any]) -> None:
    for path, value in places(record, []).items():
        field = parse(path)
        assert field.find(record) is value
        assert field.roots >= {path.split(".")[0].split("[")[0]}
        read = {name: record[name] for name in record if name in field.roots}
        assert field.find(read) is value, "its roots are all that is read"
        assert field.entered == (
            {path.split(".")[0].split("[")[0]} if set(path) & set(".[") else set()
        )


@given(RECORDS, st.lists(NAMES | st.integers(-2, 2), min_size=1, max_size=3))
def test_what_no_walk_finds_is_missing(record: dict[str, Any], steps: Steps) -> None:
    steps = ["a", *steps]
    path = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps).lstrip(".")
    known = places(record, [])
    for list_path, value in list(known.items()):
        if isinstance(value, list):
            known |= {f"{list_path}[{-n}]": value[-n] for n in range(1, len(value) + 1)}
            for n in range(1, len(value) + 1):
                known |= {f"{list_path}[{-n}]{p}": v for p, v in places_below(value[-n]).items()}
    if path in known:
        assert parse(path).find(record) is known[path]
    else:
        with pytest.raises(RecordRefused):
            parse(path).find(record)
        assert value_at(path, record) is None


def places_below(value: Any) -> dict[str, Any]:
    return {
        path if path.startswith("[") else f".{path}": v for path, v in places(value, []).items()
    }


@given(st.sampled_from(["a.b", "a[0]", "a.b[1].c", "{a}", "a{{}}{b}"]), VALUES, RECORDS)
def test_a_field_that_is_named_just_so_wins(name: str, value: Any, record: dict[str, Any]) -> None:
    assert parse(name).find(record | {name: value}) is value
    assert name in parse(name).roots


def test_what_is_no_path_is_a_name() -> None:
    for name in ("text", "score[en]", "a..b", ".a", "a.", "[0]", "a[0", "a]", "a[]", "a b-c", "a[0]b"):  # fmt: skip
        assert (parse(name).entered, parse(name).roots) == (set(), {name})
        assert derived([name]) is None


TEXTS = st.dictionaries(st.sampled_from("abc"), st.text("x{}%\n", max_size=3), min_size=3)


@given(TEXTS, st.lists(st.sampled_from(["{a}", "{b}", "{m.c}", "{{", "}}", " ", "\n\n", "%s"])))
def test_a_template_is_its_fields_with_what_stands_between(
    texts: dict[str, str], pieces: list[str]
) -> None:
    template = "{a}" + "".join(pieces)
    record = {"a": texts["a"], "b": texts["b"], "m": {"c": texts["c"]}}
    said = template.replace("{m.c}", "{c}").format(**texts)
    assert parse(template).find(record) == said
    derive = derived([template])
    assert derive is not None
    assert derive(record) == record | {template: said}
    assert template not in record, "a record is not changed"


def test_a_template_that_cannot_be_read_is_refused() -> None:
    for template in ("{title", "a {title} }", "{}", "a{b{c}}", "{{}", "x{", "{a:3}", "{a!r}"):
        with pytest.raises(BadField, match="is a field"):
            parse(template)
