"""Shard files that stay open: each is opened once in a pass, a deleted one is closed, and rows and
errors are those of files that are opened for each row. The oracle is a bare StreamingDataset.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
import weakref
from itertools import islice
from pathlib import Path
from resource import RLIM_INFINITY
from typing import Any

import pytest
from streaming import Stream, StreamingDataLoader, StreamingDataset
from torch.utils.data import DataLoader

from mdsmix.errors import Unreachable
from mdsmix.load import MixLoader, open_shards
from mdsmix.load.dataset import LOCK_KEY
from mdsmix.load.open_shards import OpenShards
from tests.alarm import fail_after
from tests.preloaded import PreloadedPython
from tests.with_torch.load_streams import config, first_tokens, loaded, run_ranks, write_tokens

pytestmark = pytest.mark.usefixtures("_release_loaders")
ROWS = 90


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input_ids": [int(sample["tokens"][0]) for sample in samples]}


def open_bare(streams: dict[str, Any], batch: int, **keys: Any) -> StreamingDataLoader:
    """Return the loader of a bare StreamingDataset, whose batches have the first tokens of rows."""
    dataset = StreamingDataset(
        streams=[Stream(**stream) for stream in streams.values()], batch_size=batch, **keys
    )
    return StreamingDataLoader(dataset, batch_size=batch, collate_fn=collate)


def rows_of(batches: Any) -> list[int]:
    """Return the first tokens of the rows of a bare loader."""
    return [token for batch in batches for token in batch["input_ids"]]


def list_open(folder: Path) -> list[str]:
    """List the shards of a folder that this process has open; deleted ones end in (deleted)."""
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # it was closed just now
            continue
    return [path for path in paths if path.startswith(str(folder)) and ".mds" in path]


def wait_until_closed(folder: Path) -> None:
    """Wait until no deleted shard is open. Nothing is read in this time."""
    with fail_after(30):
        while any(path.endswith("(deleted)") for path in list_open(folder)):
            time.sleep(0.01)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that were opened, and how many were open then."""
    shards: list[int] = []

    def open_and_note(self: OpenShards, shard_id: int, source: Any, is_kept_open: bool) -> Any:
        shards.append(shard_id)
        file = open_shard(self, shard_id, source, is_kept_open)
        assert len(self.files) <= open_shards.MOST_OPEN
        return file

    open_shard = OpenShards.open
    monkeypatch.setattr(OpenShards, "open", open_and_note)
    return shards


def test_each_shard_is_opened_once_and_closed_at_the_end_of_the_pass(
    tmp_path: Path, opened: list[int]
) -> None:
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    count = len([*folder.glob("*.mds")])
    loader = loaded({"web": {"local": str(folder)}}, shuffle=True)
    for _ in range(2):
        opened.clear()
        tokens = first_tokens(loader)
        assert sorted(tokens) == [*range(10, 10 + 8 * ROWS, 8)]
        assert sorted(opened) == [*range(count)]
        assert not loader.dataset.open_shards.files
    reading = iter(loader)
    next(reading)
    assert list_open(folder)
    del reading  # the training loop was left
    with fail_after(30):
        while list_open(folder):  # the thread that looks at the files may have one for a moment
            time.sleep(0.01)
    assert loader.dataset[5].input_ids.tolist() == [*range(50, 58)]
    assert list_open(folder) == []


@pytest.mark.parametrize("files_of_process", [RLIM_INFINITY, 1024, 8 * 2, 3])
def test_the_number_of_open_files_is_bounded(
    tmp_path: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch, files_of_process: int
) -> None:
    """By MOST_OPEN, and by an eighth of the files that the process may open."""
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    copy = shutil.copytree(folder, tmp_path / "copy")
    expected = rows_of(open_bare({"web": {"local": str(copy)}}, 4, shuffle=True))
    limits = (files_of_process, files_of_process)
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr(open_shards, "MOST_OPEN", 3)
    loader = loaded({"web": {"local": str(folder)}}, 4, shuffle=True)
    most = 0
    tokens = []
    for batch in loader:
        tokens += first_tokens([batch])
        most = max(most, len(loader.dataset.open_shards.files))
    assert tokens == expected
    assert most == {16: 2, 3: 1}.get(files_of_process, 3)
    assert len(opened) > len(set(opened))


