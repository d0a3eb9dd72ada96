"""The index is judged when the loader is built: missing, empty, hostile, or without the hash that is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
from streaming.base.hashing import is_hash

from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.load import build_loader
from mdsmix.load.dataset import FASTEST_FIRST
from tests.with_torch.load_streams import IDS, config, write_tokens


def build(stream: dict[str, Any], **dataset: Any) -> Any:
    return build_loader(config({"web": stream}, "text", **dataset), batch_size=2, ids=IDS).dataset


def refusal(kind: type[MdsmixError], stream: dict[str, Any], **dataset: Any) -> str:
    with pytest.raises(kind) as caught:
        build(stream, **dataset)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_stream_is_one_sentence(tmp_path: Path) -> None:
    for side in ("local", "remote"):
        stream = {side: f"{tmp_path}/none", "split": "train", "download_retry": 1}
        sentence = refusal(Unreachable, {"local": f"{tmp_path}/local"} | stream)
        assert sentence.startswith(
            f"Stream web: index.json under {tmp_path}/none/train cannot be used"
        )


def test_an_index_that_says_nothing_or_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    index = write_tokens(tmp_path, 4) / "index.json"
    tree = json.loads(index.read_text())
    refused = {
        "{": "cannot be used",
        '{"version": 1, "shards": []}': "cannot be used",
        '{"version": 2}': "cannot be used",
        '{"version": 2, "shards": []}': "lists no samples",
    }
    for basename in ("../shard.00000.mds", "/shard.00000.mds", "a/../../b.mds"):
        tree["shards"][0]["raw_data"]["basename"] = basename
        refused[json.dumps(tree)] = "outside its own folder"
    for text, why in refused.items():
        index.write_text(text)
        assert why in refusal(Unreachable, {"local": str(tmp_path)}), text


def test_the_fastest_hash_that_all_shards_hold_is_checked_where_the_yaml_does_not_say(
    tmp_path: Path,
) -> None:
    def checked(local: Path, **dataset: Any) -> str | None:
        found: str | None = build({"local": str(local)}, **dataset).streams[0].validate_hash
        return found

    two = write_tokens(tmp_path / "two", 9, hashes=("sha1", "xxh64"), shard_bytes=260)
    assert checked(two) == "xxh64"
    assert checked(two, validate_hash="sha1") == "sha1"
    assert checked(two, validate_hash=None) is None
    index = json.loads((two / "index.json").read_text())
    del index["shards"][-1]["raw_data"]["hashes"]["xxh64"]
    (two / "index.json").write_text(json.dumps(index))
    assert checked(two) == "sha1", "which all shards hold"
    local = {"local": str(two)}
    assert "hold sha1" in refusal(RecipeError, local, validate_hash="xxh64")
    assert "hold sha1" in refusal(RecipeError, local | {"validate_hash": "md5"})
    assert all(map(is_hash, FASTEST_FIRST))
    assert checked(write_tokens(tmp_path / "none", 4, hashes=())) is None
