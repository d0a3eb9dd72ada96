"""Damaged and hostile files of every format: each is a reason code with its place or one sentence, and what is good is converted."""

import lzma
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdsmix.errors import Unreachable
from mdsmix.sources import content_of, csv_table, find, inflate, plan, read
from tests.converting import (
    Answer,
    chats,
    documents,
    manifest_of,
    mdsmix,
    quarantined,
    samples,
    write_jsonl,
    write_recipe,
)

GOOD = {"text": ["one text", "another text"]}
Convert = Callable[..., Answer]


@pytest.fixture
def converted(tmp_path: Path, tokenizer_folder: Path) -> Convert:
    """The command's answer for a stream."""

    def convert(stream: dict[str, Any], **settings: Any) -> Answer:
        settings = {"max_seq_len": 64, "streams": {"web": stream}} | settings
        answer = mdsmix("convert", write_recipe(tmp_path, tokenizer_folder, **settings))
        assert "Traceback" not in answer.err
        return answer

    return convert


def test_files_of_one_stream_that_differ_cost_only_what_is_no_text(
    tmp_path: Path, converted: Convert
) -> None:
    """A column that is missing or a number, a date, a decimal, bytes, a list of null; ids of two types are nobody's concern."""
    tables = {
        "a": GOOD | {"id": [1, 2]},
        "b": GOOD | {"id": ["x", "y"]},
        "c": {"body": ["no text here"]},
        "d": {"text": pa.array([0], pa.timestamp("ns", "UTC"))},
        "e": {"text": [Decimal("1.5")]},
        "f": {"text": [b"\xff"]},
        "g": {"text": pa.array([[None]])},
        "h": {"text": [None, "a third"]},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    answer = converted(documents("*.parquet", layout="document"))
    assert answer.code == 0, answer.err
    assert len(samples(tmp_path / "out/web/train")) == 5
    bad = sorted(quarantined(tmp_path / "out/web/train"), key=lambda record: record["file"])
    assert [(r["file"], r["row"], r["reason"]) for r in bad] == [
        ("c.parquet", 0, "missing_field"),
        *((f"{name}.parquet", 0, "field_not_text") for name in "defgh"),
    ]
    assert bad[0]["fields"] == ["body"]
    assert "body (not looked into), id (not looked into)" in answer.out
    answer = converted(documents("c.parquet"), max_bad=None, local=str(tmp_path / "other"))
    assert answer.code == 5
    assert "The first missing_field, of c.parquet: missing: text in body" in answer.err


def test_a_file_that_is_something_else_is_one_sentence(tmp_path: Path, converted: Convert) -> None:
    """A suffix that lies is mended by the format."""
    write_jsonl(tmp_path / "lines.parquet", [{"text": "in truth lines"}])
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no footer")
    (tmp_path / "index.json").write_bytes(b'[{"text": "x"}]')
    for name, said in (
        ("a.parquet", "is no whole parquet file"),
        ("lines.parquet", "is no whole parquet file"),
        ("index.json", "no index that Streaming could read"),
    ):
        answer = converted(documents(name))
        assert (answer.code, said in answer.err) == (4, True), answer
    stream = documents("lines.parquet", layout="document")
    stream["source"]["format"] = "jsonl"
    assert converted(stream).code == 0
    assert len(samples(tmp_path / "out/web/train")) == 1


def test_a_bomb_takes_time_and_no_memory(tmp_path: Path) -> None:
    """64 MB of nothing in 10 KB, as one line of a table; and a window that is larger than may be taken is refused."""
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(b"text\n" + b"\0" * (64 << 20)))
    [unit] = plan(find(["a.csv.xz"], tmp_path))
    file = unit.files[0]
    tracemalloc.start()
    try:
        with inflate.opened(file, ".xz") as stream:
            size = sum(len(piece) for piece in iter(lambda: stream.read(1 << 20), b""))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 5 + (64 << 20)
    assert peak < 24 << 20, "8 MB of them for the window of xz"
    with (
        pytest.raises(Unreachable, match="was compressed with a window of"),
        inflate.opened(file, ".xz", memory=1 << 20) as stream,
    ):
        stream.read(1)


def test_a_field_of_many_megabytes_is_a_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_table, "LONGEST_FIELD", 1 << 20)
    monkeypatch.setattr(csv_table, "LONGEST_ROW", 2 << 20)
    lines = (b"many words " * 1000 + b"\n") * 2000
    (tmp_path / "a.csv").write_bytes(b'text\ngood\n"' + lines + b'"\nlast\n')
    [unit] = plan(find(["a.csv"], tmp_path))
    tracemalloc.start()
    try:
        batches = list(read(unit))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [r["text"] for batch in batches for r in batch.records] == ["good", "last"]
    [wrong] = [wrong for batch in batches for wrong in batch.bad]
    assert (wrong.reason, wrong.origin.place["row"]) == ("record_too_long", 1)
    assert peak < 60 << 20, "pieces of 7 MB, and the reader's own"
    assert content_of(unit).windows


def test_messages_in_a_table_are_json_and_what_is_none_is_named(
    tmp_path: Path, converted: Convert
) -> None:
    rows = [
        '"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""assistant"", ""content"": ""b""}]"',
        "hello",
        '"{""role"": 1}"',
    ]
    (tmp_path / "a.csv").write_text("messages\n" + "\n".join(rows) + "\n")
    assert converted(chats("a.csv")).code == 0
    assert manifest_of(tmp_path / "out/web/train").records.quarantined == {"messages_not_a_list": 2}