def test_a_large_table_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offsets are read with each sample: the rows are the same, and no memory is needed."""
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    samples = json.loads((folder / "index.json").read_text())["shards"][0]["samples"]
    table_bytes = 4 * (samples + 1)
    for bound, kept in ((table_bytes, table_bytes), (table_bytes - 1, 0)):
        monkeypatch.setattr(open_shards, "MOST_TABLE_BYTES", bound)
        loader = loaded({"web": {"local": str(folder)}})
        reading = iter(loader)
        tokens = first_tokens(islice(reading, 1))
        assert len(loader.dataset.open_shards.files[0].table) == kept
        assert tokens + first_tokens(reading) == [*range(10, 10 + 8 * ROWS, 8)]
        del reading, loader
        gc.collect()


def test_shards_used_by_index_are_evicted_last(tmp_path: Path) -> None:
    remote = write_tokens(tmp_path / "remote", ROWS, size_limit=400)
    local = tmp_path / "local"
    limit = (remote / "index.json").stat().st_size + 3 * 400
    stream = {"web": {"remote": str(remote), "local": str(local)}}
    dataset = loaded(stream, 1, predownload=1, cache_limit=limit).dataset
    first = dataset.sample_offset_per_shard
    for shard in (0, 1, 2, 0, 3):
        dataset[int(first[shard])]
    kept = sorted(path.name for path in local.glob("*.mds"))
    assert kept[0] == "shard.00000.mds"
    assert "shard.00001.mds" not in kept


def test_other_loaders_get_rows(tmp_path: Path) -> None:
    """A loader with a collator of its own gets rows, as from the dataset's index."""
    folder = write_tokens(tmp_path / "web", 10)
    dataset = loaded({"web": {"local": str(folder)}}).dataset
    (rows,) = DataLoader(dataset, batch_size=10, collate_fn=list)
    for number, row in enumerate(rows):
        assert row.input_ids.tolist() == dataset[number].input_ids.tolist()
        assert row.labels.tolist() == row.input_ids.tolist()


def test_evicted_shards_are_closed(tmp_path: Path) -> None:
    """The rows are those of a bare dataset with the same limit, whose shards are evicted too."""
    remote = write_tokens(tmp_path / "remote", 1000, length=16, size_limit=2000)
    index = (remote / "index.json").stat().st_size
    keys: dict[str, Any] = {
        "cache_limit": index + 10 * 2000,
        "predownload": 4,
        "shuffle_block_size": 64,
    }
    keys |= {"shuffle": True, "shuffle_seed": 3}
    bare = {"web": {"remote": str(remote), "local": f"{tmp_path}/bare"}}
    expected = rows_of(open_bare(bare, 2, **keys))
    local = tmp_path / "local"
    loader = loaded({"web": {"remote": str(remote), "local": str(local)}}, **keys)
    tokens = []
    for number, batch in enumerate(loader):
        tokens += first_tokens([batch])
        if number in (100, 250, 400):
            wait_until_closed(local)
            assert list_open(local)
    assert tokens == expected
    shards = len([*remote.glob("*.mds")])
    assert 0 < len([*local.glob("*.mds")]) < shards, "some were evicted"


def test_workers_read_each_sample_once_while_shards_are_evicted(tmp_path: Path) -> None:
    """Two workers share the cache: each evicts shards that the other one may have open."""
    remote = write_tokens(tmp_path / "remote", 300, size_limit=300)
    local = tmp_path / "local"
    limit = (remote / "index.json").stat().st_size + 51 * 300
    loader = loaded(
        {"web": {"remote": str(remote), "local": str(local)}},
        cache_limit=limit,
        predownload=2,
        shuffle=True,
        shuffle_block_size=16,
        num_workers=2,
        drop_last=False,
    )
    assert sorted(first_tokens(loader)) == [10 + 8 * row for row in range(300)]
    loader.end()
    assert 0 < len([*local.glob("*.mds")]) < len([*remote.glob("*.mds")]), "some were evicted"


