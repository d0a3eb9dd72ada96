"""The lock in a loader's state: a run resumes with the data that the state was counted on. On other
data it is refused, or resumes with a warning if `accept_changed` is set.
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
    """Write a stream of eight equal tokens a row, in shards of about 12 rows.

    Args:
        rows: the token of each row.
    """
    samples = [{"tokens": np.full(8, row, np.int32)} for row in rows]
    columns = {"tokens": "ndarray:int32:8"}
    return {"local": str(write_stream(folder, columns, samples, size_limit=640, hashes=["xxh64"]))}


def opened(mixed: dict[str, Any], batch: int = 8, **settings: Any) -> MixLoader:
    accept = settings.pop("accept_changed", False)
    plain = {"shuffle": True, "shuffle_block_size": 50, "drop_last": False, "num_workers": 0}
    gc.collect()  # the folders of a deleted loader are free again
    section = config(mixed, "mdsmix", **(plain | settings))
    return build_loader(section, batch, ids=IDS, accept_changed=accept)


def rows(batches: Any) -> Counter[int]:
    return Counter(first_tokens(batches))


def read_and_stop(mixed: dict[str, Any]) -> tuple[Counter[int], dict[str, Any]]:
    """Read some steps, and return their rows and the state as a checkpoint stores it."""
    loader = opened(mixed)
    rows_before = rows(islice(loader, STEPS))
    return rows_before, json.loads(json.dumps(loader.state_dict()))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two streams, and the state of a run that has read some of their rows."""
    folder = tmp_path_factory.mktemp("two")
    mixed = {"a": publish(folder / "a"), "b": publish(folder / "b", range(200, 240))}
    return mixed, read_and_stop(mixed)[1]


ONE_MORE = [*range(10, 60), 150, *range(60, 110)]
SHARDS_SWAPPED = [*range(22, 34), *range(10, 22), *range(34, 110)]
CHANGES: tuple[tuple[dict[str, Sequence[int]], dict[str, Any], str], ...] = (
    # Other streams, other settings, the message. For all settings see tests/test_mix_lock.py.
    ({"a": ONE_MORE}, {}, r"a was 100 samples an epoch of 100 in shards \w{8} and is "),
    ({"a": SHARDS_SWAPPED}, {}, "a was 100 samples"),
    ({"b": []}, {}, "b was 40 samples .* and is not in the mix"),
    ({"c": range(300, 330)}, {}, "c was not in the mix and is 30 samples"),
    ({}, {"shuffle_block_size": 20}, "shuffle_block_size was 50 and is 20"),
    ({}, {"batch": 4}, "batch was 8 and is 4"),
    ({}, {"num_canonical_nodes": 2}, "num_canonical_nodes was 1 and is 2"),
)


def test_changed_data_is_refused_or_accepted_with_a_warning(
    two: Any, tmp_path: Path, caplog: Any
) -> None:
    streams, state = two
    for number, (changed, settings, sentence) in enumerate(CHANGES):
        mixed = dict(streams)
        for name, tokens in changed.items():
            mixed.pop(name, None)
            if tokens:
                mixed[name] = publish(tmp_path / str(number), tokens)
        mixed = {name: mixed[name] for name in sorted(mixed)}
        loader = opened(mixed, **settings)
        with pytest.raises(MixRefused, match=f"{sentence}.*accept_changed: true"):
            loader.load_state_dict(state)
        caplog.clear()
        loader.dataset.accept_changed = True
        loader.load_state_dict(state)
        warning = "accept_changed: the checkpoint was written on other data: .*"
        assert re.search(warning + sentence, caplog.text), sentence
        del loader
    accepting = opened(streams | {"b": streams["b"] | {"repeat": 3}}, accept_changed=True)
    accepting.load_state_dict(state)
    assert "b was 40 samples" in caplog.text
    assert rows(accepting).total() == 100 + 3 * 40 - 8 * STEPS


def test_a_state_without_a_lock_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = {"a": publish(tmp_path / "a")}
    rows_before, state = read_and_stop(mixed)
    del state[LOCK_KEY]
    resumed = opened(mixed)
    resumed.load_state_dict(state)
    assert "contains no lock of its data" in caplog.text
    assert rows_before + rows(resumed) == Counter(range(10, 110))


