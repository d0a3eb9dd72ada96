"""A state goes on with the data that it was counted on; on other data it is refused, or goes on with a warning if that is accepted."""

import gc
import json
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.world import World

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load import MixLoader, build_loader
from mdsmix.load.dataset import KEY
from tests.with_torch.load_streams import IDS, config, write_stream

BATCH, STEPS = 8, 9
pytestmark = pytest.mark.usefixtures("_release_loaders")


def publish(folder: Path, rows: range | list[int], **settings: Any) -> dict[str, Any]:
    """A stream of eight tokens a row, the first of which tells rows apart; shards of 12 rows or so. What was there is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    samples = [{"tokens": np.full(8, row, np.int32)} for row in rows]
    how = {"shard_bytes": 640, "hashes": ("xxh64",)} | settings
    write_stream(folder, {"tokens": "ndarray:int32:8"}, samples, **how)
    return {"local": str(folder)}


def opened(mixed: dict[str, Any], batch: int = BATCH, **settings: Any) -> MixLoader:
    accept = settings.pop("accept_changed", False)
    plain = {"shuffle": True, "shuffle_block_size": 50, "drop_last": False, "num_workers": 0}
    section = config(mixed, "mdsmix", **(plain | settings))
    gc.collect()  # the folders of a loader that is gone are free again
    return build_loader(section, batch, ids=IDS, accept_changed=accept)


def rows(batches: Any) -> Counter[int]:
    return Counter(row for batch in batches for row in batch["input_ids"][:, 0].tolist())


def stopped(mixed: dict[str, Any], **settings: Any) -> tuple[Counter[int], dict[str, Any]]:
    """What a run has seen when it stops, and its state as a checkpoint keeps it."""
    loader = opened(mixed, **settings)
    seen = rows(islice(loader, STEPS))
    return seen, json.loads(json.dumps(loader.state_dict()))


def test_accepted_changes_go_on_as_streaming_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard of ten is another: Streaming repeats rows and leaves others out without a word."""
    web, keys = tmp_path / "web", {"shuffle": True, "batch_size": 8, "shuffle_seed": 9176}
    mixed = {"web": publish(web, range(400), shard_bytes=2000)}
    ours = opened(mixed, shuffle_block_size=None)
    seen, state = rows(islice(ours, 20)), json.loads(json.dumps(ours.state_dict()))
    del ours

    now = [*range(40), *range(80, 410)]
    publish(web, now, shard_bytes=2000)
    bare = StreamingDataLoader(StreamingDataset(local=str(web), **keys), batch_size=8)
    bare.load_state_dict({key: value for key, value in state.items() if key != KEY})
    after = {row for batch in bare for row in batch["tokens"][:, 0].tolist()}
    assert min(len(seen.keys() & after), len({*now} - seen.keys() - after)) > 20
    del bare

    resumed = opened(mixed, shuffle_block_size=None)
    told = r"web was 400 samples an epoch of 400 in shards \w{8} and is .*accept_changed: true"
    with pytest.raises(MixRefused, match=told):
        resumed.load_state_dict(state)
    resumed.dataset.accept_changed = True
    resumed.load_state_dict(state)
    assert "accept_changed: the checkpoint was written on other data: web was 400" in caplog.text
    assert rows(resumed).keys() == after


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two streams, and the state of a run that has stopped in them."""
    folder = tmp_path_factory.mktemp("two")
    mixed = {
        "a": publish(folder / "a", range(10, 110)),
        "b": publish(folder / "b", range(200, 240)),
    }
    return mixed, stopped(mixed)[1]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a row more": ({"a": [*range(10, 60), 150, *range(60, 110)]}, "a was 100 samples"),
    "other shards first": (
        {"a": [*range(22, 34), *range(10, 22), *range(34, 110)]},
        "a was 100 samples",
    ),
    "a weight": ({"repeat": 2}, "b was 40 samples"),
    "a seed": ({"shuffle_seed": 5}, "shuffle_seed was 9176 and is 5"),
    "a block": ({"shuffle_block_size": 20}, "shuffle_block_size was 50 and is 20"),
    "an order": ({"shuffle": False}, "shuffle was true and is false"),
    "a batch": ({"batch": 4}, "batch was 8 and is 4"),
    "canonical nodes": ({"num_canonical_nodes": 2}, "num_canonical_nodes was 1 and is 2"),
    "a length": ({"max_seq_len": 6}, "max_seq_len was 8 and is 6"),
    "targets": ({"target_responses": "all"}, "target_responses was last and is all"),
    "packing": ({"packing_ratio": 2}, "packing_ratio was null and is 2"),
    "a stream less": ({"without": "b"}, "and is not in the mix"),
    "a stream more": ({"with": "c"}, "c was not in the mix and is 30 samples"),
}


def test_what_changed_is_told_refused_and_gone_on_with_where_it_is_accepted(
    two: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, (changes, sentence) in CHANGES.items():
        change, mixed, state = dict(changes), dict(two[0]), two[1]
        if "a" in change:
            mixed["a"] = publish(tmp_path / name, change.pop("a"))
        if change.pop("with", None):
            mixed["c"] = publish(tmp_path / "c", range(300, 330))
        mixed.pop(change.pop("without", ""), None)
        if repeat := change.pop("repeat", None):
            mixed["b"] = mixed["b"] | {"repeat": repeat}
        loader = opened(mixed, **change)
        with pytest.raises(MixRefused, match=sentence):
            loader.load_state_dict(state)
        caplog.clear()
        loader.dataset.accept_changed = True
        loader.load_state_dict(state)
        assert sentence in caplog.text, name
        del loader
    accepting = opened(two[0] | {"b": two[0]["b"] | {"repeat": 3}}, accept_changed=True)
    accepting.load_state_dict(two[1])
    assert next(iter(accepting))


def test_a_state_without_a_lock_goes_on_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110))}
    seen, state = stopped(mixed)
    del state[KEY]
    resumed = opened(mixed)
    resumed.load_state_dict(state)
    assert "holds no lock of its data" in caplog.text
    assert seen + rows(resumed) == Counter(range(10, 110))


LOCKS: dict[Any, str] = {
    '{"version": 4}': "was written by a newer mdsmix .version 4, and this one reads 3.",
    "{": "is no lock of a mix: ",
    '{"version": 3, "streams": [{"name": "a", "drawn": 1, "samples": 1, "shards": "x"}]}': "shards is .x.; it must be a hash",
    "[]": "is no lock of a mix",
    5: "is no lock of a mix",
}


def test_what_is_no_state_of_a_loader_is_one_sentence(
    two: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A whole checkpoint, in which the loader's state is one part; a field or a lock that is none."""
    loader, (_, state) = opened(two[0]), two
    for given, word in (
        ({"model": {}, "loader": state}, "epoch"),
        (state | {"sample_in_epoch": "8"}, "sample_in_epoch"),
        (state | {"shuffle_seed": None}, "shuffle_seed"),
    ):
        sentence = f"no state of a loader: {word} is .*state_dict\\(\\)"
        with pytest.raises(RecipeError, match=sentence):
            loader.load_state_dict(given)
    for lock, sentence in LOCKS.items():
        loader.dataset.accept_changed = False
        with pytest.raises(RecipeError, match=sentence) as told:
            loader.load_state_dict(state | {KEY: lock})
        assert "the lock in the checkpoint" in str(told.value)
        caplog.clear()
        loader.dataset.accept_changed = True
        loader.load_state_dict(state | {KEY: lock})
        assert "the lock in the checkpoint" in caplog.text
    loader.load_state_dict(state)


