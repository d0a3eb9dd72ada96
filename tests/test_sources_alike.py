"""The same records give the same documents, pairs and conversations, whatever the format of the
file. Elements of an array, rows of a table or of Arrow, texts and members of an archive are read
with their bytes and places, however the file is cut into pieces.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from mdsmix.shapes import SHAPES
from mdsmix.sources import RecordBatch, arrow, jsonl, read_batches
from mdsmix.sources.csv_rows import RowReader
from tests.formats import (
    FORMATS,
    all_origins,
    all_records,
    bad_items,
    make_tar,
    plan_pattern,
    read_file,
    window_digests,
    write_records,
)

LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXT = st.text(LETTERS, min_size=1, max_size=30)
EMPTY = st.one_of(st.just(""), TEXT)


def talk(role: str, content: str, *roles: str) -> st.SearchStrategy[list[dict[str, str]]]:
    """Return messages of these roles, with any texts. `role`, `content`: the keys of a message."""
    return st.tuples(*[TEXT] * len(roles)).map(
        lambda texts: [{role: r, content: text} for r, text in zip(roles, texts, strict=True)]
    )


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
    "prompt_response": (
        {"prompt": "q", "response": "a"},
        st.fixed_dictionaries({"q": TEXT, "a": EMPTY}),
    ),
    "messages": (
        {"messages": "m"},
        st.fixed_dictionaries({"m": talk("role", "content", "system", "user", "assistant")}),
    ),
    "openai": (
        {"shape": "openai", "messages": "m", "tools": "tools", "nulls": "drop"},
        st.fixed_dictionaries({"m": st.just(CALLED), "tools": st.just(TOOLS)}),
    ),
    "sharegpt": (
        {"conversations": "c", "system": "s"},
        st.fixed_dictionaries(
            {"c": talk("from", "value", "human", "gpt", "human", "gpt"), "s": EMPTY}
        ),
    ),
    "rounds": (
        {"conversation": "c"},
        st.fixed_dictionaries(
            {
                "c": st.lists(
                    st.fixed_dictionaries({"human": TEXT, "assistant": TEXT}),
                    min_size=1,
                    max_size=3,
                )
            }
        ),
    ),
    "llava": (
        {"conversations": "c"},
        st.fixed_dictionaries(
            {"c": talk("from", "value", "human", "gpt"), "image": st.just("0.jpg")}
        ),
    ),
    "qwen_vl": (
        {"conversations": "c", "system": "s"},
        st.fixed_dictionaries(
            {
                "c": st.tuples(TEXT).map(
                    lambda texts: [
                        {
                            "from": "user",
                            "value": f"Picture 1: <img>{texts[0].strip('<>') or 'a'}.jpg</img>",
                        },
                        {"from": "assistant", "value": texts[0]},
                    ]
                ),
                "s": EMPTY,
            }
        ),
    ),
    "alpaca": (
        {"instruction": "i", "input": "more", "output": "o", "history": "past"},
        st.fixed_dictionaries(
            {
                "i": TEXT,
                "more": EMPTY,
                "o": TEXT,
                "past": st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=2),
            }
        ),
    ),
    "finevision": (
        {"texts": "t", "system": "s"},
        st.fixed_dictionaries(
            {
                "t": st.lists(
                    st.fixed_dictionaries({"user": TEXT, "assistant": TEXT}), min_size=1, max_size=3
                ),
                "s": EMPTY,
            }
        ),
    ),
    "prompt_completion": (
        {"shape": "prompt_completion", "prompt": "p", "completion": "c"},
        st.fixed_dictionaries(
            {"p": talk("role", "content", "user"), "c": talk("role", "content", "assistant")}
        ),
    ),
    "prompt": (
        {"prompt": "p", "verified_answer": "right"},
        st.fixed_dictionaries({"p": talk("role", "content", "user"), "right": TEXT}),
    ),
    "prompt_alpaca": (
        {"instruction": "i", "input": "more", "verified_answer": "right"},
        st.fixed_dictionaries({"i": TEXT, "more": EMPTY, "right": TEXT}),
    ),
    "unpaired_preference": (
        {"prompt": "p", "completion": "c", "label": "good"},
        st.fixed_dictionaries(
            {
                "p": talk("role", "content", "user"),
                "c": talk("role", "content", "assistant"),
                "good": st.booleans(),
            }
        ),
    ),
    "preference_alpaca": (
        {"instruction": "i", "input": "more", "chosen": "c", "rejected": "r"},
        st.fixed_dictionaries({"i": TEXT, "more": EMPTY, "c": TEXT, "r": TEXT}),
    ),
    "preference_sharegpt": (
        {"conversations": "c", "chosen": "y", "rejected": "n"},
        st.fixed_dictionaries(
            {
                "c": talk("from", "value", "human"),
                "y": st.fixed_dictionaries({"from": st.just("gpt"), "value": TEXT}),
                "n": st.fixed_dictionaries({"from": st.just("gpt"), "value": TEXT}),
            }
        ),
    ),
    "preference_openai": (
        {"prompt": "p", "chosen": "c", "rejected": "r", "tools": "tools", "nulls": "drop"},
        st.fixed_dictionaries(
            {
                "p": st.just(CALLED[:3]),
                "c": talk("role", "content", "assistant"),
                "r": talk("role", "content", "assistant"),
                "tools": st.just(TOOLS),
            }
        ),
    ),
    "preference": (
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        st.fixed_dictionaries(
            {
                "p": talk("role", "content", "user"),
                "c": talk("role", "content", "assistant"),
                "r": talk("role", "content", "assistant"),
            }
        ),
    ),
}
"Shape -> the recipe's keys, and records of it. A new shape needs one line here."


def read_by_shape(path: Path, shape: str, keys: dict[str, Any]) -> list[Any]:
    the_shape = SHAPES[shape]
    fields = {
        key: name for key, name in keys.items() if key in (*the_shape.fields, *the_shape.optional)
    }
    options = {key: value for key, value in keys.items() if key in the_shape.options}
    either = the_shape.find_text_or_messages(fields)
    parsed = {fields[key] for key in the_shape.structured if key in fields}.difference(either)
    batches = read_file(
        path.parent,
        path.name,
        window=300,
        fields=sorted(fields.values()),
        parsed=tuple(parsed),
        text_or_messages=either,
    )
    assert not bad_items(batches)
    return [the_shape.read(record, fields, **options) for record in all_records(batches)]


@settings(max_examples=5, phases=[Phase.generate])  # to shrink takes minutes
@given(st.data())
def test_a_record_is_the_same_from_every_format(tmp_path_factory: Any, data: st.DataObject) -> None:
    assert CELLS.keys() == SHAPES.keys()
    for shape, (keys, record) in CELLS.items():
        drawn: Any = data.draw(st.lists(record, min_size=1, max_size=8))
        folder = tmp_path_factory.mktemp("alike")
        expected = read_by_shape(write_records(folder, "jsonl", drawn), shape, keys)
        assert len(expected) == len(drawn)
        assert any(not isinstance(record_read, str) for record_read in expected)
        for format in FORMATS[1:]:
            read = read_by_shape(write_records(folder, format, drawn), shape, keys)
            assert [*map(repr, read)] == [*map(repr, expected)], (shape, format)


TEXTS_LIKE_JSON = ("42", '"Hello"', "true", "null", "-1.5e3", "NaN", " ", "[draft", "{name}!")
PYTHON_MESSAGES = (
    "[{'role': 'user', 'content': 'Hi'}]",
    "[{'role': 'user', 'content': 'Hi'}\n {'role': 'assistant', 'content': \"it's\"}]",
    "{'content': 'Hi', 'role': 'user'}",
    '[{"role": "user", "content": "Hi',
)
"""Messages as datasets 5.2 and pandas 3.1 write them to csv (a list is an array of numpy, so it has
no commas), and JSON that was cut off.
"""
EITHER_SHAPES = [name for name, shape in SHAPES.items() if shape.text_or_messages]


@pytest.mark.parametrize("format", ["csv", "tsv", "tar"])
@pytest.mark.parametrize("shape", EITHER_SHAPES)
def test_texts_that_look_like_json_stay_texts(tmp_path: Path, shape: str, format: str) -> None:
    """In a cell that may have messages, only JSON lists and objects are decoded."""
    keys, records = _records_with(shape, TEXTS_LIKE_JSON)
    expected = read_by_shape(write_records(tmp_path, "jsonl", records), shape, keys)
    assert not any(isinstance(record, str) for record in expected)
    read = read_by_shape(write_records(tmp_path, format, records), shape, keys)
    assert [*map(repr, read)] == [*map(repr, expected)]


@pytest.mark.parametrize("format", ["csv", "tar"])
@pytest.mark.parametrize("shape", EITHER_SHAPES)
def test_messages_that_are_not_json_are_no_text(tmp_path: Path, shape: str, format: str) -> None:
    keys, records = _records_with(shape, PYTHON_MESSAGES)
    path = write_records(tmp_path, format, records)
    batches = read_file(tmp_path, path.name, text_or_messages=tuple(keys))
    assert [reason for reason, _ in bad_items(batches)] == ["cell_not_json"] * len(records)


def _records_with(shape: str, texts: Sequence[str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the recipe's keys, and for each key that may have messages a record with each text."""
    keys = {key: key for key in SHAPES[shape].fields}
    if "preference" in shape:
        keys |= {"prompt": "prompt"}
    plain: dict[str, Any] = {key: f"some {key}" for key in keys}
    if "label" in keys:
        plain["label"] = True
    either = [key for key in SHAPES[shape].text_or_messages if key in keys]
    return keys, [{**plain, key: text} for key in either for text in texts]