def test_a_wrong_state_is_refused_in_one_sentence(
    two: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole checkpoint that contains the state; a state with a wrong field or a wrong lock."""
    streams, state = two
    loader = opened(streams)
    for wrong_state, key in (
        ({"model": {}, "loader": state}, "epoch"),
        (state | {"sample_in_epoch": "8"}, "sample_in_epoch"),
        (state | {"shuffle_seed": None}, "shuffle_seed"),
        (state | {"sample_in_epoch": -8}, "sample_in_epoch"),
        (state | {"num_canonical_nodes": 0}, "num_canonical_nodes"),
    ):
        sentence = f"is not a state of a loader: {key} is .*state_dict\\(\\)"
        with pytest.raises(RecipeError, match=sentence):
            loader.load_state_dict(wrong_state)
    loader.load_state_dict(state | {"note": "a key of somebody else " * 300})
    assert loader.state_dict() == state
    for lock in ("{", 5):
        loader.dataset.accept_changed = False
        with pytest.raises(
            RecipeError, match="the lock in the checkpoint cannot be read as a lock"
        ):
            loader.load_state_dict(state | {LOCK_KEY: lock})
        caplog.clear()
        loader.dataset.accept_changed = True
        loader.load_state_dict(state | {LOCK_KEY: lock})
        assert "the lock in the checkpoint" in caplog.text


def test_a_lock_of_many_streams_is_longer_than_a_state_of_streaming_and_accepted(
    tmp_path: Path,
) -> None:
    """The streams were moved, and a weight and a seed are written in another way."""
    mixed = {f"s{n}": publish(tmp_path / f"s{n}", range(10 * n, 10 * n + 10)) for n in range(1, 51)}
    mixed["s1"] |= {"repeat": 2}
    rows_before, state = read_and_stop(mixed)
    assert len(state[LOCK_KEY]) > 4096, "the limit of a state in Streaming"
    for name, stream in mixed.items():
        stream["local"] = str(Path(stream["local"]).rename(tmp_path / f"moved-{name}"))
    mixed["s1"] |= {"repeat": 2.0}
    resumed = opened(mixed, shuffle_seed=9176)
    resumed.load_state_dict(state)
    assert rows_before + rows(resumed) == Counter([*range(10, 510), *range(10, 20)])


def test_a_state_made_from_composers_counts_is_that_of_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch in a lock is that of all ranks together."""
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
    assert dataset.lock.settings["batch"] == 2 * batch, "four ranks, two of which share each row"


def test_an_epoch_that_composer_has_ended_is_not_repeated(tmp_path: Path) -> None:
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


def test_other_devices_are_refused_if_they_divide_an_epoch_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All devices together have the same batch. Which methods are exact by Streaming's own layout
    is tested in test_load_worlds.py.
    """
    mixed = {"a": publish(tmp_path / "a"), "b": publish(tmp_path / "b", range(200, 240))}

    def on(world: World, batch: int, method: str) -> MixLoader:
        loader = opened(mixed, batch, batching_method=method)
        loader.dataset._parallel_rank_world = world
        monkeypatch.setattr(World, "detect", lambda: world)
        return loader

    two_devices = World(1, 2, 1, 0)
    four_devices = World(1, 4, 1, 0)
    two_nodes = World(2, 1, 1, 0)
    for method in ("random", "stratified", "per_stream", "device_per_stream"):
        state = on(two_devices, 8, method).dataset.state_dict(32, True)
        on(two_devices, 8, method).load_state_dict(state)
        for world, batch, devices in (
            (four_devices, 4, "1 node of 4 devices"),
            (two_nodes, 8, "2 nodes of 1 device"),
        ):
            loader = on(world, batch, method)
            if method == "random":
                loader.load_state_dict(state)
                continue
            loader.load_state_dict(state | {"sample_in_epoch": 0})
            change = (
                "written on 1 node of 2 devices with batches of 8 samples, but this run has "
                f"{devices}"
            )
            message = f"{change} .*batching_method: {method}.*Fix"
            with pytest.raises(MixRefused, match=message):
                loader.load_state_dict(state)
            earlier = json.loads(state[LOCK_KEY])
            del earlier["settings"]["devices"]
            caplog.clear()
            if world is two_nodes:
                with pytest.raises(MixRefused, match="written on 1 node, but this run has 2 nodes"):
                    loader.load_state_dict(state | {LOCK_KEY: json.dumps(earlier)})
            else:
                loader.load_state_dict(state | {LOCK_KEY: json.dumps(earlier)})
                assert "a resume is exact only on the same devices" in caplog.text
            loader.dataset.accept_changed = True
            loader.load_state_dict(state)
            assert f"accept_changed: the checkpoint was {change}" in caplog.text
