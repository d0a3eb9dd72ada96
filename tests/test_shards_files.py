"""Shards at the target: named by their bytes, written once, gathered from wherever they lie whole; and the head of one is what was written."""

import os
from pathlib import Path

import numpy as np
import pytest

from mdsmix.errors import Unreachable
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard, read_index
from mdsmix.shards.shard_files import (
    ShardLayout,
    copy_missing,
    distinct,
    store_shards,
    write_if_new,
    write_once,
)
from mdsmix.shards.shard_samples import HEAD_BYTES, read_head
from mdsmix.storage import Location, locate, together
from tests.published import publish

CONTENT = b"abcde"
LAYOUT = ShardLayout({"tokens": "ndarray:uint16:2"}, None)


def rows(*values: int) -> Ragged:
    body = np.array(values, np.uint16).view(np.uint8)
    return Ragged.from_lengths(body, np.full(len(values) // 2, 4))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return locate(tmp_path / "here")


def test_what_is_there_already_is_not_written_again(folder: Location) -> None:
    """By its size, where a name is of its bytes: `ABCDE` shows that it was not written over."""
    at = folder / "a"
    for writer, before, is_written in (
        (write_once, None, True),
        (write_once, b"abcd", True),
        (write_once, b"abcdef", True),
        (write_once, b"ABCDE", False),
        (write_if_new, b"", True),
        (write_if_new, CONTENT, False),
        (write_if_new, b"longer than that", True),
        (write_if_new, None, True),
    ):
        at.delete()
        if before is not None:
            at.write(before)
        stood = at.stat()
        writer(at, CONTENT)
        assert at.read() == (CONTENT if is_written else before)
        assert (at.stat() != stood) is is_written


def test_shards_are_named_by_their_bytes_and_what_is_there_stays(folder: Location) -> None:
    (shard,) = store_shards(folder, LAYOUT, rows(1, 2, 3, 4))
    before = (folder / shard.stored.basename).stat()
    assert store_shards(folder, LAYOUT, rows(1, 2, 3, 4)) == [shard]
    assert (folder / shard.stored.basename).stat() == before
    (other,) = store_shards(folder, LAYOUT, rows(1, 2, 3, 5))
    assert other.stored.basename != shard.stored.basename


@pytest.fixture
def twins(folder: Location) -> list[Shard]:
    (shard,) = store_shards(folder, LAYOUT, rows(1, 2))
    return distinct([shard, shard, shard])


def test_twins_are_files_of_their_own_and_another_folder_takes_no_room(
    folder: Location, twins: list[Shard], tmp_path: Path
) -> None:
    """A cache evicts one by deleting its file, and damage to one must not be damage to all."""
    copy_missing(folder, [twin.stored for twin in twins], [folder])
    paths = [Path(str(folder / shard.stored.basename)) for shard in twins]
    assert len({path.read_bytes() for path in paths}) == 1
    assert len({path.stat().st_ino for path in paths}) == 3
    assert [path.name[32:] for path in paths] == [".mds", "-1.mds", "-2.mds"]
    copy_missing(locate(tmp_path / "version"), [twins[0].stored], [folder])
    assert os.path.samefile(tmp_path / "version" / paths[0].name, paths[0])


def test_a_file_of_another_size_is_no_source_and_no_shard(
    folder: Location, twins: list[Shard], tmp_path: Path
) -> None:
    name = twins[0].stored.basename
    whole, other = (folder / name).read(), locate(tmp_path / "other")
    target = locate(tmp_path / "version")
    (other / name).write(whole[:-1])
    (target / name).write(whole + b"x")
    copy_missing(target, [twins[0].stored], [other, folder])
    assert (target / name).read() == whole
    with pytest.raises(Unreachable, match="was deleted from"):
        copy_missing(locate(tmp_path / "third"), [twins[0].stored], [other])


def test_many_at_a_time_answer_in_order_and_fail_as_the_first_that_failed() -> None:
    assert together(lambda n: n * n, range(50)) == [n * n for n in range(50)]
    assert together(str, []) == []

    def failing(n: int) -> int:
        if n in (3, 7):
            raise Unreachable(f"no {n}")
        return n

    with pytest.raises(Unreachable, match="no 3"):
        together(failing, range(10))


COLUMNS = {"a": "ndarray:int32", "b": "ndarray:uint16:3", "c": "json", "d": "str", "e": "bytes"}
ROW = {"a": [1, 2, 70000], "b": [4, 5, 6], "c": {"x": [1]}, "d": "é", "e": b"\x00z"}


def head(folder: Path, limit: int = 4) -> list[dict[str, object]]:
    place = locate(str(folder / "train"))
    return read_head(place, read_index(place).shards[0], limit)


def test_the_first_samples_are_what_was_written(tmp_path: Path) -> None:
    """Short in bytes too, but for one sample, which is read however large it is."""
    for compression in (None, "zstd:3"):
        many = [ROW | {"d": str(n)} for n in range(10)]
        folder = publish(tmp_path / str(compression), COLUMNS, many, compression=compression)
        samples = head(folder)
        assert len(samples) == 4
        for sample, row in zip(samples, many, strict=False):
            assert np.asarray(sample["a"]).tolist() == row["a"]
            assert np.asarray(sample["b"]).dtype == "uint16"
            assert [sample[c] for c in "cde"] == [row[c] for c in "cde"]
    for size in (HEAD_BYTES // 2, 2 * HEAD_BYTES):
        folder = publish(tmp_path / str(size), {"e": "bytes"}, [{"e": bytes(size)}] * 10)
        assert len(head(folder, 10)) == 1


DAMAGE = [
    (0, b"\x05\x00\x00\x00", "it holds 5 samples, and its index says 4"),
    (4, b"\x00\x00\x00\x00", "leads outside"),  # the first one begins inside the table
    (8, b"\xff\xff\xff\x7f", "not ascending"),
    (20, b"\xff\xff\xff\x7f", "leads outside"),  # the last one ends outside the file
    (-6, b"\xff\xff\xff\xff\xff\xff", "decode"),  # a JSON column that is none
]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    publish(tmp_path, {"c": "json"}, [{"c": [1, 2, 3]}] * 4)
    path = tmp_path / "train" / "shard.00000.mds"
    whole = path.read_bytes()
    for at, data, why in DAMAGE:
        content, at = bytearray(whole), at % len(whole)
        content[at : at + len(data)] = data
        path.write_bytes(content)
        with pytest.raises(Unreachable, match=rf"shard\.00000\.mds is damaged: .*{why}"):
            head(tmp_path)
    publish(tmp_path / "packed", {"c": "json"}, [{"c": [1, 2, 3]}] * 4, compression="zstd:3")
    path = tmp_path / "packed" / "train" / "shard.00000.mds.zstd"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Unreachable, match=r"shard\.00000\.mds\.zstd is damaged: "):
        head(tmp_path / "packed")