def test_rewards_of_a_table_are_numbers(tmp_path: Path) -> None:
    rewards = {"chosen_reward": 1.5, "rejected_reward": -2}
    record = {"chosen": "a b", "rejected": "a c", **rewards}
    keys = {key: key for key in record}
    for format in ("csv", "tar"):
        (read,) = read_by_shape(write_records(tmp_path, format, [record]), "preference", keys)
        assert read.rewards == (1.5, -2.0)


FUZZ = settings(max_examples=60)
MARK = b"\xef\xbb\xbf"
PIECE = st.integers(1, 30)
WORDS = st.text(st.sampled_from('ab"\\{}[], \n\u00e9'), max_size=9)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 99), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
MEMBERS = [
    ("a/1.txt", b"one"),
    ("a/1.meta.JSON", b'{"n": [1]}'),
    ("b/1.txt", b"two"),
    ("b/1.jpg", b"\xff"),
]
CELL = st.text(st.sampled_from('ab",\n\r \té'), max_size=7)
ENDS = st.sampled_from([",", "\t"]), st.booleans(), st.sampled_from(["\n", "\r\n"])
SPLITS = st.sampled_from(["file", "line", "paragraph"])
TEXTS = st.lists(st.text(max_size=30), min_size=1, max_size=40)


def read_in_pieces(piece: int, *arguments: Any, **settings: Any) -> list[RecordBatch]:
    with patch.object(jsonl, "PIECE_BYTES", piece):
        return read_file(*arguments, **settings)


