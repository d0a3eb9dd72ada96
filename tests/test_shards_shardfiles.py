"""Shards at the target: named by their bytes, written once, gathered from wherever they lie whole."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("before", "is_written"), [(None, True), (b"abcd", True), (b"abcdef", True), (b"ABCDE", False)]
)
def test_what_is_named_by_its_bytes_is_written_unless_all_of_it_is_there(
    folder: Location, before: bytes | None, is_written: bool
) -> None:
    """By its size, a name's bytes being what they are: `ABCDE` shows that it was not written over."""
    at = folder / "a"
    if before is not None:
        at.write(before)
    write_once(at, CONTENT)
    assert at.read() == (b"abcde" if is_written else before)


@pytest.mark.parametrize("before", [b"", b"new", b"longer than that", None])
def test_a_file_whose_content_changes_is_written_where_it_differs(
    folder: Location, before: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, written = folder / "card", []
    if before is not None:
        at.write(before)
    write = LocalPath.write
    monkeypatch.setattr(
        LocalPath, "write", lambda self, *parts: written.append(self.name) or write(self, *parts)
    )
    write_if_new(at, b"new")
    assert at.read() == b"new"
    assert written == ([] if before == b"new" else ["card"])


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
