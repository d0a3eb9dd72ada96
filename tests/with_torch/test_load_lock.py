"""A state goes on with the data that it was counted on; on other data it is refused, or goes on with a warning if that is accepted."""

from __future__ import annotations

import gc
import json
import logging
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
from mdsmix.shards.index import read_index
from mdsmix.shards.shard_samples import read_head
from mdsmix.storage import locate
from tests.converting import documents, mdsmix, write_jsonl, write_recipe
from tests.with_torch.load_streams import IDS, config, write_stream

BATCH, STEPS = 8, 9
PLAIN: dict[str, Any] = {
    "shuffle": True,
    "shuffle_block_size": 50,
    "drop_last": False,
    "num_workers": 0,
}


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
    section = config(mixed, "mdsmix", **(PLAIN | settings))
    return build_loader(section, batch, ids=IDS, accept_changed=accept)


def rows(batches: Any) -> Counter[int]:
    return Counter(row for batch in batches for row in batch["input_ids"][:, 0].tolist())


def stopped(mixed: dict[str, Any], **settings: Any) -> tuple[Counter[int], dict[str, Any]]:
    """What a run has seen when it stops, and its state as a checkpoint keeps it."""
    loader = opened(mixed, **settings)
    seen = rows(islice(loader, STEPS))
    return seen, json.loads(json.dumps(loader.state_dict()))


