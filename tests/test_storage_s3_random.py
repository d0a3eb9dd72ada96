"""A file of which any part may be read first: the same bytes as from a file in memory, whatever is asked for, in few requests."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.storage import locate
from mdsmix.storage.s3_reader import random_reader

WHENCES = [io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]
READ = st.tuples(st.none(), st.integers(-1, 90))
SEEK = st.tuples(st.sampled_from(WHENCES), st.integers(-140, 140))


class Fetched:
    """Ranges of some bytes, and what was asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, list[tuple[int, int]]()

    def __call__(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(self.data)
        self.asked.append((start, end))
        return self.data[start:end]


@given(st.binary(max_size=100), st.lists(st.one_of(READ, SEEK), max_size=25), st.integers(0, 120))
def test_it_reads_as_a_file_in_memory_does(
    data: bytes, operations: list[tuple[int | None, int]], ahead: int
) -> None:
    """A seek to before the beginning moves BytesIO there, and is refused by files."""
    file, memory = random_reader(Fetched(data), len(data), ahead), io.BytesIO(data)
    for whence, number in operations:
        if whence is None:
            assert file.read(number) == memory.read(number)
        elif (0, memory.tell(), len(data))[whence] + number < 0:
            with pytest.raises((OSError, ValueError)):
                file.seek(number, whence)
        else:
            assert file.seek(number, whence) == memory.seek(number, whence)
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
    for back in (22, 900):
        file.seek(-back, io.SEEK_END)
        file.read()
    assert fetch.asked == [(0, 1_000), (9_000, 10_000)]
    fetch.asked.clear()
    file.seek(10)
    assert file.read(5_000) == fetch.data[10:5_010]
    assert file.read(100) == fetch.data[5_010:5_110]
    assert [fetch.asked[0][1]] == [start for start, _ in fetch.asked[1:]], "no byte twice"


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
