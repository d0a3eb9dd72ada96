"""Each part of Streaming's inside that the loader reaches into is there: a release without one is told here by its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import streaming
from streaming import Stream, StreamingDataLoader, StreamingDataset
from streaming.base import batching
from streaming.base import dataset as streaming_dataset

from mdsmix.load import internals

METHODS: dict[Any, list[str]] = {
    StreamingDataset: ["prepare_shard", "get_item", "evict_shard", "_get_work", "_resume"],
    StreamingDataLoader: ["_get_batch_size"],
    batching: ["generate_work"],
    streaming_dataset: ["_ShardState", "generate_work"],
}
ATTRIBUTES: dict[Any, list[str]] = {
    StreamingDataset: [
        "_shard_states",
        "_shard_access_times",
        "_cache_filelock",
        "_iterator",
        "_executor",
        "shard_offset_per_stream",
        "shards_per_stream",
        "stream_per_shard",
        *internals.DECIDE,
    ],
    Stream: ["_downloader"],
}


@pytest.mark.parametrize(("where", "names"), METHODS.items(), ids=str)
def test_functions_are_there(where: Any, names: list[str]) -> None:
    lacking = [name for name in names if not hasattr(where, name)]
    assert not lacking, f"Streaming {streaming.__version__} has no {lacking}"


@pytest.mark.parametrize(("where", "names"), ATTRIBUTES.items(), ids=str)
def test_attributes_are_set(where: Any, names: list[str]) -> None:
    text = inspect.getsource(where)
    lacking = [
        name for name in names if f"self.{name} = " not in text and f"self.{name}:" not in text
    ]
    assert not lacking, f"Streaming {streaming.__version__} sets no {lacking}"


def test_a_dataset_asks_for_its_order_where_it_is_kept() -> None:
    assert streaming_dataset.generate_work is internals.order_of
    assert "= generate_work(" in inspect.getsource(StreamingDataset._get_work)