def test_the_same_data_goes_on_where_it_was_from_more_streams_than_a_state_has_room_for(
    tmp_path: Path,
) -> None:
    """They have moved, and a weight and a seed are written in another way."""
    mixed = {f"s{n}": publish(tmp_path / f"s{n}", range(10 * n, 10 * n + 10)) for n in range(1, 51)}
    mixed["s1"] |= {"repeat": 2}
    seen, state = stopped(mixed)
    assert len(state[KEY]) > 4096, "the room that Streaming has"
    moved = {
        name: stream | {"local": str(Path(stream["local"]).rename(tmp_path / f"moved-{name}"))}
        for name, stream in mixed.items()
    }
    moved["s1"] |= {"repeat": 2.0}
    resumed = opened(moved, shuffle_seed=9176)
    resumed.load_state_dict(state)
    assert seen + rows(resumed) == Counter([*range(10, 510), *range(10, 20)])


def test_counting_as_composer_does_gives_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a lock's batch is that of all ranks."""
    mixed = {"a": publish(tmp_path / "a", range(10, 110))}
    for settings in ({}, {"packing_ratio": 1.5, "max_seq_len": 16}):
        loader = opened(mixed, **settings)
        dataset = loader.dataset
        trained = sum(len(batch["input_ids"]) for batch in islice(loader, STEPS - 3))
        state = loader.state_dict()
        assert dataset.state_dict(trained, True) == state
        dataset.replication = 2
        assert dataset.state_dict(2 * trained, True) == state, "two devices share each row"
        del loader
    batch = dataset.lock.settings["batch"]
    monkeypatch.setattr(World, "detect", lambda: World(2, 2, 1, 0))
    del dataset.lock
    assert dataset.lock.settings["batch"] == 2 * batch, "of four ranks, of which two share a row"


def test_an_epoch_that_composer_has_ended_is_not_begun_again(tmp_path: Path) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110))}
    loader = opened(mixed)
    assert loader.dataset.state_dict(0, True)["epoch"] == -1, "nothing was read"
    first, second = ([batch["input_ids"][0, 0].item() for batch in loader] for _ in range(2))
    assert first != second
    del loader
    loader = opened(mixed)
    assert [batch["input_ids"][0, 0].item() for batch in loader] == first
    state = loader.dataset.state_dict(0, True)
    del loader
    resumed = opened(mixed)
    resumed.load_state_dict(state)
    assert resumed.dataset.state_dict(0, True) == state, "saved again before a row is read"
    assert [batch["input_ids"][0, 0].item() for batch in resumed] == second
