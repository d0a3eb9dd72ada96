"""An order that was kept is the one that Streaming works out, for all that ask; and what decides it
decides which one is read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.load import internals as order
from tests.with_torch.load_streams import first_tokens, loaded, write_tokens

ROWS, DRAWN = 60, 105
Streams, Asked, Patch = dict[str, dict[str, Any]], tuple[Any, Mock], pytest.MonkeyPatch


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    folder = tmp_path_factory.mktemp("streams")
    web = write_tokens(folder / "web", ROWS, size_limit=600)
    faq = write_tokens(folder / "faq", ROWS // 2, size_limit=600)
    return {"web": {"local": str(web)}, "faq": {"local": str(faq), "repeat": 1.5}}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """The folder of kept orders, of epochs of any size."""
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    monkeypatch.setattr(order, "KEEP_ORDERS_FROM", 1)
    yield tmp_path / "orders"
    gc.collect()


def loader(streams: Streams, batch: int = 4, **settings: Any) -> Any:
    return loaded(streams, batch, shuffle=True, **settings)


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("*")}


def test_a_second_start_orders_nothing(streams: Streams, kept: Path, monkeypatch: Patch) -> None:
    """And reads the same rows."""
    with monkeypatch.context() as patch:
        patch.setattr(order, "KEEP_ORDERS_FROM", 10**9)
        streamings = first_tokens(loader(streams))
        assert not kept.exists()
    first, written = first_tokens(loader(streams)), inodes(kept)
    monkeypatch.setattr(order, "generate_work", lambda *_: pytest.fail("it is worked out again"))
    assert streamings == first == first_tokens(loader(streams))
    assert (len(first), len(written), inodes(kept)) == (DRAWN, 1, written)


def test_what_decides_it_names_it(streams: Streams, tmp_path: Path, monkeypatch: Patch) -> None:
    more = {"web": {"local": str(write_tokens(tmp_path / "more", ROWS + 1, size_limit=600))}}
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
    for share in (1, 3):  # of an epoch of one size
        shared = {n: {"local": s["local"], "proportion": share} for n, s in streams.items()}
        shared["faq"]["proportion"] = 2
        changed.append(loader(shared, epoch_size=40))

    def key(dataset: Any, nodes: int = 1, epoch: int = 0, start: int = 0) -> str:
        dataset._resume(World.detect(), 0)
        return order._key(dataset, World(nodes, 1, 1, 0), epoch, start)

    base = loader(streams).dataset
    keys = [key(base), key(base, nodes=2), key(base, epoch=1), key(base, start=8)]
    for where, name, value in (
        (order, "version", lambda _: "0"),
        (base, "shards_per_stream", base.shards_per_stream[::-1]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            keys.append(key(base))
    keys += [key(each.dataset) for each in changed]
    assert len(set(keys)) == len(keys)
    assert key(base) == keys[0] == key(loader(streams).dataset)


@pytest.fixture
def asked(streams: Streams, monkeypatch: Patch) -> Asked:
    """Gives the order of two nodes with eight ranks each as their datasets ask for it; a mock
    counts those that Streaming worked out.
    """
    dataset, world, work = loader(streams).dataset, World(2, 8, 2, 0), Mock(wraps=generate_work)
    dataset._resume(world, 0)
    monkeypatch.setattr(order, "generate_work", work)
    return lambda epoch=0: order.draw_order("random", dataset, world, epoch, 0), work


def test_ranks_share_an_order_of_which_no_bit_may_be_another(kept: Path, asked: Asked) -> None:
    """Its shape too: another one makes other ids of the same bytes."""
    ask, work = asked
    wanted = ask()
    assert np.array_equal(ask(), wanted)
    assert work.call_count == 1
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    flips = zip(range(0, len(whole), 11), cycle((1, 3, 6)), strict=False)
    flipped = (whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :] for at, bit in flips)
    # A bit of the zip file that tells nothing of the ids, such as a date, may be another.
    for bad in (whole[:-40], b"", b"0" * 500, *flipped):
        path.write_bytes(bad)
        read = ask()
        assert np.array_equal(read, wanted)
        assert read.dtype == np.int64
    assert work.call_count > 40
    path.write_bytes(whole)
    work.side_effect = AssertionError("it is worked out again")
    assert np.array_equal(ask(), wanted)


def test_the_last_orders_are_kept_and_half_written_ones_go(kept: Path, asked: Asked) -> None:
    ask, work = asked
    kept.mkdir()
    (kept / "of-a-killed-start.npz.77").write_bytes(b"half")
    ask(0)
    early = inodes(kept).keys()
    assert len(early) == 2
    for epoch in range(1, order.MOST_KEPT_ORDERS + 2):
        ask(epoch)
    assert len(inodes(kept)) == order.MOST_KEPT_ORDERS
    assert not early & inodes(kept).keys()
    work.side_effect = AssertionError("it is worked out again")
    for epoch in range(2, order.MOST_KEPT_ORDERS + 2):
        ask(epoch)


def test_a_full_disk_hinders_no_epoch(
    streams: Streams, kept: Path, monkeypatch: Patch, caplog: Any
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(Path, "replace", full)
    assert len(first_tokens(loader(streams))) == DRAWN
    assert inodes(kept) == {}
    assert "is not kept for the next start" in caplog.text
