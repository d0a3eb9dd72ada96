"""Plain text as files, lines or paragraphs: every byte that is no white space between documents is in one of them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdsmix.errors import RecipeError
from mdsmix.sources import ReadAs, RecordBatch, content_of, find, format, jsonl, plan, read

FUZZ = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip
TEXT = st.text(st.sampled_from("ab \n\ré"), min_size=1, max_size=40)


def read_file(
    folder: Path, content: bytes, split_by: str, window: int = 1 << 20
) -> list[RecordBatch]:
    (folder / "a.txt").write_bytes(content)
    units = plan(find(["a.txt"], folder, ReadAs(split_by=split_by)), window)
    return [batch for unit in units for batch in read(unit)]


def texts(found: list[RecordBatch]) -> list[str]:
    return [record["text"] for batch in found for record in batch.records]


def expected(text: str, split_by: str) -> list[str]:
    """The documents, by the whole text at once."""
    if split_by == "file":
        return [text] * bool(text.strip())
    if split_by == "line":
        return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    runs: list[list[str]] = [[]]
    for line in text.split("\n"):
        runs = [*runs[:-1], [*runs[-1], line]] if line.strip() else [*runs, []]
    return ["\n".join(run).removesuffix("\r") for run in runs if run]


@FUZZ
@given(TEXT, st.integers(1, 20), st.sampled_from(["file", "line", "paragraph"]))
def test_documents_are_those_of_the_whole_text(
    tmp_path: Path, text: str, piece: int, split_by: str
) -> None:
    data = text.encode()
    with patch.object(jsonl, "PIECE_BYTES", piece):
        found = read_file(tmp_path, data, split_by, window=25)
    assert texts(found) == expected(text, split_by)
    for batch in found:
        for i in range(len(batch.records)):
            origin = batch.origin(i)
            assert data[origin.place["offset"] :].startswith(origin.raw)


def test_a_bad_text_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    for split_by, data in (("line", b"a\n\xff\nb\n"), ("paragraph", b"a\n\n\xff\n\n\nb\n")):
        found = read_file(tmp_path, data, split_by)
        assert texts(found) == ["a", "b"]
        assert [(w.reason, w.origin.raw) for b in found for w in b.bad] == [
            ("invalid_utf8", b"\xff")
        ]


@pytest.mark.parametrize("split_by", ["file", "paragraph"])
@pytest.mark.parametrize("word", [b"word ", b"word\n"])
def test_a_text_that_is_too_long_is_passed_over(tmp_path: Path, split_by: str, word: bytes) -> None:
    with (
        patch.object(format, "LONGEST", 50),
        patch.object(jsonl, "PIECE_BYTES", 30),
    ):
        found = read_file(tmp_path, word * 40, split_by)
    assert texts(found) == []
    [wrong] = found[0].bad
    assert (wrong.reason, wrong.origin.raw) == ("record_too_long", b"")
    assert abs(wrong.origin.length - 200) <= 1


def test_what_a_document_is_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"a.txt is plain text.*source.split_by"):
        read_file(tmp_path, b"a\n", "")


def test_a_paragraph_is_known_alike_with_and_without_a_line_end_behind_it(tmp_path: Path) -> None:
    known = []
    for name, content in (("a.txt", b"a\nb\n\nc"), ("b.txt", b"a\nb\n\nc\n")):
        (tmp_path / name).write_bytes(content)
        [unit] = plan(find([name], tmp_path, ReadAs(split_by="paragraph")))
        known.append(content_of(unit).windows[0].digest)
    assert known[0] == known[1]
