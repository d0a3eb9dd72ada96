"""A file of which any part may be read first: the same bytes as from a file in memory, whatever is asked for, in few requests."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.storage import locate
from mdsmix.storage.s3_reader import random_reader

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(-1, 90)),
        st.tuples(st.just("seek"), st.integers(0, 140)),
        st.tuples(st.just("seek from here"), st.integers(-140, 140)),
        st.tuples(st.just("seek from the end"), st.integers(-140, 20)),
    ),
    max_size=25,
)


class Fetched:
    """Ranges of some bytes, and what was asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, list[tuple[int, int]]()

    def __call__(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(self.data)
        self.asked.append((start, end))
        return self.data[start:end]


def done(file: BinaryIO, operation: str, number: int) -> object:
    whence = {"seek": 0, "seek from here": 1, "seek from the end": 2}
    if operation == "read":
        return file.read(number)
    try:
        return file.seek(number, whence[operation])
    except (OSError, ValueError):
        return "refused"


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=100), OPERATIONS, st.integers(0, 120))
def test_it_reads_as_a_file_in_memory_does(
    data: bytes, operations: list[tuple[str, int]], ahead: int
) -> None:
    """A seek to before the beginning moves BytesIO there, and is refused by files: it is left out."""
    file, memory = random_reader(Fetched(data), len(data), ahead), io.BytesIO(data)
    for operation, number in operations:
        before = {"seek from here": memory.tell(), "seek from the end": len(data)}
        if before.get(operation, 0) + number < 0 and operation != "read":
            assert done(file, operation, number) == "refused"
            continue
        assert done(file, operation, number) == done(memory, operation, number)
        assert file.tell() == memory.tell()


def test_reading_on_fetches_each_byte_once_and_a_jump_to_the_end_what_lies_before_it() -> None:
    fetch = Fetched(os.urandom(10_000))
    file = random_reader(fetch, 10_000, 1_000)
    assert b"".join(iter(lambda: file.read(300), b"")) == fetch.data
    assert fetch.asked == [(n, n + 1_000) for n in range(0, 10_000, 1_000)]
    fetch.asked.clear()
    for back in (22, 300, 1_000):
        file.seek(-back, io.SEEK_END)
        assert file.read(back) == fetch.data[-back:]
    assert not fetch.asked, "held since it was read"
    file.seek(0)
    file.read(1)
    file.seek(-22, io.SEEK_END)
    file.read()
    file.seek(-900, io.SEEK_END)
    file.read()
    assert fetch.asked == [(0, 1_000), (9_000, 10_000)]


def test_a_large_read_asks_for_no_byte_twice() -> None:
    fetch = Fetched(os.urandom(100_000))
    file = random_reader(fetch, 100_000, 1_000)
    file.seek(10)
    assert file.read(50_000) == fetch.data[10:50_010]
    assert file.read(100) == fetch.data[50_010:50_110]
    assert len(fetch.asked) == 2
    assert fetch.asked[0][1] == fetch.asked[1][0]


def test_a_file_on_a_disk_that_was_replaced_since_it_was_found_is_refused(tmp_path: Path) -> None:
    place = locate(tmp_path / "a")
    place.write(b"before")
    found = place.stat()
    assert found is not None
    with place.open_random(found) as file:
        assert (file.seek(3), file.read()) == (3, b"ore")
    place.write(b"before")
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        place.open_random(found)