def test_a_checkpoint_on_republished_data_repeats_rows_with_streaming_and_is_refused_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The case of 4,000 rows: 274 of them twice and 274 never, without a word."""
    web, before = tmp_path / "web", list(range(4000))
    seen, state = set[int](), {}
    shuffled = {"shuffle": True, "batch_size": 8, "shuffle_seed": 9176}
    publish(web, before, shard_bytes=4000)
    bare = StreamingDataLoader(StreamingDataset(local=str(web), **shuffled), batch_size=8)
    for batch in islice(bare, 40):
        seen |= set(batch["tokens"][:, 0].tolist())
    state = bare.state_dict()
    ours = opened({"web": {"local": str(web)}}, shuffle_block_size=None)
    assert rows(islice(ours, 40)).keys() == seen
    locked = ours.state_dict()
    del bare, ours
    gc.collect()

    # One shard of forty is another: its rows are gone, and there are 90 new ones.
    replaced = sorted(by_shard(web).values())[10]
    now = [row for row in before if row not in replaced] + list(range(4000, 4090))
    publish(web, now, shard_bytes=4000)
    bare = StreamingDataLoader(StreamingDataset(local=str(web), **shuffled), batch_size=8)
    bare.load_state_dict(state)
    after = {row for batch in bare for row in batch["tokens"][:, 0].tolist()}
    kept = set(now) - set(range(3900, 4090))
    twice, never = len(seen & after & kept), len(kept - seen - after)
    assert min(twice, never) > 200, "Streaming says nothing"
    del bare
    gc.collect()

    mixed = {"web": {"local": str(web)}}
    with pytest.raises(
        MixRefused, match=r"web was 4,000 samples an epoch of 4,000 in shards \w{8} and is "
    ) as told:
        opened(mixed, shuffle_block_size=None).load_state_dict(locked)
    assert "accept_changed: true" in str(told.value)
    gc.collect()
    resumed = opened(mixed, shuffle_block_size=None, accept_changed=True)
    resumed.load_state_dict(locked)
    assert "accept_changed: the checkpoint was written on other data: web was 4,000" in caplog.text
    assert set(rows(resumed)) == after, "it goes on as Streaming does"


def test_the_same_data_goes_on_where_it_was(tmp_path: Path) -> None:
    mixed = {
        "a": publish(tmp_path / "a", range(10, 110)),
        "b": publish(tmp_path / "b", range(200, 240)) | {"repeat": 2},
    }
    seen, state = stopped(mixed)
    again = {
        name: section | {"local": f"{section['local']}-moved"} for name, section in mixed.items()
    }
    for name in mixed:
        Path(mixed[name]["local"]).rename(again[name]["local"])
    resumed = opened(again | {"b": again["b"] | {"repeat": 2.0}}, shuffle_seed=9176)
    resumed.load_state_dict(state)
    whole = Counter(range(10, 110)) + Counter(dict.fromkeys(range(200, 240), 2))
    assert seen + rows(resumed) == whole


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
    "a row more": (
        {"a": [*range(10, 60), 150, *range(60, 110)]},
        "a was 100 samples an epoch of 100 in shards ",
    ),
    "a row at the end": ({"a": range(10, 111)}, "a was 100 samples"),
    "shards in another order": (
        {"a": [*range(22, 34), *range(10, 22), *range(34, 110)]},
        "a was 100 samples",
    ),
    "a weight": ({"repeat": 2}, "b was 40 samples an epoch of 40 in shards "),
    "a smaller weight": ({"repeat": 0.5}, "b was 40 samples an epoch of 40 in shards "),
    "a seed": ({"shuffle_seed": 5}, "shuffle_seed was 9176 and is 5"),
    "a block": ({"shuffle_block_size": 20}, "shuffle_block_size was 50 and is 20"),
    "an order": ({"shuffle": False}, "shuffle was true and is false"),
    "a batch": ({"batch": 4}, "batch was 8 and is 4"),
    "canonical nodes": ({"num_canonical_nodes": 2}, "num_canonical_nodes was 1 and is 2"),
    "a length": ({"max_seq_len": 6}, "max_seq_len was 8 and is 6"),
    "targets": ({"target_responses": "all"}, "target_responses was last and is all"),
    "packing": ({"packing_ratio": 2}, "packing_ratio was null and is 2"),
    "a stream less": (
        {"without": "b"},
        "and is not in the mix",
    ),
    "a stream more": ({"with": "c"}, "c was not in the mix and is 30 samples"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_told_refused_and_gone_on_with_where_it_is_accepted(
    name: str, two: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, sentence = dict(CHANGES[name][0]), CHANGES[name][1]
    mixed, state = dict(two[0]), two[1]
    if "a" in change:
        mixed["a"] = publish(tmp_path / "a", change.pop("a"))
    if change.pop("with", None):
        mixed["c"] = publish(tmp_path / "c", range(300, 330))
    mixed.pop(change.pop("without", ""), None)
    if repeat := change.pop("repeat", None):
        mixed["b"] = mixed["b"] | {"repeat": repeat}
    with pytest.raises(MixRefused, match=sentence):
        opened(mixed, **change).load_state_dict(state)
    gc.collect()

    resumed = opened(mixed, **change, accept_changed=True)
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state)
    assert sentence in caplog.text
    assert next(iter(resumed))


def by_shard(folder: Path) -> dict[str, list[int]]:
    """Hash of a shard -> the rows in it."""
    place = locate(str(folder))
    return {
        shard.raw_data.hashes["xxh64"]: [
            int(s["tokens"][0]) for s in read_head(place, shard, shard.samples)
        ]
        for shard in read_index(place).shards
    }


def test_a_shard_without_hashes_is_known_by_its_name_and_size(tmp_path: Path) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110), hashes=())}
    _, state = stopped(mixed)
    publish(tmp_path / "a", range(10, 111), hashes=())
    with pytest.raises(MixRefused, match="a was "):
        opened(mixed).load_state_dict(state)


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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"version": 4}', "was written by a newer mdsmix .version 4, and this one reads 3."),
        ("{", "is no lock of a mix: it is no JSON|is no lock of a mix: "),
        (
            '{"version": 3, "streams": [{"name": "a", "drawn": 1, "samples": 1, "shards": "x"}]}',
            "shards is .x.; it must be a hash",
        ),
        ("[]", "is no lock of a mix"),
        ('{"version": "1", "streams": []}', "version is '1'"),
    ],
)
def test_a_lock_that_cannot_be_read_is_one_sentence(
    text: str, sentence: str, two: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    mixed, state = two[0], two[1] | {KEY: text}
    with pytest.raises(RecipeError, match=sentence) as told:
        opened(mixed).load_state_dict(state)
    assert "the lock in the checkpoint" in str(told.value)
    gc.collect()
    opened(mixed, accept_changed=True).load_state_dict(state)
    assert "the lock in the checkpoint" in caplog.text


def test_what_is_no_state_of_a_loader_is_one_sentence(tmp_path: Path) -> None:
    """A whole checkpoint, in which the loader's state is one part; one of another field; a lock that is no text."""
    loader = opened({"a": publish(tmp_path / "a", range(10, 60))})
    state = loader.state_dict()
    for given, word in (
        ({"model": {}, "loader": state}, "epoch"),
        (state | {"sample_in_epoch": "8"}, "sample_in_epoch"),
        (state | {"shuffle_seed": None}, "shuffle_seed"),
    ):
        with pytest.raises(
            RecipeError, match=f"no state of a loader: {word} is .*state_dict\\(\\)"
        ):
            loader.load_state_dict(given)
    with pytest.raises(RecipeError, match="is no lock of a mix"):
        loader.load_state_dict(state | {KEY: 5})
    loader.load_state_dict(state)


