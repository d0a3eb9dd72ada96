"""Shards at the target: named by their bytes, written once, gathered from wherever they lie whole."""

import os
from pathlib import Path

import numpy as np
import pytest

from mdsmix.errors import Unreachable
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard, make_index
from mdsmix.shards.lease import keep_index, superseded
from mdsmix.shards.shard_files import (
    ShardLayout,
    copy_missing,
    distinct,
    store_shards,
    write_if_new,
    write_once,
)
from mdsmix.storage import LocalPath, Location, locate, together

CONTENT = b"abcde"
LAYOUT = ShardLayout({"tokens": "ndarray:uint16:2"}, None)


def rows(*values: int) -> Ragged:
    body = np.array(values, np.uint16).view(np.uint8)
    return Ragged.from_lengths(body, np.full(len(values) // 2, 4))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return locate(tmp_path / "here")


def test_replaced_indexes_are_kept_and_a_damaged_one_is_passed_over(folder: Location) -> None:
    keep_index(folder, make_index([]).content)
    (folder / ".mdsmix/0.index").write(b"{")
    assert len(list(superseded(folder))) == 1


def test_what_is_there_already_is_not_written_again(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its size, where a name is of its bytes: `ABCDE` shows that it was not written over."""
    at, written, write = folder / "a", list[str](), LocalPath.write
    monkeypatch.setattr(
        LocalPath, "write", lambda self, *parts: written.append(self.name) or write(self, *parts)
    )
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
        written.clear()
        writer(at, CONTENT)
        assert at.read() == (CONTENT if is_written else before)
        assert written == ["a"] * is_written


def test_shards_are_named_by_their_bytes_and_what_is_there_stays(folder: Location) -> None:
    (shard,) = store_shards(folder, LAYOUT, rows(1, 2, 3, 4))
    at = Path(str(folder / shard.stored.basename))
    before = at.stat().st_mtime_ns, at.stat().st_ino
    assert store_shards(folder, LAYOUT, rows(1, 2, 3, 4)) == [shard]
    assert (at.stat().st_mtime_ns, at.stat().st_ino) == before
    (other,) = store_shards(folder, LAYOUT, rows(1, 2, 3, 5))
    assert other.stored.basename != shard.stored.basename


@pytest.fixture
def twins(folder: Location) -> list[Shard]:
    (shard,) = store_shards(folder, LAYOUT, rows(1, 2))
    return distinct([shard, shard, shard])


def test_twins_are_files_of_their_own(folder: Location, twins: list[Shard]) -> None:
    """A cache evicts one by deleting its file, and damage to one must not be damage to all."""
    copy_missing(folder, [twin.stored for twin in twins], [folder])
    paths = [Path(str(folder / shard.stored.basename)) for shard in twins]
    assert len({path.read_bytes() for path in paths}) == 1
    assert len({path.stat().st_ino for path in paths}) == 3
    assert [path.name[32:] for path in paths] == [".mds", "-1.mds", "-2.mds"]


def test_a_shard_goes_to_another_folder_without_taking_room_twice(
    folder: Location, twins: list[Shard], tmp_path: Path
) -> None:
    copy_missing(locate(tmp_path / "version"), [twins[0].stored], [folder])
    name = twins[0].stored.basename
    assert os.path.samefile(tmp_path / "version" / name, tmp_path / "here" / name)


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
