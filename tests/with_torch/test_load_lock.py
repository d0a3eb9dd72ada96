"""A state goes on with the data that it was counted on; on other data it is refused, or what comes twice is counted rightly."""

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.world import World

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load import MixLoader, build_loader
from mdsmix.load.lock import KEY, lock_of
from mdsmix.load.resuming import Epoch, repeats, repeats_after
from mdsmix.shards.index import read_index
from mdsmix.shards.sample import read_head
from mdsmix.storage import locate
from mdsmix.training.lock import LoaderLock, LockedStream
from tests.converting import documents, mdsmix, write_jsonl, write_recipe
from tests.with_torch.load_streams import IDS, config, write_stream

BATCH, STEPS = 8, 9
PLAIN: dict[str, Any] = {
    "shuffle": True,
    "shuffle_block_size": 50,
    "drop_last": False,
    "num_workers": 0,
}


@pytest.fixture(autouse=True)
def _release_loaders() -> Iterator[None]:
    yield
    gc.collect()


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
    shards = by_shard(web)
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
        MixRefused, match=r"web was published anew: of 4,000 samples \d+ are gone"
    ) as told:
        opened(mixed, shuffle_block_size=None).load_state_dict(locked)
    assert "accept_changed: true" in str(told.value)
    gc.collect()
    resumed = opened(mixed, shuffle_block_size=None, accept_changed=True)
    resumed.load_state_dict(locked)
    (words,) = re.findall(
        r"come of web (\d+) samples a second time and (\d+) not at all, and beside", caplog.text
    )
    known = set().union(*(rows for shard, rows in by_shard(web).items() if shard in shards))
    assert words == (str(len(seen & after & known)), str(len(known - seen - after)))
    assert int(words[0]) > 200
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


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a row more": (
        {"a": [*range(10, 60), 150, *range(60, 110)]},
        "a was published anew: of 100 samples",
    ),
    "a row at the end": ({"a": range(10, 111)}, "a was published anew"),
    "shards in another order": (
        {"a": [*range(22, 34), *range(10, 22), *range(34, 110)]},
        "a was published anew",
    ),
    "a weight": ({"repeat": 2}, "b was to give 40 samples an epoch and gives 80"),
    "a smaller weight": ({"repeat": 0.5}, "b was to give 40 samples an epoch and gives 20"),
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
        "b is not in the mix any more, of which an epoch drew 40 samples",
    ),
    "a stream more": ({"with": "c"}, "c is new in the mix, and an epoch draws 30 samples of it"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_told_and_what_comes_twice_is_counted(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, sentence = dict(CHANGES[name][0]), CHANGES[name][1]
    mixed = {
        "a": publish(tmp_path / "a", range(10, 110)),
        "b": publish(tmp_path / "b", range(200, 240)),
    }
    seen, state = stopped(mixed)
    shards = by_shard(tmp_path / "a")
    if "a" in change:
        publish(tmp_path / "a", change.pop("a"))
    if change.pop("with", None):
        mixed["c"] = publish(tmp_path / "c", range(300, 330))
    mixed.pop(change.pop("without", ""), None)
    if repeat := change.pop("repeat", None):
        mixed["b"] |= {"repeat": repeat}
    with pytest.raises(MixRefused, match=sentence):
        opened(mixed, **change).load_state_dict(state)
    gc.collect()

    resumed = opened(mixed, **change, accept_changed=True)
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state)
    assert sentence in caplog.text
    if name == "packing":
        return  # rows that wait in bins when the epoch ends are not delivered
    rest = rows(resumed)
    del resumed
    gc.collect()
    planned = rows(opened(mixed, **change | {"drop_last": False}))
    known = {
        row for row in planned if row in unmoved(shards, by_shard(tmp_path / "a")) or row >= 200
    }
    expected = []
    for stream, span in {"a": range(10, 200), "b": range(200, 300), "c": range(300, 400)}.items():
        own = known & set(span)
        twice = sum(min(rest[r], max(0, seen[r] + rest[r] - planned[r])) for r in own)
        never = sum(max(0, planned[r] - seen[r] - rest[r]) for r in own)
        if (twice or never) and stream in mixed:
            expected.append(
                f"of {stream} {twice} sample{'' if twice == 1 else 's'} a second time and {never} not at all"
            )
    if "anew" in sentence and len(known) < len(planned):
        replacing = sum(n for row, n in rest.items() if row not in known)
        replaced = sum(n for row, n in seen.items() if row < 200 and row not in known)
        assert (
            f"{replacing} out of shards that replace others, of which {replaced} had been seen"
            in caplog.text
        )
    assert expected or "no sample comes a second time" in caplog.text
    for words in expected:
        assert words in caplog.text


def by_shard(folder: Path) -> dict[str, list[int]]:
    """Hash of a shard -> the rows in it."""
    place = locate(str(folder))
    return {
        shard.raw_data.hashes["xxh64"]: [
            int(s["tokens"][0]) for s in read_head(place, shard, shard.samples)
        ]
        for shard in read_index(place).shards
    }


def unmoved(before: dict[str, list[int]], now: dict[str, list[int]]) -> set[int]:
    """Rows in shards that were there before."""
    return {row for shard, held in now.items() if shard in before for row in held}


def test_a_shard_without_hashes_is_known_by_its_name_and_size(tmp_path: Path) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110), hashes=())}
    _, state = stopped(mixed)
    publish(tmp_path / "a", range(10, 111), hashes=())
    with pytest.raises(MixRefused, match="a was published anew"):
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
        ('{"version": 2}', "is a lock of version 2, and this mdsmix reads version 1"),
        ("{", "is no lock of a mix: it is no JSON|is no lock of a mix: "),
        (
            '{"version": 1, "streams": [{"name": "a", "drawn": 1, "shards": "x"}]}',
            "shards of a is no list",
        ),
        ("[]", "is no lock of a mix"),
        ('{"version": "1", "streams": []}', "version is '1'"),
    ],
)
def test_a_lock_that_cannot_be_read_is_one_sentence(
    text: str, sentence: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110))}
    _, state = stopped(mixed)
    state[KEY] = text
    with pytest.raises(RecipeError, match=sentence) as told:
        opened(mixed).load_state_dict(state)
    assert "the lock in the checkpoint" in str(told.value)
    gc.collect()
    opened(mixed, accept_changed=True).load_state_dict(state)
    assert "cannot be said" in caplog.text


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