@FUZZ
@example([{"a": "\\"}, {}], 1, None, False)
@example([{"a": "b"}, 3, None, "s", [1], {"a": "c"}], 20, None, False)
@example(["\\", 'a",', 2], 1, None, False)
@given(st.lists(VALUE, max_size=6), PIECE, st.sampled_from([None, 2]), st.booleans())
def test_elements_of_an_array_are_read_whole_however_the_file_is_cut(
    tmp_path: Path, values: list[Any], piece: int, indent: int | None, ascii_only: bool
) -> None:
    data = MARK * (piece > 2 and piece % 2)
    data += json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
    batches = read_in_pieces(piece, tmp_path, "a.json", data, window=50)
    assert all_records(batches) == values
    assert [origin.place["index"] for origin in all_origins(batches)] == list(range(len(values)))
    for origin, value in zip(all_origins(batches), values, strict=True):
        assert data[origin.place["offset"] :].startswith(origin.raw)
        assert json.loads(origin.raw) == value


@FUZZ
@given(st.lists(st.lists(CELL, min_size=2, max_size=2), max_size=8), st.integers(4, 30), *ENDS)
def test_a_table_is_read_as_a_writer_wrote_it(
    tmp_path: Path, rows: list[list[str]], piece: int, delimiter: str, quoted: bool, end: str
) -> None:
    table = io.StringIO(newline="")
    # With "\n" alone the writer leaves a "\r" unquoted.
    style = csv.QUOTE_ALL if quoted or end == "\n" else csv.QUOTE_MINIMAL
    writer = csv.writer(table, delimiter=delimiter, lineterminator=end, quoting=style)
    writer.writerows([["x", "y"], *rows])
    data = MARK * (piece % 2) + table.getvalue().encode()
    name = "a.csv" if delimiter == "," else "a.tsv"
    batches = read_in_pieces(piece, tmp_path, name, data, window=40)
    assert all_records(batches) == [dict(zip("xy", row, strict=True)) for row in rows]
    assert bad_items(batches) == []
    for origin, row in zip(all_origins(batches), rows, strict=True):
        place = origin.place
        assert data[place["offset"] :].startswith(origin.raw)
        assert place["line"] == data.count(b"\n", 0, place["offset"]) + 1
        alone = io.StringIO(origin.raw.decode(), newline="")
        assert next(csv.reader(alone, delimiter=delimiter)) == row


