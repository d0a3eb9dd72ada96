"""An order that was kept is the one that Streaming works out, for all that ask; and what decides it decides which one is read."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.load import build_loader
from mdsmix.load import internals as order
from tests.with_torch.load_streams import IDS, config, write_tokens

ROWS = 60


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("streams")
    web = write_tokens(folder / "web", ROWS, shard_bytes=600)
    faq = write_tokens(folder / "faq", ROWS // 2, shard_bytes=600)
    return {"web": {"local": str(web)}, "faq": {"local": str(faq), "repeat": 1.5}}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of kept orders, of epochs of any size."""
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    monkeypatch.setattr(order, "KEPT_FROM", 1)
    yield tmp_path / "orders"
    gc.collect()


def loader(streams: dict[str, dict[str, Any]], batch_size: int = 4, **settings: Any) -> Any:
    return build_loader(config(streams, "text", shuffle=True, **settings), batch_size, ids=IDS)


def rows(of: Any) -> list[int]:
    return [int(row[0]) for batch in of for row in batch["input_ids"]]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_start_works_no_order_out_and_reads_the_same_rows(
    streams: dict[str, dict[str, Any]], kept: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    settings = {"num_workers": workers, "persistent_workers": False}
    with monkeypatch.context() as patch:
        patch.setattr(order, "KEPT_FROM", 10**9)
        streamings = rows(loader(streams, **settings))
        assert not kept.exists()
    first = rows(loader(streams, **settings))
    written = {path: path.stat().st_ino for path in kept.iterdir()}
    monkeypatch.setattr(order, "generate_work", lambda *_: pytest.fail("it is worked out again"))
    second = rows(loader(streams, **settings))
    assert streamings == first == second
    assert len(first) == ROWS + ROWS // 2 * 3 // 2
    assert {path: path.stat().st_ino for path in kept.iterdir()} == written
    assert len(written) == 1


def test_a_resumed_epoch_goes_on_where_it_was(
    streams: dict[str, dict[str, Any]], kept: Path
) -> None:
    whole = rows(loader(streams))
    for _ in range(2):
        stopped = loader(streams)
        batches = iter(stopped)
        for _ in range(7):
            next(batches)
        state = stopped.state_dict()
        stopped.dataset.end()
        resumed = loader(streams)
        resumed.load_state_dict(state)
        assert rows(resumed) == whole[28:]
    assert len(files(kept)) == 2, "the epoch from its beginning, and from there"


def test_whatever_decides_the_order_has_an_order_of_its_own(
    streams: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = loader(streams).dataset
    base._resume(World.detect(), 0)
    more = {"web": {"local": str(write_tokens(tmp_path / "more", ROWS + 1, shard_bytes=600))}}
    changed: list[Any] = [
        loader(streams, 5),
        loader(streams, shuffle_seed=7),
        loader(streams, num_canonical_nodes=2),
        loader(streams, shuffle_block_size=300_000),
        loader(streams | {"faq": streams["faq"] | {"repeat": 2}}),
        loader(streams | more),
        loader({"web": streams["web"]}),
        loader(streams, sampling_method="fixed"),
    ]

    def key(dataset: Any, nodes: int = 1, epoch: int = 0, start: int = 0) -> str:
        dataset._resume(World.detect(), 0)
        world = World(nodes, 1, 1, 0)
        return order._key(dataset, world, epoch, start)

    keys = [key(base), key(base, nodes=2), key(base, epoch=1), key(base, start=8)]
    with monkeypatch.context() as patch:
        patch.setattr(order, "version", lambda _: "0")
        keys.append(key(base))
    with monkeypatch.context() as patch:  # which shards are of which stream
        patch.setattr(base, "shards_per_stream", base.shards_per_stream[::-1])
        assert base.shards_per_stream[0] != base.shards_per_stream[1]
        keys.append(key(base))
    keys += [key(each.dataset) for each in changed]
    assert len(set(keys)) == len(keys)
    assert key(base) == keys[0] == key(loader(streams).dataset)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "other"])
