"""The same records give the same documents, pairs and conversations, and the same rows, whatever the format of the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdsmix.shapes import SHAPES
from mdsmix.sources import find, plan, read
from tests.converting import (
    files,
    manifest_of,
    mdsmix,
    run_recipe,
    token_rows,
    windows,
    write_recipe,
)
from tests.formats import FORMATS, Records, write

FUZZ = settings(
    max_examples=6, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30
)
EMPTY = st.one_of(st.just(""), TEXT)


def talk(role: str, content: str, *roles: str) -> st.SearchStrategy[list[dict[str, str]]]:
    """Messages of these roles, or of as many of the first two of them as there are."""
    return st.tuples(*[TEXT] * len(roles)).map(lambda said: [{role: r, content: s} for r, s in zip(roles, said, strict=True)])  # fmt: skip


CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "X"}'},
}
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
    units = plan(find([place.name], place.parent), 300, sorted(fields.values()), parsed)
    found = [batch for unit in units for batch in read(unit)]
    assert not [wrong for batch in found for wrong in batch.bad]
    return [how.read(record, fields, **options) for batch in found for record in batch.records]


def test_every_shape_is_tried() -> None:
    assert CELLS.keys() == SHAPES.keys()


@pytest.mark.parametrize("shape", CELLS)
@FUZZ
@given(data=st.data())
def test_a_record_is_the_same_from_every_format(
    tmp_path_factory: pytest.TempPathFactory, shape: str, data: st.DataObject
) -> None:
    keys, record = CELLS[shape]
    records: Records = data.draw(st.lists(record, min_size=1, max_size=8))
    folder = tmp_path_factory.mktemp("alike")
    first = what_is_read(write(folder, "jsonl", records), shape, keys)
    assert len(first) == len(records)
    assert any(not isinstance(each, str) for each in first)
    for format in FORMATS[1:]:
        found = what_is_read(write(folder, format, records), shape, keys)
        assert list(map(repr, found)) == list(map(repr, first)), format


KINDS: dict[str, tuple[dict[str, Any], Records]] = {
    "text": (
        {"kind": "pretraining", "layout": "document"},
        [{"text": f"document {n}, in some words and\nsome \"more\", né?"} for n in range(20)],
    ),
    "prompt_response": ({"kind": "finetuning"}, [{"q": f"{n} and {n}?", "a": f"{2 * n}"} for n in range(20)]),
    "messages": ({"kind": "finetuning"}, [{"m": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"it is {n}"}]} for n in range(20)]),
}  # fmt: skip


@pytest.mark.parametrize("shape", KINDS)
def test_the_rows_are_the_same_from_every_format(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Published by any number of workers, from files that are several units where the format knows how."""
    windows(monkeypatch, 900)
    stream, records = KINDS[shape]
    streams = {format.replace(".", "-"): stream | {"source": CELLS[shape][0] | {"path": str(write(tmp_path / "in", format, records))}} for format in FORMATS}  # fmt: skip
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)
    run_recipe(recipe, workers=1)
    first = token_rows(tmp_path / "out/jsonl/train")
    assert len(first) == 20
    for name in streams:
        assert token_rows(tmp_path / "out" / name / "train") == first, name
        assert manifest_of(tmp_path / "out" / name / "train").records.read == 20
    if shape == "text":
        run_recipe(recipe, f"local={tmp_path / 'again'}", workers=3)
        assert files(tmp_path / "out") == files(tmp_path / "again")


def test_concat_holds_the_same_tokens_from_every_format(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one unit the rows are equal too."""
    records = KINDS["text"][1]
    streams = {format.replace(".", "-"): {"kind": "pretraining", "source": {"path": str(write(tmp_path / "in", format, records)), "text": "text"}} for format in FORMATS}  # fmt: skip
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=16, streams=streams)
    run_recipe(recipe)
    first = token_rows(tmp_path / "out/jsonl/train")
    for name in streams:
        assert token_rows(tmp_path / "out" / name / "train") == first, name
    windows(monkeypatch, 500)
    run_recipe(recipe, f"local={tmp_path / 'split'}")
    counted = {_tokens(tmp_path / "split" / name / "train") for name in streams}
    assert counted == {_tokens(tmp_path / "out/jsonl/train")}


def _tokens(folder: Path) -> tuple[int, int]:
    manifest = manifest_of(folder)
    return manifest.records.written, manifest.totals.tokens + manifest.totals.lost_tokens


def test_a_second_run_reads_nothing_and_a_dry_run_says_so(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    streams = {format.replace(".", "-"): {"kind": "pretraining", "source": {"path": str(write(tmp_path / "in", format, KINDS["text"][1])), "text": "text"}} for format in FORMATS}  # fmt: skip
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    run_recipe(recipe)
    answer = mdsmix("convert", recipe, "--dry-run")
    assert answer.code == 0, answer.err
    assert answer.out.count("0 of 1 work units") == len(FORMATS), answer.out
    head = mdsmix("convert", recipe, "--limit", "3")
    assert head.code == 0, head.err
    for name in streams:
        assert manifest_of(tmp_path / "out" / name / "limit-3").records.read == 3
    assert json.loads((tmp_path / "out/parquet/limit-3/mdsmix.manifest").read_bytes())


def test_arrow_is_imported_only_where_a_file_of_it_is_read(tmp_path: Path) -> None:
    for format in ("jsonl", "csv", "parquet"):
        path = write(tmp_path, format, KINDS["text"][1])
        code = f"import sys; from mdsmix import sources; [list(sources.read(u)) for u in sources.plan(sources.find([{str(path)!r}], '/'))]; print('pyarrow' in sys.modules)"
        answer = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert answer.stdout.strip() == str(format == "parquet"), format