@FUZZ
@example(b'5" disk,1\n"a\nb",2\nc,3\n', 9)
@example(b'"1\na\n1"a,1\n', 9)
@given(
    st.lists(st.sampled_from(b'",\n\ra1'), min_size=1, max_size=60).map(bytes), st.integers(3, 70)
)
def test_every_byte_of_a_table_is_in_one_row(tmp_path: Path, data: bytes, piece: int) -> None:
    """The rows are in order, and only blank lines are left out."""
    batches = read_in_pieces(piece, tmp_path, "a.csv", data, header=("x", "y"))
    rows = [*all_origins(batches), *(origin for _, origin in bad_items(batches))]
    end = 0
    for offset, raw in sorted((origin.place["offset"], origin.raw) for origin in rows):
        assert offset >= end
        assert data[end:offset].strip(b"\r\n") == b""
        assert data[offset : offset + len(raw)] == raw
        end = offset + len(raw)
    assert data[end:].strip(b"\r\n") == b""


def read_line_by_line(data: bytes, delimiter: str) -> Iterator[tuple[bytes, list[str] | None]]:
    """Yield each row's bytes and cells; None for the cells of a line that is not csv. A new csv
    reader gets one line after the other from the row's first line on.
    """
    lines = io.BytesIO(data).readlines()
    while lines:
        texts = (line.decode() for line in lines)
        reader = csv.reader(texts, delimiter=delimiter, strict=True)
        try:
            cells = next(reader)
            count = reader.line_num
        except csv.Error:
            cells = None
            count = 1
        yield b"".join(lines[:count]), cells
        del lines[:count]


@FUZZ
@example([b'a"b', b"\n\n", b'c"\n', b"d\n\n"], 1000, ",")  # quotes that open nothing
@example([b'"a\nb"c\n', b"d\n"], 1000, ",")
@example([b'"', b"a\n", b'"\n', b"b\n"], 1, ";")
@given(
    st.lists(st.sampled_from([b'"', b'"', b"\n", b"\r\n", b"\r", b",", b";", b'""', b"a", b"e "])),
    st.integers(1, 30),
    st.sampled_from([",", ";"]),
)
def test_rows_of_a_table_are_those_of_a_reader_that_gets_line_after_line(
    pieces: list[bytes], piece: int, delimiter: str
) -> None:
    data = b"".join(pieces)
    stream = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    found = list[tuple[bytes, list[str] | None]]()
    offset = 0
    with patch.object(jsonl, "PIECE_BYTES", piece):
        for stretch in RowReader(stream.readline(), stream, delimiter).read():
            assert stretch.offset == offset
            assert stretch.line == data.count(b"\n", 0, offset) + 1
            assert stretch.lengths == [*map(len, stretch.raws)]
            assert {*stretch.faults.values()} <= {"not_csv"}
            assert sum(stretch.widths) == len(stretch.cells)
            for index, raw in enumerate(stretch.raws):
                cells = None if index in stretch.faults else stretch.list_cells(index)
                found.append((raw, cells))
            offset += sum(stretch.lengths)
    assert found == [*read_line_by_line(data, delimiter)]


