"""What a preview says of a step is what the loader's batches of that step hold, packed or not."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdsmix.errors import MixRefused, RecipeError, Unreachable
from mdsmix.load import build_loader
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import IGNORED
from mdsmix.mix.draws import World as Machines
from mdsmix.mix.resolve import mix_of
from mdsmix.mix.streams import Mix
from mdsmix.preview.asked import Asked, EpochState
from mdsmix.preview.epoch_windows import Preview, sentences
from mdsmix.preview.first_steps import preview
from mdsmix.preview.shard_reader import ShardReader
from mdsmix.preview.step_rows import COUNTED, Step
from tests.published import CARD
from tests.with_torch.load_streams import IDS, PAIR, config, pair, rows_of, write_stream

Batch = dict[str, torch.Tensor]
LENGTH = 8
PACKED = {"input_ids": "ndarray:uint16", "starts": "ndarray:int32"}


def turns(i: int) -> dict[str, Any]:
    return {
        "turns": [
            {"input_ids": [5, 10 + i % 9], "labels": [6]},
            {"input_ids": [7] * (i % 5), "labels": [8, 9, 0][: 1 + i % 3]},
        ]
    }


def packed(i: int) -> dict[str, Any]:
    """One to three documents of two tokens."""
    starts = np.arange(0, 2 * (1 + i % 3), 2, dtype=np.int32)
    return {"input_ids": np.arange(30, 30 + 2 * len(starts), dtype=np.uint16), "starts": starts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one length, of documents between separators, pairs and conversations, some of which are cut, and packed rows."""
    root = tmp_path_factory.mktemp("streams")
    web = [{"tokens": row} for row in rows_of(60, LENGTH)]
    docs = [{"tokens": np.array([9, 0, 9, 9, 0, 9][: 2 + i % 5], np.uint16)} for i in range(70)]
    write_stream(root / "web", {"tokens": f"ndarray:uint16:{LENGTH}"}, web, shard_bytes=500)
    write_stream(
        root / "docs", {"tokens": "ndarray:uint16"}, docs, shard_bytes=500, compression="zstd"
    )
    write_stream(root / "faq", PAIR, map(pair, range(80)), shard_bytes=500)
    write_stream(root / "packed", PACKED, map(packed, range(40)), shard_bytes=500)
    write_stream(root / "chat", {"turns": "json"}, map(turns, range(50)), shard_bytes=900)
    return root


pytestmark = pytest.mark.usefixtures("_release_loaders")


def made(folder: Path, names: str = "web docs faq chat", **dataset: Any) -> dict[str, Any]:
    weights: Mapping[str, Any] = {"faq": {"repeat": 0.5}, "chat": {"repeat": 2}}
    streams = {n: {"local": str(folder / n), **weights.get(n, {})} for n in names.split()}
    return config(streams, **{"shuffle": True, **dataset})


def mix(settings: dict[str, Any]) -> Mix:
    return dataclasses.replace(mix_of(settings, "train.yaml"), tokenizer=CARD)


def looked(settings: dict[str, Any], batch: int, gpus: int = 1, **asked: Any) -> Preview:
    workers = settings["train_loader"].get("num_workers", 0)
    world = Machines(nodes=1, gpus=gpus, workers=workers, batch=batch)
    return preview(mix(settings), Asked(world=world, **asked))


def batches(settings: dict[str, Any], size: int, steps: int) -> list[Batch]:
    """The first of the loader itself."""
    return list(islice(build_loader(settings, size, ids=IDS), steps))


def held(batch: Batch) -> dict[str, int]:
    """The counts of a batch, of both sides of an encoder-decoder."""
    mask, labels = batch["attention_mask"], batch["labels"]
    found = {"rows": len(mask), "tokens": int(mask.sum()), "slots": mask.numel()}
    if "decoder_input_ids" not in batch:
        return found | {"trained": int((labels[:, 1:] != IGNORED).sum())}
    trained = int((labels != IGNORED).sum())
    more = {"tokens": found["tokens"] + trained, "slots": found["slots"] + labels.numel()}
    return found | more | {"trained": trained}


def said(step: Step) -> dict[str, int]:
    assert step.counts is not None
    counts = dict(zip(COUNTED, step.counts.sum(axis=0).tolist(), strict=True))
    return {"rows": step.rows, "slots": step.slots} | {k: counts[k] for k in ("tokens", "trained")}


CASES: list[dict[str, Any]] = [
    {},
    {"packing_ratio": 2.6, "max_leftover_bins_to_keep": 1, "drop_last": True, "num_workers": 2}
    | {"target_responses": "all", "target_prompts": "length>=2", "persistent_workers": False},
    {"packing_ratio": "auto", "max_seq_len": 300},
    {"allow_pad_trimming": True, "max_seq_len": 64},
    {"pad_to_longest": True, "max_seq_len": 64, "batching_method": "per_stream"},
    {"names": "faq chat", "decoder_only_format": False},
]


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_every_step_holds_what_the_loaders_batch_holds(folder: Path, keys: dict[str, Any]) -> None:
    settings = made(folder, **{"names": "web faq chat packed", "num_workers": 0, **keys})
    steps = 2 if keys.get("packing_ratio") == "auto" else 9
    found = looked(settings, 8, steps=steps)
    assert [said(step) for step in found.steps] == [held(b) for b in batches(settings, 8, steps)]
    assert len(found.steps) == min(steps, len(found.ids)) >= 2
    assert (found.ratio > 1) == ("packing_ratio" in keys)


