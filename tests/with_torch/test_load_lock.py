"""A state goes on with the data that it was counted on; on other data it is refused, or goes on
with a warning if that is accepted.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming.base.world import World

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load import MixLoader, build_loader
from mdsmix.load.dataset import LOCK_KEY
from tests.with_torch.load_streams import IDS, config, first_tokens, write_stream

STEPS = 9
pytestmark = pytest.mark.usefixtures("_release_loaders")


def publish(folder: Path, rows: Sequence[int] = range(10, 110)) -> dict[str, Any]:
    """A stream of eight tokens a row, the first of which tells rows apart; shards of 12
    rows or so.
    """
    samples = [{"tokens": np.full(8, row, np.int32)} for row in rows]
    columns = {"tokens": "ndarray:int32:8"}
    return {"local": str(write_stream(folder, columns, samples, size_limit=640, hashes=["xxh64"]))}


def opened(mixed: dict[str, Any], batch: int = 8, **settings: Any) -> MixLoader:
    accept = settings.pop("accept_changed", False)
    plain = {"shuffle": True, "shuffle_block_size": 50, "drop_last": False, "num_workers": 0}
    gc.collect()  # the folders of a loader that is gone are free again
    section = config(mixed, "mdsmix", **(plain | settings))
    return build_loader(section, batch, ids=IDS, accept_changed=accept)


def rows(batches: Any) -> Counter[int]:
    return Counter(first_tokens(batches))


def stopped(mixed: dict[str, Any]) -> tuple[Counter[int], dict[str, Any]]:
    """What a run has seen when it stops, and its state as a checkpoint keeps it."""
    loader = opened(mixed)
    seen = rows(islice(loader, STEPS))
    return seen, json.loads(json.dumps(loader.state_dict()))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two streams, and the state of a run that has stopped in them."""
    folder = tmp_path_factory.mktemp("two")
    mixed = {"a": publish(folder / "a"), "b": publish(folder / "b", range(200, 240))}
    return mixed, stopped(mixed)[1]


ONE_MORE = [*range(10, 60), 150, *range(60, 110)]
SHARDS_TURNED = [*range(22, 34), *range(10, 22), *range(34, 110)]
CHANGES: tuple[tuple[dict[str, Sequence[int]], dict[str, Any], str], ...] = (
    # Other streams, other settings. What all settings come to: tests/test_mix_lock.py.
    ({"a": ONE_MORE}, {}, r"a was 100 samples an epoch of 100 in shards \w{8} and is "),
    ({"a": SHARDS_TURNED}, {}, "a was 100 samples"),
    ({"b": []}, {}, "b was 40 samples .* and is not in the mix"),
    ({"c": range(300, 330)}, {}, "c was not in the mix and is 30 samples"),
    ({}, {"shuffle_block_size": 20}, "shuffle_block_size was 50 and is 20"),
    ({}, {"batch": 4}, "batch was 8 and is 4"),
    ({}, {"num_canonical_nodes": 2}, "num_canonical_nodes was 1 and is 2"),
)


def test_what_changed_is_refused_or_accepted(two: Any, tmp_path: Path, caplog: Any) -> None:
    streams, state = two
    for number, (others, settings, sentence) in enumerate(CHANGES):
        made = {n: publish(tmp_path / str(number), of) for n, of in others.items() if of}
        mixed = {n: at for n, at in (streams | made).items() if others.get(n, True)}
        loader = opened(mixed, **settings)
        with pytest.raises(MixRefused, match=f"{sentence}.*accept_changed: true"):
            loader.load_state_dict(state)
        caplog.clear()
        loader.dataset.accept_changed = True
        loader.load_state_dict(state)
        told = "accept_changed: the checkpoint was written on other data: .*"
        assert re.search(told + sentence, caplog.text), sentence
        del loader
    accepting = opened(streams | {"b": streams["b"] | {"repeat": 3}}, accept_changed=True)
    accepting.load_state_dict(state)
    assert "b was 40 samples" in caplog.text
    assert rows(accepting).total() == 100 + 3 * 40 - 8 * STEPS


def test_a_state_without_a_lock_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mixed = {"a": publish(tmp_path / "a")}
    seen, state = stopped(mixed)
    del state[LOCK_KEY]
    resumed = opened(mixed)
    resumed.load_state_dict(state)
    assert "contains no lock of its data" in caplog.text
    assert seen + rows(resumed) == Counter(range(10, 110))


