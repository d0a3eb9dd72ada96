"""A shard that fails reaches the training loop, named, with and without workers; nothing ends early, nothing hangs."""

import multiprocessing
import pickle
import shutil
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from streaming.base.dataset import _ShardState

from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.load.loader import MixLoader
from tests.abuse.test_published import Trap
from tests.alarm import at_most
from tests.published import publish
from tests.with_torch.load_streams import first_tokens, loaded, write_stream, write_tokens

ROWS, SHARD = 24, "shard.00002.mds"
BEFORE = [10, 18, 26, 34, 42, 50]
"The first tokens of the rows that lie before that shard: all of them are delivered."
pytestmark = pytest.mark.usefixtures("_release_loaders")


def shards_of(folder: Path, **settings: Any) -> Path:
    """A stream of 24 rows in shards of three rows or so."""
    write_tokens(folder, ROWS, shard_bytes=260, **settings)
    assert len(list(folder.glob("*.mds*"))) > 4
    return folder


def loader_of(folder: Path, workers: int = 0, remote: Path | None = None, **keys: Any) -> MixLoader:
    """Of a stream in the folder, to which it is fetched where `remote` has it. A lost shard is asked for once: each further time takes
    a second and more."""
    stream = {"local": str(folder), "download_retry": 1}
    stream |= {"remote": str(remote)} if remote else {}
    return loaded({"web": stream}, num_workers=workers, **keys)


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
    with at_most(30), pytest.raises(MdsmixError) as caught:
        seen.extend(token for batch in loader for token in first_tokens([batch]))
    return seen, str(caught.value)


WAYS = [(Path.unlink, "web", 0), (truncate, "copy", 0), (flip, "web", 0), (Path.unlink, "copy", 2)]


@pytest.mark.parametrize(("damage", "local", "workers"), WAYS)
def test_a_damaged_shard_is_named(damage: Any, local: str, workers: int, tmp_path: Path) -> None:
    web, hashes = tmp_path / "web", ("sha1",) if damage is flip else ()  # the size tells the others
    damage(shards_of(web, hashes=hashes) / SHARD)
    loader = loader_of(tmp_path / local, workers, web if local == "copy" else None)
    seen, sentence = first_error(loader)
    assert sentence.startswith(f"Stream web: shard {SHARD} under {web} is lost or damaged")
    assert "\n" not in sentence
    assert seen == BEFORE, "the rows before the shard are delivered, whole batches of them"
    assert not (tmp_path / "copy" / SHARD).exists(), "no damaged copy stays in the cache"


def test_a_damaged_shard_that_is_no_copy_stays_where_it_is(tmp_path: Path) -> None:
    """A remote that is the local folder, by whatever name: what lies there is the stream itself. A packed one too."""
    web, link = shards_of(tmp_path / "web"), tmp_path / "link"
    truncate(web / SHARD)
    link.symlink_to(web)
    said = f"shard {SHARD} under {link} is lost or damaged"
    assert said in first_error(loader_of(web, remote=link))[1]
    assert (web / SHARD).exists()
    packed = shards_of(tmp_path / "zip", compression="zstd:3", hashes=()) / f"{SHARD}.zstd"
    truncate(packed)
    assert f"shard {SHARD}" in first_error(loader_of(tmp_path / "zip"))[1]
    assert packed.exists()


def test_no_row_is_read_of_a_shard_that_another_worker_has_not_checked_yet(tmp_path: Path) -> None:
    """It lies there as soon as it is fetched, and goes when it is found to be damaged."""
    remote = shards_of(tmp_path / "remote")
    dataset = loader_of(tmp_path / "local", remote=remote).dataset
    truncate(remote / SHARD)
    copy = Path(shutil.copy(remote / SHARD, tmp_path / "local"))
    dataset._shard_states[2] = _ShardState.PREPARING
    dataset.prepare_shard(2, blocking=False)  # a background thread does not wait for it

    def find_it_damaged() -> None:
        copy.unlink()
        dataset._shard_states[2] = _ShardState.LOCAL

    Timer(0.3, find_it_damaged).start()
    with at_most(30), pytest.raises(Unreachable, match=SHARD):
        dataset.get_item(int(dataset.sample_offset_per_shard[2]))


@pytest.mark.parametrize(("damage", "workers"), [(truncate, 0), (flip, 2)])
def test_a_damaged_copy_is_fetched_again(damage: Any, workers: int, tmp_path: Path) -> None:
    remote = shards_of(tmp_path / "remote")
    damage(shutil.copytree(remote, tmp_path / "local") / SHARD)
    with at_most(30):
        batches = list(loader_of(tmp_path / "local", workers, remote))
    rows = [row for batch in batches for row in batch["input_ids"].tolist()]
    assert sorted(rows) == [list(range(10 + 8 * i, 18 + 8 * i)) for i in range(ROWS)]


def test_a_row_that_does_not_decode_or_fit_is_named(tmp_path: Path) -> None:
    rows = [{"turns": [{"input_ids": [10], "labels": labels}]} for labels in ([11], [])]
    shard = write_stream(tmp_path, {"turns": "json"}, rows, hashes=()) / "shard.00000.mds"
    named = "Stream web, shard shard.00000.mds, row 1: it holds no turns or its last resp"
    assert first_error(loader_of(tmp_path))[1].startswith(named)
    shard.write_bytes(shard.read_bytes().replace(b'"labels"', b"'labels'"))
    seen, sentence = first_error(loader_of(tmp_path))
    assert (seen, "(row 0: " in sentence) == ([], True)


def test_an_error_ends_the_workers_and_the_next_pass_has_others(tmp_path: Path) -> None:
    shard = shards_of(tmp_path) / SHARD
    whole = shard.read_bytes()
    truncate(shard)
    loader = loader_of(tmp_path, 2, persistent_workers=True)
    assert first_error(loader)[0] == BEFORE
    assert not multiprocessing.active_children()
    shard.write_bytes(whole)
    with at_most(30):
        assert len(first_tokens(loader)) == ROWS
    loader.end()


def test_pickled_rows_are_refused_before_one_is_unpickled(tmp_path: Path) -> None:
    rows = [{"tokens": pickle.dumps(Trap(tmp_path / "sprung"))}] * 9
    publish(tmp_path / "web", {"tokens": "pkl"}, rows)
    for setting in ({}, {"allow_unsafe_types": True}):
        with at_most(60), pytest.raises(MdsmixError, match="unsafe"):
            loader_of(tmp_path / "web/train", **setting)
    assert not (tmp_path / "sprung").exists()
