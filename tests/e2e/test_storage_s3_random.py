"""Objects read from anywhere by range requests: few of them, of one version, taken up again where a body breaks."""

import io
import random
import zipfile
from typing import Any

import pytest

from mdsmix.errors import Unreachable
from mdsmix.storage import Location, Stat, locate
from tests.counting import counted
from tests.faults import Proxy, Rule


@pytest.fixture
def place(bucket: str) -> Location:
    return locate(f"s3://{bucket}/raw/archive")


def found(place: Location) -> Stat:
    stat = place.stat()
    assert stat is not None
    return stat


def put_archive(place: Location) -> bytes:
    """A zip of about 5 MB."""
    memory, noise = io.BytesIO(), random.Random(1)
    with zipfile.ZipFile(memory, "w") as packed:
        for n in range(200):
            packed.writestr(f"{n}.txt", noise.randbytes(noise.randint(0, 50_000)))
    place.write(memory.getvalue())
    return memory.getvalue()


def unzipped(file: Any) -> list[bytes]:
    with zipfile.ZipFile(file) as packed:
        return [packed.read(name) for name in packed.namelist()]


def test_the_standard_library_reads_a_zip_in_a_request_a_megabyte(
    place: Location, proxy: Proxy
) -> None:
    """Its directory is one request more."""
    data = put_archive(place)
    stat = found(place)
    with counted(proxy) as seen, place.open_random(stat) as file:
        assert unzipped(file) == unzipped(io.BytesIO(data))
    assert seen.by_operation.keys() == {"GET"}
    assert seen.total <= -(-len(data) >> 20) + 1, str(seen)
    assert all(r.headers["if-match"] == f'"{stat.stamp}"' for r in seen.requests)
    asked = sum(_length(r.headers["range"]) for r in seen.requests)
    assert asked <= len(data) + (1 << 20)


def _length(header: str) -> int:
    first, last = header.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_nothing_is_asked_for_until_something_is_read(place: Location, proxy: Proxy) -> None:
    place.write(b"abc")
    empty = place.parent / "empty"
    empty.write()
    whole, none = found(place), found(empty)
    with counted(proxy) as seen:
        with empty.open_random(none) as file:
            assert (file.read(), file.read(5), file.seek(0, io.SEEK_END)) == (b"", b"", 0)
        with place.open_random(whole) as file:
            assert (file.read(0), file.seek(7), file.read(1), file.tell()) == (b"", 7, b"", 7)
    assert seen.total == 0
    with counted(proxy) as seen, place.open_random(whole, ahead=2) as file:
        assert (file.read(1), file.read(9), file.read()) == (b"a", b"bc", b"")
    assert [r.headers["range"] for r in seen.requests] == ["bytes=0-1", "bytes=2-2"]


def test_an_object_that_is_replaced_in_between_is_refused(place: Location) -> None:
    data = put_archive(place)
    with place.open_random(found(place), ahead=1000) as file:
        assert file.read(10) == data[:10]
        place.write(data)
        assert file.read(10) == data[10:20], "held since the first request"
        place.write(data[::-1])
        file.seek(2_000_000)
        with pytest.raises(Unreachable, match="replaced while it was being read"):
            file.read(1)


def test_a_request_that_fails_is_made_again(place: Location, proxy: Proxy) -> None:
    data = put_archive(place)
    faults = ("503", "cut short", "reset in the answer")
    proxy.rules = [Rule(fault, "GET", "archive") for fault in faults]
    with place.open_random(found(place)) as file:
        assert file.read() == data
    assert [len(proxy.met(fault)) for fault in faults] == [1, 1, 1]
