"""A unit's hash follows exactly the bytes that it owns."""

import gzip
from pathlib import Path

import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.sources import Digests, content_of, read
from tests.formats import PACKED, digests, units

FUZZ = settings(max_examples=60)
LINES = st.lists(
    st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=20
)


def test_it_is_made_of_format_length_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n2")
    part = f"jsonl 4 {xxhash.xxh3_128_hexdigest(b'1' + bytes([10]) + b'2' + bytes([10]))}\n"
    assert digests(tmp_path) == [xxhash.xxh3_128_hexdigest(part)]


def test_an_edit_changes_its_unit_more_text_the_last_and_a_touch_none(tmp_path: Path) -> None:
    path, text = tmp_path / "x.jsonl", b'"0123456789"\n' * 40
    path.write_bytes(text)
    before = digests(tmp_path, window=100)
    path.touch()
    assert digests(tmp_path, window=100) == before
    path.write_bytes(text[:250] + b"X" + text[251:])
    after = digests(tmp_path, window=100)
    assert [old == new for old, new in zip(before, after, strict=True)].count(False) == 1
    path.write_bytes(text + b'"more"\n')
    last = len(before) - 1
    assert digests(tmp_path, window=100)[:last] == before[:last]
    assert digests(tmp_path, window=100)[last:] != before[last:]


def test_names_count_for_nothing_and_the_border_between_files_for_something(tmp_path: Path) -> None:
    for folder, contents in {"a": (b"1\n", b"2\n"), "b": (b"1\n2", b"\n")}.items():
        (tmp_path / folder).mkdir()
        for number, content in enumerate(contents, 1):
            (tmp_path / folder / f"{folder}{number}.jsonl").write_bytes(content)
    before = digests(tmp_path / "a")
    assert before != digests(tmp_path / "b")
    (tmp_path / "a" / "a1.jsonl").rename(tmp_path / "a" / "a0.jsonl")
    assert digests(tmp_path / "a") == before


@FUZZ
@given(LINES, st.integers(20, 60))
def test_packing_changes_no_digest(tmp_path: Path, texts: list[bytes], window: int) -> None:
    """Of no window: windows are counted in the bytes that are packed."""
    data, found = b"\n".join(texts) + b"\n", []
    for packing in ("", ".gz", ".zst"):
        name = f"x.jsonl{packing}"
        (tmp_path / name).write_bytes(PACKED[packing](data) if packing else data)
        known = digests(tmp_path, name, window=window)
        found.append([each for each in known if each != xxhash.xxh3_128_hexdigest("")])
    assert found == found[:1] * 3


def test_windows_of_grouped_packed_files_are_counted_in_what_they_hold(tmp_path: Path) -> None:
    """In a group of files as one window after another, whatever the sizes in which they are stored."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(zstandard.compress(b'"text"\n' * 300))
    [unit] = units(tmp_path, "*", 1000)
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
    [unit] = units(tmp_path, "*", 500)
    for done in (set(), {0}, {0, 1, 2, 3, 4}):
        found = Digests(unit)
        assert not done & {batch.window for batch in read(unit, digests=found, done=done)}
        assert found.content() == content_of(unit)


def test_a_place_says_file_line_and_offset(tmp_path: Path) -> None:
    """Equal lines have equal digests wherever they stand; what is kept of bad ones says where."""
    found, blank = set(), b" " * 19 + b"\n"
    for name, before in (("a", blank), ("b", blank), ("a", b"\n" * 20), ("a", b"\n" * 20 + b"  ")):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(before + b'"line"\n'))
        [unit] = units(tmp_path, f"{name}.*", 20)
        found.add(content_of(unit).windows[-1])
    assert {window.number for window in found} == {1}
    assert len({window.digest for window in found}) == 2
    assert len({window.place for window in found}) == 3