def test_samples_are_those_of_the_batch_in_its_order_and_what_is_shown_is_their_rows(
    folder: Path,
) -> None:
    (batch,) = batches(made(folder), 8, 1)
    (step,) = looked(made(folder), 8, steps=1, samples=8).steps
    (rank,) = step.ranks
    assert len({row.place.stream for row in step.shown[:3]}) == 3, "streams differ first"
    rows = {row.place: row for row in step.shown}
    for at, place in enumerate(rank.places):
        length = int(batch["attention_mask"][at].sum())
        assert rows[place].input_ids.tolist() == batch["input_ids"][at, :length].tolist()
        assert rows[place].labels.tolist() == batch["labels"][at, :length].tolist()
    (step,) = looked(made(folder), 16, gpus=4, steps=1).steps
    assert [(rank.rank, len(rank.ids)) for rank in step.ranks] == [(n, 4) for n in range(4)]
    assert len({n for rank in step.ranks for n in rank.ids}) == step.rows == 16


def test_no_more_is_read_than_was_allowed_and_it_is_said(folder: Path) -> None:
    whole = looked(made(folder), 32, steps=2)
    most = whole.loaders.reader.read
    found, none = (looked(made(folder), 32, steps=2, read=read) for read in (most - 1, 0))
    assert [step.is_unread for step in found.steps] == [False, True]
    assert 0 == none.loaders.reader.read < found.loaders.reader.read < most
    assert found.steps[1].counts is found.steps[1].padding is None
    assert any("1 step from step 1 on were not read" in said for said in sentences(found))
    drawn = [[rank.ids for step in of.steps for rank in step.ranks] for of in (none, whole)]
    assert drawn[0] == drawn[1]
    # A step beyond the bound ends the reading: its rows would wait in the bins of later ones.
    reader = ShardReader(mix(made(folder, "web")).train.streams, 1100)
    assert reader.samples([SampleAt(0, 0, n) for n in range(3)])
    assert reader.samples([SampleAt(0, shard, 0) for shard in range(3)]) is None
    assert reader.samples([SampleAt(0, 0, 0)]) is None


def test_an_epoch_is_entered_at_a_step_or_another_epoch_or_seed(folder: Path) -> None:
    def steps(keys: dict[str, Any], **asked: Any) -> Sequence[Step]:
        return looked(made(folder, "web", **keys), 8, **asked).steps

    first = steps({}, steps=12)
    assert [step.step for step in first] == [*range(8)], "an epoch ends where it ends"
    epoch, state = (EpochState(epoch=n, sample_in_epoch=16 * (not n)) for n in (1, 0))
    later = steps({}, steps=2, state=epoch, from_step=2)
    assert [step.step for step in later] == [2, 3]
    same, at = steps({}, steps=1, from_step=2), steps({}, steps=1, state=state)
    assert same[0].ranks == at[0].ranks == first[2].ranks != later[0].ranks
    with pytest.raises(RecipeError, match="no step behind 80 of them"):
        steps({}, from_step=10)
    both, second = (steps({"packing_ratio": 2}, steps=2 - n, from_step=n) for n in (0, 1))
    assert second[0].ranks == both[1].ranks, "a step draws more samples than rows"
    seeded = steps({"shuffle_seed": 7}, steps=1)
    other = steps({"shuffle_seed": 5}, steps=1, seed=7)
    assert seeded[0].ranks == other[0].ranks != first[0].ranks


def test_text_that_the_loader_tokenizes_is_drawn_and_not_counted(folder: Path) -> None:
    write_stream(folder / "raw", {"text": "str"}, [{"text": "a b c"}] * 40)
    found = looked(made(folder, "web raw", name="text"), 10, steps=1)
    assert found.windows.unit == "samples"
    assert any(said.startswith("raw: the loader itself tokenizes") for said in sentences(found))
    assert found.steps[0].drawn == 10 > found.steps[0].rows
    (alone,) = looked(made(folder, "raw", name="text"), 10, steps=1).steps
    assert (alone.counts, alone.padding, alone.is_unread) == (None, None, False)


def test_what_cannot_be_shown_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    without = dataclasses.replace(mix(made(folder)), tokenizer=None)
    with pytest.raises(RecipeError, match="cannot be opened"):
        preview(without, Asked(world=Machines(batch=8)))
    long = {"input_ids": np.full(9, 5, np.uint16), "labels": np.full(2, 6, np.uint16)}
    write_stream(tmp_path / "long", PAIR, [long] * 9)
    named = r"Step 0, rank 0: stream long, shard shard.00000.mds, row \d: .*nothing left"
    with pytest.raises(MixRefused, match=named):
        looked(made(tmp_path, "long"), 4)
    next((tmp_path / "long").glob("*.mds")).unlink()
    with pytest.raises(Unreachable, match=r"long/shard.00000.mds"):
        looked(made(tmp_path, "long"), 4)
    with pytest.raises(RecipeError, match="fills no batch"):
        looked(made(folder, "web", drop_last=True), 90)