def test_more_shards_than_a_state_of_streaming_has_room_for(tmp_path: Path) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 1010), shard_bytes=330)}
    seen, state = stopped(mixed)
    assert len(state[KEY]) > 4096
    resumed = opened(mixed)
    resumed.load_state_dict(state)
    assert seen + rows(resumed) == Counter(range(10, 1010))


def test_counting_as_composer_does_gives_the_same_state(tmp_path: Path) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110))}
    for settings in ({}, {"packing_ratio": 1.5, "max_seq_len": 16}):
        loader = opened(mixed, **settings)
        trained = sum(len(batch["input_ids"]) for batch in islice(loader, STEPS - 3))
        assert loader.dataset.state_dict(trained, True) == loader.state_dict()
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


def test_an_epoch_that_cannot_be_laid_out_is_gone_on_with_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = {"a": publish(tmp_path / "a", range(10, 110))}
    seen, state = stopped(mixed)
    locked = json.loads(state[KEY])
    locked["streams"][0] |= {"shards": "0123456789ab*9999999999"}
    state[KEY] = json.dumps(locked)
    resumed = opened(mixed, accept_changed=True)
    resumed.load_state_dict(state)
    assert "The epoch cannot be laid out here for a count" in caplog.text
    assert seen + rows(resumed) == Counter(range(10, 110))


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
    with pytest.raises(MixRefused, match="a was published anew"):
        build_loader(str(tmp_path / "next.yaml"), BATCH).load_state_dict(state)


