"""A shard that fails reaches the training loop, named, with and without workers; nothing ends early, nothing hangs."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from streaming.base.dataset import _ShardState

from mdsmix.errors import MdsmixError, MixRefused, Unreachable
from mdsmix.load import build_loader
from mdsmix.load.loader import MixLoader
from tests.abuse.test_shard import Trap
from tests.alarm import at_most
from tests.published import publish
from tests.with_torch.load_streams import IDS, config, write_stream, write_tokens

ROWS, SHARD = 24, "shard.00002.mds"
BEFORE = [10, 18, 26, 34, 42, 50]
"The first tokens of the rows that lie before that shard: all of them are delivered."
WORKERS = pytest.mark.parametrize("workers", [0, 2])


pytestmark = pytest.mark.usefixtures("_release_loaders")


def shards_of(folder: Path, **settings: Any) -> Path:
    """A stream of 24 rows in shards of three rows or so."""
    write_tokens(folder, ROWS, shard_bytes=260, **settings)
    assert len(list(folder.glob("*.mds*"))) > 4
    return folder


def loader_of(stream: dict[str, Any], workers: int = 0, **settings: Any) -> MixLoader:
    made = config({"web": stream}, "text", num_workers=workers, **settings)
    return build_loader(made, batch_size=2, ids=IDS)


def stream_in(folder: Path) -> dict[str, Any]:
    """A local stream, of which a lost shard is asked for once: each further time takes a second and more."""
    return {"local": str(folder), "download_retry": 1}


def flip(path: Path) -> None:
    """Changes one bit of the last token, which no decoder notices."""
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def first_error(loader: MixLoader) -> tuple[list[int], str]:
    """The first tokens of the rows that came before the error, and its sentence."""
    seen: list[int] = []

    def drain() -> None:
        for batch in loader:
            seen.extend(batch["input_ids"][:, 0].tolist())

    with at_most(30), pytest.raises(MdsmixError) as caught:
        drain()
    return seen, str(caught.value)


@WORKERS
@pytest.mark.parametrize("place", ["local", "remote"])
@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip])
def test_a_damaged_shard_is_named(workers: int, place: str, damage: Any, tmp_path: Path) -> None:
    damage(shards_of(tmp_path / "web") / SHARD)
    stream = stream_in(tmp_path / "web")
    if place == "remote":
        stream |= {"remote": f"{tmp_path}/web", "local": f"{tmp_path}/copy"}
    seen, sentence = first_error(loader_of(stream, workers))
    assert sentence.startswith(f"Stream web: shard {SHARD} under {tmp_path}/web is lost or damaged")
    assert "\n" not in sentence
    assert seen == BEFORE, "the rows before the shard are delivered, whole batches of them"
    assert not (tmp_path / "copy" / SHARD).exists(), "no damaged copy stays in the cache"


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_shard_that_is_no_copy_stays_where_it_is(damage: Any, tmp_path: Path) -> None:
    """A remote that is the local folder, by whatever name: what lies there is the stream itself."""
    damage(shards_of(tmp_path / "web") / SHARD)
    (tmp_path / "link").symlink_to(tmp_path / "web")
    stream = {"remote": f"{tmp_path}/link", "local": f"{tmp_path}/web"}
    _, sentence = first_error(loader_of(stream))
    assert f"shard {SHARD} under {tmp_path}/link is lost or damaged" in sentence
    assert (tmp_path / "web" / SHARD).exists()


def test_no_row_is_read_of_a_shard_that_another_worker_has_not_checked_yet(tmp_path: Path) -> None:
    """It lies there as soon as it is fetched, and goes when it is found to be damaged."""
    truncate(shards_of(tmp_path / "remote") / SHARD)
    stream = {"remote": f"{tmp_path}/remote", "local": f"{tmp_path}/local", "download_retry": 1}
    dataset = loader_of(stream).dataset
    copy = Path(shutil.copy(tmp_path / "remote" / SHARD, tmp_path / "local"))
    dataset._shard_states[2] = _ShardState.PREPARING
    dataset.prepare_shard(2, blocking=False)  # a background thread does not wait for it

    def find_it_damaged() -> None:
        copy.unlink()
        dataset._shard_states[2] = _ShardState.LOCAL

    Timer(0.3, find_it_damaged).start()
    with at_most(30), pytest.raises(Unreachable, match=SHARD):
        dataset.get_item(int(dataset.sample_offset_per_shard[2]))


@WORKERS
@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_copy_in_the_cache_is_fetched_again(
    workers: int, damage: Any, tmp_path: Path
) -> None:
    shards_of(tmp_path / "remote")
    shutil.copytree(tmp_path / "remote", tmp_path / "local")
    damage(tmp_path / "local" / SHARD)
    stream = {"remote": f"{tmp_path}/remote", "local": f"{tmp_path}/local"}
    with at_most(30):
        rows = [row for batch in loader_of(stream, workers) for row in batch["input_ids"].tolist()]
    assert sorted(rows) == [list(range(10 + 8 * i, 18 + 8 * i)) for i in range(ROWS)]


def test_a_compressed_shard_that_does_not_unpack_is_named(tmp_path: Path) -> None:
    shards_of(tmp_path / "web", compression="zstd:3", hashes=())
    truncate(tmp_path / "web" / f"{SHARD}.zstd")
    assert f"shard {SHARD}" in first_error(loader_of(stream_in(tmp_path / "web")))[1]


def test_without_hashes_a_shard_that_does_not_decode_is_named_with_its_row(tmp_path: Path) -> None:
    rows = [{"turns": [{"input_ids": [10], "labels": [11]}]}] * 3
    write_stream(tmp_path / "chat", {"turns": "json"}, rows, hashes=())
    shard = tmp_path / "chat" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes().replace(b'"labels"', b"'labels'"))
    seen, sentence = first_error(loader_of({"local": f"{tmp_path}/chat"}))
    assert (seen, "(row 0: " in sentence) == ([], True)


def test_a_row_that_does_not_fit_the_settings_is_named(tmp_path: Path) -> None:
    rows = [{"turns": [{"input_ids": [10], "labels": labels}]} for labels in ([11], [])]
    write_stream(tmp_path / "chat", {"turns": "json"}, rows)
    loader = build_loader(config({"chat": {"local": f"{tmp_path}/chat"}}), 1, ids=IDS)
    with pytest.raises(
        MixRefused,
        match=r"^Stream chat, shard shard.00000.mds, row 1: it holds no turns or its last resp",
    ):
        list(loader)


def test_a_failed_shard_keeps_nobody_waiting(tmp_path: Path) -> None:
    (shards_of(tmp_path / "web") / SHARD).unlink()
    dataset = loader_of(stream_in(tmp_path / "web")).dataset
    dataset.prepare_shard(2, blocking=False)
    assert dataset._shard_states[2] == _ShardState.LOCAL
    with pytest.raises(Unreachable, match=SHARD):
        dataset.prepare_shard(2)


def test_a_shard_that_lies_there_counts_as_used_when_it_is_asked_for_and_comes_back_when_it_went(
    tmp_path: Path,
) -> None:
    """The one that was used longest ago goes first where a cache is full."""
    shards_of(tmp_path / "remote")
    stream = {"remote": f"{tmp_path}/remote", "local": f"{tmp_path}/local"}
    dataset = loader_of(stream).dataset
    dataset.prepare_shard(0)
    before = dataset._shard_access_times[0]
    dataset.prepare_shard(0, blocking=False)
    assert dataset._shard_access_times[0] > before
    dataset.evict_shard(0)
    assert not (tmp_path / "local" / "shard.00000.mds").exists()
    dataset.prepare_shard(0, blocking=False)
    assert (tmp_path / "local" / "shard.00000.mds").exists()


def test_an_error_ends_the_workers_and_the_next_pass_has_others(tmp_path: Path) -> None:
    shard = shards_of(tmp_path / "web") / SHARD
    whole = shard.read_bytes()
    truncate(shard)
    loader = loader_of(stream_in(tmp_path / "web"), 2, persistent_workers=True)
    assert first_error(loader)[0] == BEFORE
    assert not multiprocessing.active_children()
    shard.write_bytes(whole)
    with at_most(30):
        assert sum(len(batch["input_ids"]) for batch in loader) == ROWS
    loader._stop_workers()


def test_room_that_cannot_be_made_gives_the_cache_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards_of(tmp_path / "remote")
    stream = {"remote": f"{tmp_path}/remote", "local": f"{tmp_path}/local"}
    dataset = loader_of(stream, cache_limit=20_000).dataset
    dataset.cache_usage = 20_000

    def refuse() -> None:
        raise ValueError("there are no shards present locally to evict")

    monkeypatch.setattr(dataset, "_evict_coldest_shard", refuse)
    with at_most(10):
        dataset.prepare_shard(0, blocking=False)
        assert not dataset._cache_filelock.is_locked
        dataset.prepare_shard(0)
    assert (tmp_path / "local" / "shard.00000.mds").exists()


@pytest.mark.parametrize("setting", [{}, {"allow_unsafe_types": True}])
def test_pickled_rows_are_refused_before_one_is_unpickled(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    rows = [{"tokens": pickle.dumps(Trap(tmp_path / "sprung"))}] * 9
    publish(tmp_path / "web", {"tokens": "pkl"}, rows)
    web = {"local": str(tmp_path / "web"), "split": "train"}
    with at_most(60), pytest.raises(MdsmixError, match="unsafe"):
        loader_of(web, **setting)
    assert not (tmp_path / "sprung").exists()
