"""The same records give the same documents, pairs and conversations, and the same rows, whatever the format of the file."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mdsmix.shapes import SHAPES
from tests.converting import Web, documents, files, manifest_of, run_recipe, token_rows, windows
from tests.formats import FORMATS, Records, bad, read_file, records, write

TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30
)
EMPTY = st.one_of(st.just(""), TEXT)


def talk(role: str, content: str, *roles: str) -> st.SearchStrategy[list[dict[str, str]]]:
    """Messages of these roles, or of as many of the first two of them as there are."""
    return st.tuples(*[TEXT] * len(roles)).map(lambda said: [{role: r, content: s} for r, s in zip(roles, said, strict=True)])  # fmt: skip


WEATHER = {"name": "weather", "arguments": '{"city": "X"}'}
CALL = {"id": "1", "type": "function", "function": WEATHER}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLED = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "no", "tool_call_id": "1"},
    {"role": "assistant", "content": "No."},
]
CELLS: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "text": ({"text": "text"}, st.fixed_dictionaries({"text": EMPTY})),
    "prompt_response": ({"prompt": "q", "response": "a"}, st.fixed_dictionaries({"q": TEXT, "a": EMPTY})),
    "messages": ({"messages": "m"}, st.fixed_dictionaries({"m": talk("role", "content", "system", "user", "assistant")})),
    "openai": ({"shape": "openai", "messages": "m", "tools": "tools", "nulls": "drop"}, st.fixed_dictionaries({"m": st.just(CALLED), "tools": st.just(TOOLS)})),
    "sharegpt": ({"conversations": "c", "system": "s"}, st.fixed_dictionaries({"c": talk("from", "value", "human", "gpt", "human", "gpt"), "s": EMPTY})),
    "rounds": ({"conversation": "c"}, st.fixed_dictionaries({"c": st.lists(st.fixed_dictionaries({"human": TEXT, "assistant": TEXT}), min_size=1, max_size=3)})),
    "llava": ({"conversations": "c"}, st.fixed_dictionaries({"c": talk("from", "value", "human", "gpt"), "image": st.just("0.jpg")})),
    "qwen_vl": ({"conversations": "c", "system": "s"}, st.fixed_dictionaries({"c": st.tuples(TEXT).map(lambda said: [{"from": "user", "value": f"Picture 1: <img>{said[0].strip('<>') or 'a'}.jpg</img>"}, {"from": "assistant", "value": said[0]}]), "s": EMPTY})),
    "alpaca": ({"instruction": "i", "input": "more", "output": "o", "history": "past"}, st.fixed_dictionaries({"i": TEXT, "more": EMPTY, "o": TEXT, "past": st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=2)})),
    "preference": ({"prompt": "p", "chosen": "c", "rejected": "r"}, st.fixed_dictionaries({"p": talk("role", "content", "user"), "c": talk("role", "content", "assistant"), "r": talk("role", "content", "assistant")})),
}  # fmt: skip
"Shape -> the recipe's keys, and records of it. Another shape joins by one line."


def what_is_read(place: Path, shape: str, keys: dict[str, Any]) -> list[Any]:
    """What the shape makes of the records of a file, in their order."""
    how = SHAPES[shape]
    fields = {key: name for key, name in keys.items() if key in (*how.fields, *how.optional)}
    options = {key: value for key, value in keys.items() if key in how.options}
    parsed = [fields[key] for key in how.structured if key in fields]
    wanted = sorted(fields.values())
    found = read_file(place.parent, place.name, window=300, fields=wanted, parsed=parsed)
    assert not bad(found)
    return [how.read(record, fields, **options) for record in records(found)]


@settings(max_examples=5, phases=[Phase.generate])  # to shrink takes minutes
@given(st.data())
def test_a_record_is_the_same_from_every_format(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    assert CELLS.keys() == SHAPES.keys()
    for shape, (keys, record) in CELLS.items():
        made: Records = data.draw(st.lists(record, min_size=1, max_size=8))
        folder = tmp_path_factory.mktemp("alike")
        first = what_is_read(write(folder, "jsonl", made), shape, keys)
        assert len(first) == len(made)
        assert any(not isinstance(each, str) for each in first)
        for format in FORMATS[1:]:
            found = what_is_read(write(folder, format, made), shape, keys)
            assert [*map(repr, found)] == [*map(repr, first)], (shape, format)


TEXTS = [{"text": f'document {n}, in some words and\nsome "more", né?'} for n in range(20)]


def test_the_rows_are_the_same_from_every_format(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published by any number of workers, from files that are several units where the format knows how; a second run reads nothing."""
    windows(monkeypatch, 900)
    written = {format: write(web.folder / "in", format, TEXTS) for format in FORMATS}
    streams = {f.replace(".", "-"): documents(at, layout="document") for f, at in written.items()}
    web.says(max_seq_len=64, streams=streams)
    run_recipe(web.recipe, workers=1)
    first = token_rows(web.out / "jsonl/train")
    assert len(first) == 20
    for name in streams:
        assert token_rows(web.out / name / "train") == first, name
        assert manifest_of(web.out / name / "train").records.read == 20
    run_recipe(web.recipe, f"local={web.folder / 'again'}", workers=3)
    assert files(web.out) == files(web.folder / "again")
    answer = web.convert("--dry-run")
    assert answer.code == 0, answer.err
    assert len(re.findall(r"\b0 of \d+ work units", answer.out)) == len(FORMATS), answer.out
    assert web.convert("--limit", "3").code == 0
    for name in streams:
        assert manifest_of(web.out / name / "limit-3").records.read == 3
