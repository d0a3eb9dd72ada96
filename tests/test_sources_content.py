"""A unit's hash follows exactly the bytes that it owns."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.sources import Digests, content_of, file_hash, find, plan, read

FIXED = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def hashes(folder: Path, window_bytes: int = 100) -> list[str]:
    """The digests of all windows, in order."""
    units = plan(find(["*"], folder), window_bytes)
    return [window.digest for unit in units for window in content_of(unit).windows]


def test_it_is_made_of_format_length_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n2")
    part = f"jsonl 4 {xxhash.xxh3_128_hexdigest(b'1' + bytes([10]) + b'2' + bytes([10]))}\n"
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


@FIXED
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
            sum(b.count for b in batches),
            sum(b.size for b in batches),
            {(o.place["line"], o.raw) for o in raw},
        )
    for one in units:
        for other in units:
            if content_of(one).windows[0].digest == content_of(other).windows[0].digest:
                assert owned[one.start] == owned[other.start]


def test_a_file_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n")
    [unit] = plan(find(["*"], tmp_path))
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        content_of(unit)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


@FIXED
@given(
    st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=30),
    st.integers(20, 60),
)
def test_packing_changes_no_digest(tmp_path: Path, texts: list[bytes], window: int) -> None:
    """Of no window: windows are counted in the bytes that are packed."""
    data = b"\n".join(texts) + b"\n"
    found = []
    for packing, pack in PACK.items():
        (tmp_path / f"x.jsonl{packing}").write_bytes(pack(data))
        units = plan(find(["*"], tmp_path), window)
        contents = [content_of(unit) for unit in units]
        found.append([w.digest for content in contents for w in content.windows])
        (tmp_path / f"x.jsonl{packing}").unlink()
    nothing = xxhash.xxh3_128_hexdigest("")
    plain, *packed = [[digest for digest in digests if digest != nothing] for digests in found]
    assert packed == [plain, plain]


def test_files_that_fill_a_window_are_one_where_their_last_lines_do_not_end(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(b"1\n2")
    [unit] = plan(find(["*"], tmp_path), 9)
    assert len(content_of(unit).windows) == 1


def test_windows_of_grouped_packed_files_are_counted_in_what_they_hold(tmp_path: Path) -> None:
    """In a group of files as one window after another, whatever the sizes in which they are stored."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(zstandard.compress(b'"text"\n' * 300))
    [unit] = plan(find(["*"], tmp_path), 1000)
    assert [window.number for window in content_of(unit).windows] == list(range(7))
    sizes = dict.fromkeys(range(7), 0)
    for batch in read(unit):
        sizes[batch.window] += batch.size
    assert sum(sizes.values()) == 3 * 2100
    assert max(sizes.values()) <= 1007
    assert min(sizes.values()) == sizes[6]


def test_what_is_hashed_while_it_is_read_is_what_is_found_by_hashing_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(b'"some text"\n' * 90))
    [unit] = plan(find(["*"], tmp_path), 500)
    for done in (set(), {0}, {0, 1, 2, 3, 4}):
        digests = Digests(unit)
        batches = list(read(unit, digests=digests, done=done))
        assert digests.content() == content_of(unit)
        assert not done & {batch.window for batch in batches}


def test_the_hash_of_a_file_is_the_same_in_any_company(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"1\n2\n")
    [alone] = plan(find(["*"], tmp_path))
    (tmp_path / "a.jsonl").write_bytes(b"0\n")
    [together] = plan(find(["*"], tmp_path))
    assert content_of(together).files[1:] == content_of(alone).files
    assert file_hash(content_of(alone).files) != file_hash(content_of(together).files[:1])


def test_a_place_says_file_line_and_offset(tmp_path: Path) -> None:
    """Equal lines have equal digests wherever they stand; what is kept of bad ones says where."""
    found = set()
    for name, before in (
        ("a", b" " * 19 + b"\n"),
        ("b", b" " * 19 + b"\n"),
        ("a", b"\n" * 20),
        ("a", b"\n" * 20 + b" " * 5),
    ):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(gzip.compress(before + b'"line"\n'))
        [unit] = plan(find(["*"], tmp_path), 20)
        found.add(content_of(unit).windows[-1])
        path.unlink()
    assert {window.number for window in found} == {1}
    assert len({window.digest for window in found}) == 2
    assert len({window.place for window in found}) == 3
