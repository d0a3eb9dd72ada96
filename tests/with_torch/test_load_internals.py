"""Each part of Streaming's inside that the loader reaches into is there: a release without one is told here by its name."""

import inspect
import re
from itertools import chain
from pathlib import Path
from typing import Any

import streaming
from streaming import Stream, StreamingDataset
from streaming.base import dataset as streaming_dataset

from mdsmix.load import internals

READ: dict[Any, tuple[str, ...]] = {
    StreamingDataset: (
        "evict_shard",
        "get_item",
        "prepare_shard",
        "shard_offset_per_stream",
        "shards_per_stream",
        "stream_per_shard",
        "_cache_filelock",
        "_executor",
        "_iterator",
        "_resume",
        "_set_shuffle_block_size",
        "_shard_access_times",
        "_shard_states",
        *internals.DECIDE,
    ),
    Stream: ("_downloader",),
    streaming_dataset: ("_ShardState", "generate_work"),
}


def test_streaming_has_what_is_read() -> None:
    for where, names in READ.items():
        text = inspect.getsource(where)
        lacking = [
            name
            for name in names
            if not hasattr(where, name) and not re.search(rf"self\.{name}(:| = )", text)
        ]
        assert not lacking, f"Streaming {streaming.__version__}: {where} has no {lacking}"


def test_privates_of_streaming_are_read_in_one_file() -> None:
    theirs = {
        name
        for path in Path(streaming.__file__).parent.glob("base/*.py")
        for name in re.findall(r"(?:self\.|def |class )(_[A-Za-z]\w*)", path.read_text("utf-8"))
    }
    # The iterator is that of torch's DataLoader; `_resume` stands in a docstring.
    named = {"internals": {*chain(*READ.values())}, "loader": {"_iterator"}, "layout": {"_resume"}}
    for path in Path(internals.__file__).parent.glob("*.py"):
        text = path.read_text("utf-8")
        own = re.findall(r"def (_\w+)", text)
        read = theirs.intersection(re.findall(r"\.(_[A-Za-z]\w*)", text)) - {*own}
        assert read <= named.get(path.stem, set()), path


def test_a_dataset_asks_for_its_order_where_it_is_kept() -> None:
    assert streaming_dataset.generate_work is internals.order_of
    assert "= generate_work(" in inspect.getsource(StreamingDataset._get_work)