@pytest.mark.parametrize("keeps_compressed", [False, True])
def test_kept_compressed_shards_are_not_fetched_again(
    tmp_path: Path, keeps_compressed: bool
) -> None:
    """Under keep_zip the compressed shards stay in the cache, and rows come from them after the
    decompressed ones are gone. Otherwise only the decompressed shards stay.
    """
    remote = write_tokens(tmp_path / "remote", ROWS, size_limit=300, compression="zstd")
    local = tmp_path / "local"
    stream = {"remote": str(remote), "local": str(local), "keep_zip": keeps_compressed}
    expected = [10 + 8 * row for row in range(ROWS)]
    loader = loaded({"web": stream})
    assert first_tokens(loader) == expected
    del loader
    shards = [path.name for path in remote.glob("*.mds.zstd")]
    kept = [path.name for path in local.glob("*.mds.zstd")]
    assert sorted(kept) == (sorted(shards) if keeps_compressed else [])
    assert len([*local.glob("*.mds")]) == len(shards) > 4

    for path in remote.glob("*.mds.zstd"):
        path.unlink()
    if keeps_compressed:
        for path in local.glob("*.mds"):
            path.unlink()
    assert first_tokens(loaded({"web": stream})) == expected


def test_shards_that_another_process_evicts_are_closed_and_fetched_again(tmp_path: Path) -> None:
    remote = write_tokens(tmp_path / "remote", ROWS, size_limit=400)
    local = tmp_path / "local"
    loader = loaded({"web": {"remote": str(remote), "local": str(local)}})
    reading = iter(loader)
    tokens = first_tokens(islice(reading, 3))
    for shard in local.glob("*.mds"):
        shard.unlink()
    wait_until_closed(local)
    assert list_open(local) == []
    assert tokens + first_tokens(reading) == [*range(10, 10 + 8 * ROWS, 8)]


def test_shards_are_closed_after_all_were_prepared(tmp_path: Path) -> None:
    """Other processes may still evict them. A pass that is left ends its threads."""
    folder = write_tokens(tmp_path / "remote", ROWS, size_limit=400)
    local = tmp_path / "local"
    stream = {"web": {"remote": str(folder), "local": str(local)}}
    loader = loaded(stream, predownload=2 * ROWS)
    reading = iter(loader)
    next(reading)
    state = loader.dataset._iterator
    with fail_after(30):
        while state.prepare_index < state.total:
            time.sleep(0.01)
    for shard in local.glob("*.mds"):
        shard.unlink()
    wait_until_closed(local)
    assert list_open(local) == []
    assert not state.should_exit()
    dataset = weakref.ref(loader.dataset)
    del reading, loader
    with fail_after(30):
        while dataset() is not None:
            gc.collect()
            time.sleep(0.01)


def test_a_shard_that_is_replaced_by_another_version_is_refused(tmp_path: Path) -> None:
    """It was checked before, but its rows are now others."""
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    other = write_tokens(tmp_path / "other", ROWS, length=4, size_limit=300)
    shard = folder / "shard.00000.mds"
    size = shard.stat().st_size
    loader = loaded({"web": {"local": str(folder)}})

    def replace() -> None:
        os.replace(other / shard.name, shard)
        wait_until_closed(folder)

    tokens, sentence = read_on(loader, replace)
    assert tokens == [10, 18, 26, 34]
    assert f"but the stream's index states {size})" in sentence


def replace_by_other_bytes(shard: Path) -> None:
    """Replace a shard by one of the same size."""
    content = shard.read_bytes()
    other = shard.with_suffix(".other")
    other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.replace(other, shard)


def test_another_version_with_as_many_bytes_is_refused(tmp_path: Path) -> None:
    """Its rows would be read as those of the index."""
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    shard = folder / "shard.00000.mds"
    loader = loaded({"web": {"local": str(folder)}})

    def replace() -> None:
        replace_by_other_bytes(shard)
        wait_until_closed(folder)

    tokens, sentence = read_on(loader, replace)
    assert tokens == [10, 18, 26, 34]
    assert f"{shard} does not have the sha1 hash that the stream's index states" in sentence


def test_another_version_is_refused_outside_a_pass(tmp_path: Path) -> None:
    """`dataset[i]` opens the file each time."""
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    dataset = loaded({"web": {"local": str(folder)}}).dataset
    assert dataset[0].input_ids.tolist() == dataset[0].input_ids.tolist()
    assert not dataset.open_shards.files
    replace_by_other_bytes(folder / "shard.00000.mds")
    with pytest.raises(Unreachable, match=r"shard\.00000\.mds does not have the sha1 hash"):
        dataset[0]


def test_a_version_that_came_while_a_shard_was_closed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_shards, "MOST_OPEN", 1)
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    dataset = loaded({"web": {"local": str(folder)}}).dataset
    for shard_id in (0, 1):
        dataset.read_sample(shard_id, 0, is_kept_open=True)
    assert list(dataset.open_shards.files) == [1]
    replace_by_other_bytes(folder / "shard.00000.mds")
    with pytest.raises(Unreachable, match=r"shard\.00000\.mds does not have the sha1 hash"):
        dataset.read_sample(0, 0, is_kept_open=True)