def test_rows_without_faults_are_cut_without_the_csv_reader(tmp_path: Path) -> None:
    """It takes several times as long."""
    lines = [b'"x","y"', b'5" disk,"a ""b"""', b'"""c"",\n",d"e"', b'"",""""', b"", b'f,",""\r,"']
    rows = [['5" disk', 'a "b"'], ['"c",\n', 'd"e"'], ["", '"'], ["f", ',"\r,']]
    with patch.object(csv, "reader", side_effect=AssertionError):
        for end in (b"\n", b"\r\n"):
            data = b"".join(line + end for line in lines)
            records = all_records(read_file(tmp_path, "a.csv", data))
            assert records == [{"x": x, "y": y} for x, y in rows]


FAULTY_LINES = {
    b"": None,
    b'5" a,b': None,
    b'"a"b,c': "not_csv",
    b"a\0,b": "nul_byte",
    b"\xff,b": "invalid_utf8",
    b"a": "too_few_fields",
    b"a,,": "too_many_fields",
}
"A line of a table with two fields -> the reason code if the line is not a record."
CELLS_OF_FILES = st.lists(st.lists(CELL, min_size=2, max_size=2), max_size=8)


@FUZZ
@given(CELLS_OF_FILES, st.sampled_from([*FAULTY_LINES]), CELLS_OF_FILES, st.integers(1, 30), *ENDS)
def test_a_table_has_the_records_of_the_same_json_lines(
    tmp_path: Path,
    rows: list[list[str]],
    line: bytes,
    later: list[list[str]],
    piece: int,
    delimiter: str,
    quoted: bool,
    end: str,
) -> None:
    """Between the rows is a blank line, one with a quote that is text, or one with a fault."""
    style = csv.QUOTE_ALL if quoted or end == "\n" else csv.QUOTE_MINIMAL
    tables = [io.StringIO(newline=""), io.StringIO(newline="")]
    for table, part in zip(tables, [[["x", "y"], *rows], later], strict=True):
        writer = csv.writer(table, delimiter=delimiter, lineterminator=end, quoting=style)
        writer.writerows(part)
    before, after = (table.getvalue().encode() for table in tables)
    middle = line.replace(b",", delimiter.encode()) + end.encode()
    name = "a.csv" if delimiter == "," else "a.tsv"
    batches = read_in_pieces(piece, tmp_path, name, before + middle + after, window=40)

    records = [*rows, *([['5" a', "b"]] if line.startswith(b"5") else []), *later]
    lines = [json.dumps(dict(zip("xy", row, strict=True))).encode() for row in records]
    assert all_records(batches) == all_records(
        read_file(tmp_path, "a.jsonl", b"\n".join(lines), window=1 << 20)
    )
    reason = FAULTY_LINES[line]
    found = [(why, origin.raw, origin.place["offset"]) for why, origin in bad_items(batches)]
    assert found == ([(reason, middle, len(before))] if reason else [])


