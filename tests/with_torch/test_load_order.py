"""Kept orders of epochs: a kept order is the one that Streaming computes, for every process that
reads it, and every setting that changes the order changes the name of its file.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.load import internals as order
from tests.with_torch.load_streams import first_tokens, loaded, write_tokens

ROWS = 60
DRAWN = 105
Streams = dict[str, dict[str, Any]]
Patch = pytest.MonkeyPatch


class CountedOrder(NamedTuple):
    """A function that returns an order, and a mock that counts the orders that were computed."""

    draw: Any
    generate_work: Mock


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    folder = tmp_path_factory.mktemp("streams")
    web = write_tokens(folder / "web", ROWS, size_limit=600)
    faq = write_tokens(folder / "faq", ROWS // 2, size_limit=600)
    return {"web": {"local": str(web)}, "faq": {"local": str(faq), "repeat": 1.5}}


@pytest.fixture(autouse=True)
def orders(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """The folder of kept orders; those of epochs of any size are kept."""
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    monkeypatch.setattr(order, "KEEP_ORDERS_FROM", 1)
    yield tmp_path / "orders"
    gc.collect()


def loader(streams: Streams, batch: int = 4, **settings: Any) -> Any:
    return loaded(streams, batch, shuffle=True, **settings)


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("*")}


def test_a_second_start_reads_the_kept_order(
    streams: Streams, orders: Path, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(order, "KEEP_ORDERS_FROM", 10**9)
        order_of_streaming = first_tokens(loader(streams))
        assert not orders.exists()
    first = first_tokens(loader(streams))
    files = inodes(orders)
    monkeypatch.setattr(order, "generate_work", lambda *_: pytest.fail("it is computed again"))
    assert order_of_streaming == first == first_tokens(loader(streams))
    assert (len(first), len(files)) == (DRAWN, 1)
    assert inodes(orders) == files


def test_everything_that_decides_an_order_changes_its_name(
    streams: Streams, tmp_path: Path, monkeypatch: Patch
) -> None:
    longer = {"web": {"local": str(write_tokens(tmp_path / "more", ROWS + 1, size_limit=600))}}
    changed: list[Any] = [
        loader(streams, 5),
        loader(streams, shuffle_seed=7),
        loader(streams, num_canonical_nodes=2),
        loader(streams, shuffle_block_size=300_000),
        loader(streams | {"faq": streams["faq"] | {"repeat": 2}}),
        loader(streams | longer),
        loader({"web": streams["web"]}),
        loader(streams, sampling_method="fixed"),
    ]
    for share in (1, 3):  # of an epoch of one size
        shared = {n: {"local": s["local"], "proportion": share} for n, s in streams.items()}
        shared["faq"]["proportion"] = 2
        changed.append(loader(shared, epoch_size=40))

    def name_order(dataset: Any, nodes: int = 1, epoch: int = 0, start: int = 0) -> str:
        dataset._resume(World.detect(), 0)
        return order._name_order(dataset, World(nodes, 1, 1, 0), epoch, start)

    base = loader(streams).dataset
    names = [
        name_order(base),
        name_order(base, nodes=2),
        name_order(base, epoch=1),
        name_order(base, start=8),
    ]
    for owner, attribute, value in (
        (order, "version", lambda _: "0"),
        (base, "shards_per_stream", base.shards_per_stream[::-1]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            names.append(name_order(base))
    names += [name_order(other.dataset) for other in changed]
    assert len(set(names)) == len(names)
    assert name_order(base) == names[0] == name_order(loader(streams).dataset)


@pytest.fixture
def counted_order(streams: Streams, monkeypatch: Patch) -> CountedOrder:
    """The order of two nodes with eight ranks each."""
    dataset = loader(streams).dataset
    world = World(2, 8, 2, 0)
    work = Mock(wraps=generate_work)
    dataset._resume(world, 0)
    monkeypatch.setattr(order, "generate_work", work)
    return CountedOrder(lambda epoch=0: order.draw_order("random", dataset, world, epoch, 0), work)


def test_ranks_share_a_kept_order_and_a_damaged_one_is_computed_again(
    orders: Path, counted_order: CountedOrder
) -> None:
    """Damage to its shape is noticed too: another shape makes other ids of the same bytes."""
    draw, work = counted_order
    expected = draw()
    assert np.array_equal(draw(), expected)
    assert work.call_count == 1
    (path,) = orders.iterdir()
    whole = path.read_bytes()
    damaged_files = [whole[:-40], b"", b"0" * 500]
    for offset, bit in zip(range(0, len(whole), 11), cycle((1, 3, 6)), strict=False):
        flipped = bytes([whole[offset] ^ 1 << bit])
        damaged_files.append(whole[:offset] + flipped + whole[offset + 1 :])
    # A flipped bit that does not concern the ids, such as one of a date, is not noticed.
    for damaged in damaged_files:
        path.write_bytes(damaged)
        read = draw()
        assert np.array_equal(read, expected)
        assert read.dtype == np.int64
    assert work.call_count > 40
    path.write_bytes(whole)
    work.side_effect = AssertionError("it is computed again")
    assert np.array_equal(draw(), expected)


def test_the_last_orders_are_kept_and_half_written_ones_are_deleted(
    orders: Path, counted_order: CountedOrder
) -> None:
    draw, work = counted_order
    orders.mkdir()
    (orders / "of-a-killed-start.npz.77").write_bytes(b"half")
    draw(0)
    early_files = inodes(orders).keys()
    assert len(early_files) == 2
    for epoch in range(1, order.MOST_KEPT_ORDERS + 2):
        draw(epoch)
    assert len(inodes(orders)) == order.MOST_KEPT_ORDERS
    assert not early_files & inodes(orders).keys()
    work.side_effect = AssertionError("it is computed again")
    for epoch in range(2, order.MOST_KEPT_ORDERS + 2):
        draw(epoch)


def test_an_epoch_is_read_on_a_full_disk(
    streams: Streams, orders: Path, monkeypatch: Patch, caplog: Any
) -> None:
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(Path, "replace", fail)
    assert len(first_tokens(loader(streams))) == DRAWN
    assert inodes(orders) == {}
    assert "is not kept for the next start" in caplog.text