def test_a_file_that_is_only_touched_is_read_on(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    loader = loaded({"web": {"local": str(folder)}})
    reading = iter(loader)
    tokens = first_tokens(islice(reading, 2))
    (file,) = loader.dataset.open_shards.files.values()
    os.utime(folder / "shard.00000.mds", ns=(1, 1))
    with fail_after(30):
        while file in [*loader.dataset.open_shards.files.values()]:
            time.sleep(0.01)
    assert tokens + first_tokens(reading) == [*range(10, 10 + 8 * ROWS, 8)]


def read_on(loader: MixLoader, damage: Any) -> tuple[list[int], str]:
    """Damage the stream after two batches. Return the first tokens of the rows before the error,
    and its message.
    """
    reading = iter(loader)
    tokens = first_tokens(islice(reading, 2))
    damage()
    with fail_after(30), pytest.raises(Unreachable) as caught:
        tokens.extend(token for batch in reading for token in first_tokens([batch]))
    return tokens, str(caught.value)


def test_a_shard_that_is_lost_or_cut_while_it_is_open_is_named(tmp_path: Path) -> None:
    """A truncated file must not kill the process, as it does if it is mapped."""
    folder = write_tokens(tmp_path / "web", ROWS, size_limit=400)
    shard = folder / "shard.00000.mds"
    whole = shard.read_bytes()
    streams = {"web": {"local": str(folder), "download_retry": 1}}
    start = f"Stream web: shard shard.00000.mds under {folder} is lost or damaged (row "

    loader = loaded(streams)
    tokens, sentence = read_on(loader, lambda: shard.write_bytes(whole[:180]))
    assert sentence.startswith(start)
    assert tokens == [10, 18, 26, 34, *tokens[4:]]
    assert len(tokens) < len(whole) // 16
    shard.write_bytes(whole)
    gc.collect()  # the error refers to the file

    def lose() -> None:
        shard.unlink()
        wait_until_closed(folder)

    tokens, sentence = read_on(loader, lose)
    assert sentence.startswith(start.replace("(row ", "("))
    assert tokens == [10, 18, 26, 34], "no further batch has rows of this shard only"


def test_a_sample_that_ends_before_it_begins_is_named(tmp_path: Path) -> None:
    """Without hashes nothing else notices that the offsets are damaged."""
    folder = write_tokens(tmp_path / "web", 4)
    shard = folder / "shard.00000.mds"
    content = bytearray(shard.read_bytes())
    content[8:12] = (5).to_bytes(4, "little")  # where sample 0 ends and sample 1 begins
    shard.write_bytes(content)
    loader = loaded({"web": {"local": str(folder)}}, validate_hash=None)
    with pytest.raises(Unreachable, match=r"row 0: .* is damaged: the sample 0 begins at byte"):
        list(loader)


def test_a_shard_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    """With as many bytes, in the same file: offsets of the old content must not be used."""
    folder = write_tokens(tmp_path / "web", 40, hashes=())
    other = write_tokens(tmp_path / "other", 40, hashes=()) / "shard.00000.mds"
    content = other.read_bytes().replace(b"\x0a\x00", b"\x0b\x00")
    loader = loaded({"web": {"local": str(folder)}}, validate_hash=None)
    reading = iter(loader)
    next(reading)
    (file,) = loader.dataset.open_shards.files.values()
    shard = folder / "shard.00000.mds"
    shard.write_bytes(content)
    os.utime(shard, ns=(1, 1))
    with fail_after(30):
        while file in [*loader.dataset.open_shards.files.values()]:
            time.sleep(0.01)
    assert len(first_tokens(reading)) == 38


LOADER_KEYS = ("num_workers", "prefetch_factor")
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"num_workers": 2, "prefetch_factor": 2},
    {"shuffle_algo": "py1s", "num_canonical_nodes": 4, "predownload": 1},
    {"batching_method": "per_stream"},
)


