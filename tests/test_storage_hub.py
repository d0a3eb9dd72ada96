"""Files of the hub are found, read by range and known by their hash; no hub but one on the loopback is asked."""

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.sources import find, plan, read
from mdsmix.storage import hub as storage_hub
from mdsmix.storage import locate
from tests.hub import Hub, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import HfFileSystem, constants

    with serving() as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        files = HfFileSystem(
            endpoint=served.url, token=False, use_listings_cache=False, skip_instance_cache=True
        )
        monkeypatch.setattr(storage_hub, "_files", lambda: files)
        yield served


def parquet(rows: int) -> bytes:
    out = io.BytesIO()
    texts, noise = [f"text {n}" for n in range(rows)], [f"{n:01000}" for n in range(rows)]
    pq.write_table(
        pa.table({"text": texts, "noise": noise}), out, compression="none", row_group_size=100
    )
    return out.getvalue()


def texts(tmp_path: Path, url: str) -> list[str]:
    units = plan(find([url], tmp_path), fields=("text",))
    return [r["text"] for unit in units for batch in read(unit) for r in batch.records]


def test_files_are_found_by_patterns_and_read_in_order(tmp_path: Path, hub: Hub) -> None:
    hub.files = {
        "data/b.jsonl": b'{"text": "two"}\n',
        "data/a.jsonl": b'{"text": "one"}\n',
        "README.md": b"#",
    }
    assert texts(tmp_path, "hf://datasets/org/name/data/*.jsonl") == ["one", "two"]
    assert texts(tmp_path, "hf://datasets/org/name/data/b.jsonl") == ["two"]
    assert [file.name for file in find(["hf://datasets/org/name/**/*.jsonl"], tmp_path)] == [
        "hf://datasets/org/name/data/a.jsonl",
        "hf://datasets/org/name/data/b.jsonl",
    ]


def test_of_a_parquet_only_ranges_are_fetched_and_one_that_is_replaced_is_noticed(
    tmp_path: Path, hub: Hub
) -> None:
    hub.files = {"a.parquet": parquet(1000)}
    assert texts(tmp_path, "hf://datasets/org/name/a.parquet") == [f"text {n}" for n in range(1000)]
    assert hub.ranges
    assert all(asked.startswith("bytes=") for _, asked in hub.ranges)
    units = plan(find(["hf://datasets/org/name/a.parquet"], tmp_path), fields=("text",))
    hub.files = {"a.parquet": parquet(1001)}
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        list(read(units[0]))


def test_stat_and_bytes_are_of_one_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    at, hub.files = locate("hf://datasets/org/name/a.jsonl"), {"a.jsonl": b"1\n"}
    found = at.stat()
    assert at.fetch() == (found, b"1\n")
    hub.files = {"a.jsonl": b"22\n"}
    monkeypatch.setattr(type(at), "stat", lambda self: found)
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        at.fetch()


def test_what_is_not_there_or_cannot_be_is_a_sentence(tmp_path: Path, hub: Hub) -> None:
    hub.files = {"a.jsonl": b"1\n"}
    with pytest.raises(RecipeError, match="matches no file"):
        find(["hf://datasets/org/name/none.jsonl"], tmp_path)
    for url in ("hf://org/name", "hf://datasets/org/name", "hf://models/org/name/a.jsonl"):
        with pytest.raises(RecipeError, match="names no file of a data set"):
            locate(url)
    with pytest.raises(Unreachable, match="cannot be written"):
        locate("hf://datasets/org/name/a.jsonl").write(b"x")
    with pytest.raises(Unreachable, match="cannot be read from the hub"):
        locate("hf://datasets/org/other/a.jsonl").open()


def test_a_hub_that_is_not_reached_is_said_with_what_to_look_at() -> None:
    for error in (TimeoutError("(Request ID: 1)"), OfflineModeIsEnabled("Cannot reach the hub")):
        said = rf"the hub \({type(error).__name__}\): .*HF_ENDPOINT and HF_HUB_OFFLINE"
        with pytest.raises(Unreachable, match=said), storage_hub._explained("hf://a"):
            raise error