def test_more_streams_than_a_state_of_streaming_has_room_for(tmp_path: Path) -> None:
    mixed = {f"s{n}": publish(tmp_path / f"s{n}", range(10 * n, 10 * n + 10)) for n in range(1, 51)}
    seen, state = stopped(mixed)
    assert len(state[KEY]) > 4096
    resumed = opened(mixed)
    resumed.load_state_dict(state)
    assert seen + rows(resumed) == Counter(range(10, 510))


def test_counting_as_composer_does_gives_the_same_state(tmp_path: Path) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110))}
    for settings in ({}, {"packing_ratio": 1.5, "max_seq_len": 16}):
        loader = opened(mixed, **settings)
        trained = sum(len(batch["input_ids"]) for batch in islice(loader, STEPS - 3))
        state = loader.state_dict()
        assert loader.dataset.state_dict(trained, True) == state
        loader.dataset.replication = 2
        assert loader.dataset.state_dict(2 * trained, True) == state, "two devices share each row"
        del loader
        gc.collect()


def test_an_epoch_that_composer_has_ended_is_not_begun_again(tmp_path: Path) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110))}
    loader = opened(mixed)
    assert loader.dataset.state_dict(0, True)["epoch"] == -1, "nothing was read"
    first, second = ([batch["input_ids"][0, 0].item() for batch in loader] for _ in range(2))
    assert first != second
    del loader
    gc.collect()
    loader = opened(mixed)
    assert [batch["input_ids"][0, 0].item() for batch in loader] == first
    state = loader.dataset.state_dict(0, True)
    del loader
    gc.collect()
    resumed = opened(mixed)
    resumed.load_state_dict(state)
    assert resumed.dataset.state_dict(0, True) == state, "saved again before a row is read"
    assert [batch["input_ids"][0, 0].item() for batch in resumed] == second


def test_a_run_goes_on_with_the_version_that_its_yaml_names(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    texts = [{"text": f"{n} one two three four five six"} for n in range(60)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    settings = {"publish": "versioned", "max_seq_len": 8, "train_loader": {"num_workers": 0}}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"a": documents(source)}, **settings)
    for command in (("convert", recipe), ("render-yaml", recipe, "-o", tmp_path / "train.yaml")):
        assert mdsmix(*command).code == 0
    loader = build_loader(str(tmp_path / "train.yaml"), BATCH)
    whole = [batch["input_ids"].tolist() for batch in loader]
    del loader
    gc.collect()
    loader = build_loader(str(tmp_path / "train.yaml"), BATCH)
    before = [batch["input_ids"].tolist() for batch in islice(loader, 3)]
    state = json.loads(json.dumps(loader.state_dict()))
    del loader
    gc.collect()
    write_jsonl(source, [{"text": "another one, longer than all of the others were"}, *texts])
    assert mdsmix("convert", recipe).code == 0
    resumed = build_loader(str(tmp_path / "train.yaml"), BATCH)
    resumed.load_state_dict(state)
    assert before + [batch["input_ids"].tolist() for batch in resumed] == whole
    del resumed
    gc.collect()
    assert mdsmix("render-yaml", recipe, "-o", tmp_path / "next.yaml").code == 0
    with pytest.raises(MixRefused, match="a was "):
        build_loader(str(tmp_path / "next.yaml"), BATCH).load_state_dict(state)


def test_the_batch_of_a_lock_is_that_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened({"a": publish(tmp_path / "a", range(24))}).dataset
    assert dataset.lock.settings["batch"] == BATCH
    monkeypatch.setattr(World, "detect", lambda: World(2, 2, 1, 0))
    del dataset.lock
    assert dataset.lock.settings["batch"] == 4 * BATCH