def test_what_is_no_state_is_one_sentence(two: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A whole checkpoint, in which the loader's state is one part; a field or a lock that
    is none.
    """
    loader, (_, state) = opened(two[0]), two
    for given, word in (
        ({"model": {}, "loader": state}, "epoch"),
        (state | {"sample_in_epoch": "8"}, "sample_in_epoch"),
        (state | {"shuffle_seed": None}, "shuffle_seed"),
    ):
        sentence = f"is not a state of a loader: {word} is .*state_dict\\(\\)"
        with pytest.raises(RecipeError, match=sentence):
            loader.load_state_dict(given)
    for lock in ("{", 5):
        loader.dataset.accept_changed = False
        with pytest.raises(RecipeError, match="the lock in the checkpoint is not a lock of a mix"):
            loader.load_state_dict(state | {LOCK_KEY: lock})
        caplog.clear()
        loader.dataset.accept_changed = True
        loader.load_state_dict(state | {LOCK_KEY: lock})
        assert "the lock in the checkpoint" in caplog.text


def test_the_same_data_goes_on_from_more_streams_than_a_state_has_room_for(tmp_path: Path) -> None:
    """They have moved, and a weight and a seed are written in another way."""
    mixed = {f"s{n}": publish(tmp_path / f"s{n}", range(10 * n, 10 * n + 10)) for n in range(1, 51)}
    mixed["s1"] |= {"repeat": 2}
    seen, state = stopped(mixed)
    assert len(state[LOCK_KEY]) > 4096, "the room that Streaming has"
    for name, stream in mixed.items():
        stream["local"] = str(Path(stream["local"]).rename(tmp_path / f"moved-{name}"))
    mixed["s1"] |= {"repeat": 2.0}
    resumed = opened(mixed, shuffle_seed=9176)
    resumed.load_state_dict(state)
    assert seen + rows(resumed) == Counter([*range(10, 510), *range(10, 20)])


def test_composers_counts_give_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a lock's batch is that of all ranks."""
    mixed = {"a": publish(tmp_path / "a")}
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
    mixed = {"a": publish(tmp_path / "a")}
    loader = opened(mixed)
    assert loader.dataset.state_dict(0, True)["epoch"] == -1, "nothing was read"
    first, second = (first_tokens(loader) for _ in range(2))
    assert first != second
    del loader
    loader = opened(mixed)
    assert first_tokens(loader) == first
    state = loader.dataset.state_dict(0, True)
    del loader
    resumed = opened(mixed)
    resumed.load_state_dict(state)
    assert resumed.dataset.state_dict(0, True) == state, "saved again before a row is read"
    assert first_tokens(resumed) == second


def test_other_devices_are_refused_where_they_divide_an_epoch_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same batch of all devices together. What is exact by Streaming's own layout:
    test_load_worlds.py.
    """
    mixed = {"a": publish(tmp_path / "a"), "b": publish(tmp_path / "b", range(200, 240))}

    def on(world: World, batch: int, method: str) -> MixLoader:
        loader = opened(mixed, batch, batching_method=method)
        loader.dataset._parallel_rank_world = world
        monkeypatch.setattr(World, "detect", lambda: world)
        return loader

    two, four, apart = World(1, 2, 1, 0), World(1, 4, 1, 0), World(2, 1, 1, 0)
    for method in ("random", "stratified", "per_stream", "device_per_stream"):
        state = on(two, 8, method).dataset.state_dict(32, True)
        on(two, 8, method).load_state_dict(state)
        for world, batch, now in (
            (four, 4, "1 node of 4 devices"),
            (apart, 8, "2 nodes of 1 device"),
        ):
            loader = on(world, batch, method)
            if method == "random":
                loader.load_state_dict(state)
                continue
            loader.load_state_dict(state | {"sample_in_epoch": 0})
            told = f"written on 1 node of 2 devices with batches of 8 samples, and this run has {now} .*batching_method: {method}.*Fix"
            with pytest.raises(MixRefused, match=told):
                loader.load_state_dict(state)
            earlier = json.loads(state[LOCK_KEY])
            del earlier["settings"]["devices"]
            caplog.clear()
            if world is apart:
                with pytest.raises(MixRefused, match="written on 1 node, and this run has 2 nodes"):
                    loader.load_state_dict(state | {LOCK_KEY: json.dumps(earlier)})
            else:
                loader.load_state_dict(state | {LOCK_KEY: json.dumps(earlier)})
                assert "a resume is exact only on the same devices" in caplog.text
            loader.dataset.accept_changed = True
            loader.load_state_dict(state)
            assert (
                f"accept_changed: the checkpoint was written on 1 node of 2 devices with batches of 8 samples, and this run has {now}"
                in caplog.text
            )