def test_a_damaged_order_is_worked_out_again(
    streams: dict[str, dict[str, Any]], kept: Path, damage: str
) -> None:
    whole = rows(loader(streams))
    (path,) = kept.iterdir()
    content = path.read_bytes()
    bad = {
        "flipped": content[:200] + bytes([content[200] ^ 1]) + content[201:],
        "cut": content[:-40],
        "empty": b"",
        "other": b"0" * 500,
    }
    path.write_bytes(bad[damage])
    assert rows(loader(streams)) == whole
    read = order._read(path)
    assert read is not None


def test_no_bit_of_a_kept_order_may_be_another(kept: Path) -> None:
    """Its shape too: another one makes other ids of the same bytes."""
    found = np.arange(-1, 239).reshape(2, 2, 3, 4, 5)
    path = kept / "1"
    order._keep(path, found)
    content = path.read_bytes()
    for at, bit in zip(range(0, len(content), 3), cycle((1, 3, 6)), strict=False):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        read = order._read(
            path
        )  # a bit of the zip file that tells nothing of the ids, such as a date, may be another
        assert read is None or np.array_equal(read, found), (at, bit)
    path.write_bytes(content)
    read = order._read(path)
    assert read is not None
    assert (read == found).all()


def test_two_starts_at_once_keep_one_order_each_whole(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process that keeps the same order while the first one writes, and one that deletes old ones."""
    found = np.arange(500).reshape(1, 1, 1, 100, 5)
    path = kept / "1"
    replace = Path.replace

    def replace_after_another(written: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        order._keep(path, found)
        return replace(written, target)

    monkeypatch.setattr(Path, "replace", replace_after_another)
    order._keep(path, found)
    assert (order._read(path) == found).all()
    assert files(kept) == ["1"]


def test_what_is_written_in_part_does_not_stay(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = np.arange(10).reshape(1, 1, 1, 2, 5)
    kept.mkdir()
    killed = kept / "killed.0123.tmp"
    killed.write_bytes(b"half")
    os.utime(killed, (0, 0))
    (kept / "writing.4567.tmp").write_bytes(b"half")
    order._keep(kept / "1", found)
    assert files(kept) == ["1", "writing.4567.tmp"]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        order._keep(kept / "2", found)
    assert files(kept) == ["1", "writing.4567.tmp"]


def test_an_order_of_a_cache_that_may_only_be_read_is_read(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = np.arange(10).reshape(1, 1, 1, 2, 5)
    order._keep(kept / "1", found)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", read_only)
    read = order._read(kept / "1")
    assert read is not None
    assert (read == found).all()


def test_a_full_disk_hinders_no_epoch(
    streams: dict[str, dict[str, Any]], kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    class Full:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    assert len(rows(loader(streams))) == ROWS + ROWS // 2 * 3 // 2
    assert files(kept) == []
    assert "is not kept for the next start" in caplog.text


def test_the_last_used_orders_are_kept_and_large_ids_too(kept: Path) -> None:
    for number in range(order.KEPT + 2):
        found = np.array([[[[[number, -1, 1 << 40]]]]])
        order._keep(kept / str(number), found)
        read = order._read(kept / str(number))
        assert read is not None
        assert read.dtype == np.int64
        assert (read == found).all()
    assert files(kept) == [str(n) for n in range(2, order.KEPT + 2)]


def test_ranks_of_a_node_share_one_order(streams: dict[str, dict[str, Any]], kept: Path) -> None:
    dataset = loader(streams).dataset
    world = World(2, 8, 2, 0)
    dataset._resume(world, 0)
    for _ in range(2):
        ids = order.order_of(dataset, world, 0, 0)
        assert (ids == generate_work("random", dataset, world, 0, 0)).all()
    assert len(files(kept)) == 1