TABLES: list[tuple[bytes, dict[str, Any], list[dict[str, Any]]]] = [
    # Arrow and pandas make null of NA and 7 of 007.
    (
        b'a,b\nNA,007\nnull,1e5\n,true\n"two\nlines",2020-01-01\n',
        {},
        [
            {"a": "NA", "b": "007"},
            {"a": "null", "b": "1e5"},
            {"a": "", "b": "true"},
            {"a": "two\nlines", "b": "2020-01-01"},
        ],
    ),
    (
        b'm,t\n"[{""role"": ""user""}]",[1]\n,\n{,x\n',
        {"parsed": ("m",)},
        [{"m": [{"role": "user"}], "t": "[1]"}, {"m": None, "t": ""}, {"m": "{", "t": "x"}],
    ),
    *(
        (
            end.join([b'p;"a;b"', b'"1,5; 2";"x', b';y"', b"3;4", b""]),
            {"window": window},
            [{"p": "1,5; 2", "a;b": f"x{end.decode()};y"}, {"p": "3", "a;b": "4"}],
        )
        for end in (b"\n", b"\r\n")
        for window in (7, 1 << 20)
    ),
    (b"m,t\n{,[1]\n", {"parsed": ("m", "t")}, [{"m": "{", "t": [1]}]),
    (b"1;2\n3;4\n", {"header": ("a", "b")}, [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]),
    (b"a;b,c\n1;2,3\n", {}, [{"a;b": "1;2", "c": "3"}]),
    (b"sep=;\r\na;b,c\r\n1;2\r\n", {}, [{"a": "1", "b,c": "2"}]),
    (b'\xef\xbb\xbf"sep=,"\na,b;c\n1,2;3\n', {}, [{"a": "1", "b;c": "2;3"}]),
    (b"sep=|\n1|2\n", {"header": ("a", "b")}, [{"a": "1", "b": "2"}]),
    (b"sep=\t\n", {}, []),
    (b'"sep=;\na";b\n1;2\n', {}, [{"sep=;\na": "1", "b": "2"}]),  # a cell of two lines
    (b'"sep=;\na";b\n', {"header": ("n", "t")}, [{"n": "sep=;\na", "t": "b"}]),
    (b"1,a\n", {"header": ("n", "text")}, [{"n": "1", "text": "a"}]),
]


def test_cells_are_strings_or_json_by_the_names_of_their_columns(tmp_path: Path) -> None:
    for content, settings_of_table, rows in TABLES:
        assert all_records(read_file(tmp_path, "a.csv", content, **settings_of_table)) == rows, (
            content
        )
    by_format = read_file(tmp_path, "a.dat", b"n,text\n1,a\n", format="csv")
    assert all_records(by_format) == [{"n": "1", "text": "a"}]


def expected(text: str, split_by: str) -> list[str]:
    """Return the documents, found in the whole text at once."""
    if split_by == "file":
        return [text] * bool(text.strip())
    if split_by == "line":
        return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    runs: list[list[str]] = [[]]
    for line in text.split("\n"):
        runs = [*runs[:-1], [*runs[-1], line]] if line.strip() else [*runs, []]
    return ["\n".join(run).removesuffix("\r") for run in runs if run]


@FUZZ
@given(st.text(st.sampled_from("ab \n\ré"), min_size=1, max_size=40), PIECE, SPLITS)
def test_documents_of_plain_text_are_found_however_the_file_is_cut(
    tmp_path: Path, text: str, piece: int, split_by: str
) -> None:
    data = text.encode()
    batches = read_in_pieces(piece, tmp_path, "a.txt", data, window=25, split_by=split_by)
    assert [record["text"] for record in all_records(batches)] == expected(text, split_by)
    assert all(data[o.place["offset"] :].startswith(o.raw) for o in all_origins(batches))


def test_members_whose_names_agree_up_to_the_first_dot_are_one_record(tmp_path: Path) -> None:
    assert all_records(read_file(tmp_path, "a.tar", make_tar(MEMBERS))) == [
        {"__key__": "a/1", "txt": "one", "meta.json": '{"n": [1]}'},
        {"__key__": "b/1", "txt": "two", "jpg": b"\xff"},
    ]
    batches = read_file(tmp_path, "a.tar", fields=("meta.json",), parsed=("meta.json",))
    expected_record = {"__key__": "a/1", "txt": 3, "meta.json": {"n": [1]}}
    assert all_records(batches)[0] == expected_record, "a member that is not read is its size"
    origin = all_origins(batches)[1]
    assert (origin.place, origin.where) == ({"member": "b/1"}, "member b/1")


ROWS = pa.table({"text": [f"text {n}" for n in range(20)], "n": list(range(20))})
CHAT = [[{"role": "user", "n": None}], [], None, [{"role": "tool", "n": 3}]]
ODD = pa.table({"text": ["one", "two", None, "four"], "n": [1, 2, None, 4], "blank": [""] * 4})
ODD = ODD.append_column("void", pa.nulls(4, pa.int64())).append_column("chat", [CHAT])