def open_copy(
    folders: dict[str, Path], copies: Path, weights: Any, batch: int, **keys: Any
) -> StreamingDataLoader:
    """Open a bare dataset of copies. Streaming ignores a state after the first pass of a dataset,
    so each state needs a dataset of its own.
    """
    streams = {}
    for name, folder in folders.items():
        copy = shutil.copytree(folder, copies / name)
        streams[name] = {"local": str(copy), **weights[name]}
    return open_bare(streams, batch, **keys)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_order_and_resume_are_those_of_a_bare_dataset(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """With weights, in the middle of an epoch, after numbers of batches that divide nothing."""
    weights = {"a": {"repeat": 1.5}, "b": {"repeat": 0.7}}
    folders = {n: write_tokens(tmp_path / n, 60, size_limit=300) for n in weights}
    keys: dict[str, Any] = {"shuffle": True, "shuffle_seed": 5, "shuffle_block_size": 16}
    loader_keys = {key: settings[key] for key in LOADER_KEYS if key in settings}
    dataset_keys = keys | {key: settings[key] for key in settings if key not in LOADER_KEYS}
    streams = {n: {"local": str(folders[n]), **weights[n]} for n in weights}
    loader = loaded(streams, 4, **keys, **settings)
    state: dict[str, Any] = {}
    for number, count in enumerate((7, 11, 3, None)):
        bare = open_copy(folders, tmp_path / str(number), weights, 4, **dataset_keys)
        for key, value in loader_keys.items():
            setattr(bare, key, value)
        if state:
            bare.load_state_dict({key: state[key] for key in state if key != LOCK_KEY})
        assert first_tokens(islice(loader, count)) == rows_of(islice(bare, count)) != []
        if count:
            state = json.loads(json.dumps(loader.state_dict()))
            assert state | bare.state_dict() == state
            loader.load_state_dict(state)


RANKS = """
import json, sys
from itertools import islice
from torch.distributed import init_process_group
from mdsmix.load import build_loader
from tests.with_torch.load_streams import IDS, first_tokens
from tests.with_torch.test_load_open_shards import open_bare, rows_of
tree, copies, keys = json.loads(sys.argv[1])
init_process_group("gloo")  # otherwise Streaming opens one for each bare dataset, which may fail
loader = build_loader(tree, 4, ids=IDS)
for count, copy in ((5, copies[0]), (None, copies[1])):
    bare = open_bare({"a": {"local": copy}}, 4, **keys)
    if not count:
        state = {"epoch": 0, "sample_in_epoch": 40, "num_canonical_nodes": 1, "shuffle_seed": 2}
        loader.load_state_dict(state | {"initial_physical_nodes": 1})
        bare.load_state_dict(state | {"initial_physical_nodes": 1})
    ours, theirs = first_tokens(islice(loader, count)), rows_of(islice(bare, count))
    assert ours == theirs != [], (ours, theirs)
print(json.dumps(ours))
"""


def test_ranks_read_what_bare_datasets_of_ranks_do(
    tmp_path: Path, programs: PreloadedPython
) -> None:
    folder = write_tokens(tmp_path / "a", ROWS, size_limit=300)
    copies = [str(shutil.copytree(folder, tmp_path / name)) for name in ("first", "second")]
    keys: dict[str, Any] = {"shuffle": True, "shuffle_seed": 2}
    tree = config({"a": {"local": str(folder)}}, "text", drop_last=False, **keys)
    results = run_ranks(programs, RANKS, json.dumps([tree, copies, keys]))
    rest = [json.loads(result.stdout) for result in results]
    assert len({*rest[0], *rest[1]}) == len(rest[0]) + len(rest[1]) == ROWS - 2 * 5 * 4


WORKERS_OF_RANKS = """
import json, sys
from mdsmix.load import build_loader
from tests.with_torch.load_streams import IDS, first_tokens
loader = build_loader(json.loads(sys.argv[1]), 2, ids=IDS)
print(json.dumps(first_tokens(loader)))
loader.end()
"""


def test_workers_of_ranks_read_each_sample_once(tmp_path: Path, programs: PreloadedPython) -> None:
    """Each of the two ranks has two workers, and all share the folder of the stream."""
    folder = write_tokens(tmp_path / "a", 48, size_limit=300)
    keys: dict[str, Any] = {"shuffle": True, "num_workers": 2, "drop_last": False}
    tree = config({"a": {"local": str(folder)}}, "text", **keys)
    results = run_ranks(programs, WORKERS_OF_RANKS, json.dumps(tree))
    first, second = (json.loads(result.stdout) for result in results)
    assert len(first) == len(second) == 24
    assert sorted(first + second) == [10 + 8 * row for row in range(48)]