def test_shards_of_one_content_are_as_many_as_there_are() -> None:
    twin = LockedStream(name="a", drawn=24, shards="0123456789ab*12 0123456789ab*12")
    settings = {"shuffle": True, "batch": 4}
    state = {"epoch": 0, "sample_in_epoch": 12, "num_canonical_nodes": 1, "shuffle_seed": 3}
    was, now = (LoaderLock(streams=[twin], settings=settings | {"batch": n}) for n in (4, 2))
    assert repeats(was, now, state) == []
    other = LoaderLock(streams=[twin], settings=settings | {"shuffle": False})
    (found,) = repeats(was, other, state) or []
    assert found.twice == found.never > 0
    assert repeats_after(was, now, None) == [
        "resumed after 12 samples of an epoch of 24 (on one node), nothing comes twice and nothing is left out"
    ]


def test_what_was_seen_is_of_the_epoch_that_was_left() -> None:
    """Each has an order of its own."""
    settings = {"shuffle": True, "batch": 4}
    was, now = (
        LoaderLock(
            streams=[LockedStream(name="a", drawn=24, shards=f"0123456789ab*12 {other * 12}*12")],
            settings=settings,
        )
        for other in "12"
    )
    found = []
    for epoch in range(5):
        state = {"epoch": epoch, "sample_in_epoch": 11, "num_canonical_nodes": 1, "shuffle_seed": 3}
        seen = Epoch(was, state).drawn(epoch, 0)[:11]
        found.append([r.replaced for r in repeats(was, now, state) or []])
        assert found[-1] == [int((seen >= 12).sum())]
    assert len({tuple(each) for each in found}) > 1


def test_an_epoch_is_laid_out_by_the_seed_and_the_nodes_of_the_state() -> None:
    """Whatever the settings say; and over any number of nodes that share a global batch it is one order."""
    twin = [LockedStream(name="a", drawn=24, shards="0123456789ab*12 1123456789ab*12")]
    state = {"epoch": 0, "sample_in_epoch": 0, "num_canonical_nodes": 2, "shuffle_seed": 3}

    def drawn(nodes: int = 1, seed: int = 3, **settings: Any) -> list[list[int]]:
        lock = LoaderLock(streams=twin, settings={"shuffle": True, "batch": 4} | settings)
        known = state | {"initial_physical_nodes": nodes, "shuffle_seed": seed}
        return np.sort(Epoch(lock, known).drawn(0, 0).reshape(-1, 4)).tolist()  # type: ignore[no-any-return]

    assert drawn() == drawn(2) == drawn(shuffle_seed=4, num_canonical_nodes=1) != drawn(seed=4)


def test_what_was_seen_more_often_than_it_is_drawn_now_comes_twice_only_where_it_comes() -> None:
    was, now = (
        LoaderLock(
            streams=[LockedStream(name="a", drawn=drawn, shards="0123456789ab*12")],
            settings={"shuffle": True, "batch": 4},
        )
        for drawn in (36, 12)
    )
    state = {"epoch": 0, "sample_in_epoch": 8, "num_canonical_nodes": 1, "shuffle_seed": 3}
    seen = Counter(Epoch(was, state).drawn(0, 0)[:8].tolist())
    rest = Counter(Epoch(now, state).drawn(0, 8).tolist())
    assert any(n > 1 for n in seen.values()), "more often than once"
    (found,) = repeats(was, now, state) or []
    assert found.twice == sum(n for row, n in rest.items() if seen[row])
    assert found.never == 12 - len(seen.keys() | rest.keys())


def test_the_batch_of_a_lock_is_that_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened({"a": publish(tmp_path / "a", range(24))}).dataset
    assert lock_of(dataset).settings["batch"] == BATCH
    monkeypatch.setattr(World, "detect", lambda: World(2, 2, 1, 0))
    assert lock_of(dataset).settings["batch"] == 4 * BATCH