def test_only_the_wanted_columns_are_read_and_unread_columns_with_values_are_reported(
    tmp_path: Path,
) -> None:
    pq.write_table(ODD, tmp_path / "a.parquet", row_group_size=3)
    [batch] = read_file(tmp_path, "a.parquet", fields=("text",))
    assert batch.records == [{"text": "one"}, {"text": "two"}, {"text": None}, {"text": "four"}]
    assert batch.unseen == {"n": 4, "chat": 4}
    batches = read_file(tmp_path, "a.parquet", fields=("chat",))
    assert all_records(batches) == [{"chat": row} for row in CHAT], "nulls stay"
    last, raw = all_origins(batches)[3], b'{"chat":[{"role":"tool","n":3}]}'
    assert (last.place, last.raw, last.length) == ({"row": 3}, raw, len(raw))
    assert all_records(read_file(tmp_path, "a.parquet", fields=("nowhere",))) == [{}] * 4


def test_rows_of_arrow_are_read_in_order_with_their_places(tmp_path: Path) -> None:
    """A file is cut at its record batches of three rows, a stream is not. Only some rows of a batch
    are decoded at once.
    """
    for format in ("arrow", "feather"):
        path = write_records(tmp_path, format, ROWS.to_pylist())
        settings = {"window": path.stat().st_size // 4, "fields": ("text",)}
        with patch.object(arrow, "MOST_ROWS", 2):
            [whole] = read_file(tmp_path, path.name, fields=("text",))
            assert all_records(read_file(tmp_path, path.name, **settings)) == whole.records
        assert whole.records == ROWS.select(["text"]).to_pylist()
        assert whole.unseen == {"n": 20}
        found_origins = all_origins([whole])
        assert [o.place for o in found_origins] == [{"row": n, "batch": n // 3} for n in range(20)]
        assert found_origins[7].where == "row 7, batch 2"
        assert sorted({o.ordinal for o in found_origins}) == [o.ordinal for o in found_origins]
        cut = plan_pattern(tmp_path, path.name, **settings)
        assert len(cut) == 1 if format == "arrow" else len(cut) >= 4


@settings(max_examples=15)
@given(TEXTS, st.integers(1, 20), st.integers(40, 400))
def test_row_groups_compression_and_batches_do_not_change_digests(
    tmp_path: Path, texts: list[str], group: int, window: int
) -> None:
    """Records, windows and digests are the same however the file was written, and splits read every
    row once.
    """
    table, path = (
        pa.table({"text": texts, "other": list(range(len(texts)))}),
        tmp_path / "a.parquet",
    )
    whole = {"window": 1 << 30, "fields": ("text",)}
    pq.write_table(table, path)
    expected_digests = window_digests(tmp_path, **whole)
    pq.write_table(table, path, row_group_size=group, compression="zstd", use_dictionary=False)
    with patch.object(arrow, "MOST_ROWS", 3):
        assert window_digests(tmp_path, **whole) == expected_digests
        splits = plan_pattern(tmp_path, "*", window=window, fields=("text",))
        read = [(unit, batch) for unit in splits for batch in read_batches(unit)]
    batches = [batch for _, batch in read]
    assert [record["text"] for record in all_records(batches)] == texts
    assert [origin.ordinal for origin in all_origins(batches)] == list(range(len(texts)))
    assert all(unit.start <= batch.origin(0).ordinal for unit, batch in read)


def test_dictionaries_views_and_large_strings_are_read_as_strings(tmp_path: Path) -> None:
    texts = pa.array(["x", "y", None, "x"])
    kinds = [texts.dictionary_encode(), texts.cast(pa.string_view()), texts.cast(pa.large_string())]
    for n, kind in enumerate(kinds):
        pq.write_table(pa.table({"text": kind}), tmp_path / f"{n}.parquet")
    read = all_records(read_file(tmp_path, "*.parquet", fields=("text",)))
    assert [record["text"] for record in read] == texts.to_pylist() * 3
