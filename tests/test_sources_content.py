"""A unit's hash follows exactly the bytes that it owns."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.sources import content_hash, find, plan, read


def hashes(folder: Path, window_bytes: int = 100) -> list[str]:
    return [content_hash(unit) for unit in plan(find(["*"], folder), window_bytes)]


def test_it_is_made_of_format_length_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n2")
    part = f".jsonl 3 {xxhash.xxh3_128_hexdigest(b'1' + bytes([10]) + b'2')}\n"
    assert hashes(tmp_path) == [xxhash.xxh3_128_hexdigest(part)]


def test_appending_changes_the_last_unit_only(tmp_path: Path) -> None:
    text = b'"0123456789"\n' * 40
    (tmp_path / "x.jsonl").write_bytes(text)
    before = hashes(tmp_path)
    (tmp_path / "x.jsonl").write_bytes(text + b'"more"\n')
    assert hashes(tmp_path)[: len(before) - 1] == before[:-1]
    assert hashes(tmp_path)[len(before) - 1 :] != before[-1:]


def test_an_edit_changes_its_unit_and_a_touch_none(tmp_path: Path) -> None:
    text = b'"0123456789"\n' * 40
    (tmp_path / "x.jsonl").write_bytes(text)
    before = hashes(tmp_path)
    (tmp_path / "x.jsonl").touch()
    assert hashes(tmp_path) == before
    (tmp_path / "x.jsonl").write_bytes(text[:250] + b"X" + text[251:])
    assert [old == new for old, new in zip(before, hashes(tmp_path), strict=True)].count(False) == 1


def test_names_count_for_nothing_and_the_border_between_files_for_something(tmp_path: Path) -> None:
    for folder, (first, second) in {"a": (b"1\n", b"2\n"), "b": (b"1\n2", b"\n")}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}1.jsonl").write_bytes(first)
        (tmp_path / folder / f"{folder}2.jsonl").write_bytes(second)
    before = hashes(tmp_path / "a")
    assert before != hashes(tmp_path / "b")
    (tmp_path / "a" / "a1.jsonl").rename(tmp_path / "a" / "a0.jsonl")
    assert hashes(tmp_path / "a") == before


@settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=20),
    st.integers(1, 50),
)
def test_units_with_equal_lines_have_equal_hashes_and_others_have_not(
    tmp_path: Path, texts: list[bytes], window: int
) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(texts))
    units = plan(find(["*"], tmp_path), window)
    owned = {}
    for unit in units:
        batches = list(read(unit))
        raw = [
            o
            for b in batches
            for o in [*(b.origin(i) for i in range(len(b.records))), *(x.origin for x in b.bad)]
        ]
        owned[unit.start] = (
            sum(b.lines for b in batches),
            sum(b.size for b in batches),
            {(o.line, o.raw) for o in raw},
        )
    for one in units:
        for other in units:
            if content_hash(one) == content_hash(other):
                assert owned[one.start] == owned[other.start]


def test_a_file_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n")
    [unit] = plan(find(["*"], tmp_path))
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(Unreachable, match="no such file"):
        content_hash(unit)
