"""Streams of every column layout in one loader, drawn by weight, stopped and resumed without losing or repeating a row."""

import gc
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mdsmix.errors import RecipeError
from mdsmix.load import TokenIds, build_loader, loader
from mdsmix.load.collate import Packer
from mdsmix.load.loader_settings import read_settings
from mdsmix.load.training_rows import RowRules, TrainingRow
from tests.alarm import at_most
from tests.with_torch.load_streams import EOS, IDS, PAD, config, write_stream, write_tokens

X = -100


pytestmark = pytest.mark.usefixtures("_release_loaders")


@pytest.fixture
def every_layout(tmp_path: Path) -> dict[str, dict[str, str]]:
    """One row of 8 tokens or fewer in each layout; the first token tells them apart."""
    pair = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    chunk = {"input_ids": "ndarray:uint16:1", "labels": "ndarray:uint16:7"}
    row = np.arange(10, 18, dtype=np.uint16)
    turns = [
        {"input_ids": [60, 61], "labels": [62]},
        {"input_ids": [63], "labels": [64, EOS]},
    ]
    written = {
        "fixed": ({"tokens": "ndarray:uint16:8"}, {"tokens": row}),
        "short": ({"tokens": "ndarray:int32"}, {"tokens": np.int32([20, 21, EOS])}),
        "bytes": ({"tokens": "bytes"}, {"tokens": np.int64([30, 31]).tobytes()}),
        "chunk": (chunk, {"input_ids": row[:1] + 30, "labels": row[1:] + 30}),
        "pair": (pair, {"input_ids": np.int32([50, 51]), "labels": np.int32([52])}),
        "chat": ({"turns": "json"}, {"turns": turns}),
    }
    for name, (columns, sample) in written.items():
        write_stream(tmp_path / name, columns, [sample])
    return {name: {"local": str(tmp_path / name)} for name in written}


def test_every_layout_mixes_in_one_loader(every_layout: dict[str, Any]) -> None:
    batches = list(build_loader(config(every_layout), 2, ids=IDS))
    for batch in batches:
        assert {(t.dtype, tuple(t.shape[1:])) for t in batch.values()} == {(torch.int64, (8,))}
    rows = {
        int(ids[0]): (ids.tolist(), labels.tolist(), int(mask.sum()))
        for batch in batches
        for ids, labels, mask in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        )
    }
    full = list(range(10, 18))
    assert rows == {
        10: (full, full, 8),
        20: ([20, 21, EOS, *[PAD] * 5], [20, 21, EOS, *[X] * 5], 3),
        30: ([30, 31, *[PAD] * 6], [30, 31, *[X] * 6], 2),
        40: (list(range(40, 48)), [X, *range(41, 48)], 8),
        50: ([50, 51, 52, EOS, *[PAD] * 4], [X, X, 52, EOS, *[X] * 4], 4),
        60: ([60, 61, 62, 63, 64, EOS, PAD, PAD], [X, X, X, X, 64, EOS, X, X], 6),
    }


def first_tokens(batches: Iterable[Any]) -> list[int]:
    return [t for batch in batches for t in batch["input_ids"][:, 0].tolist()]


def test_an_epoch_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    streams = {
        "a": {"local": str(write_tokens(tmp_path / "a", 30)), "repeat": 2},
        "b": {"local": str(write_tokens(tmp_path / "b", 20, length=7))},
    }
    settings = config(streams, "text", num_workers=2, shuffle=True)
    with at_most(60):
        whole = first_tokens(build_loader(settings, 4, ids=IDS))
        stopped = build_loader(settings, 4, ids=IDS)
        before = first_tokens(islice(stopped, 7))
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = build_loader(settings, 4, ids=IDS)
        resumed.load_state_dict(state)
        after, second = first_tokens(resumed), first_tokens(resumed)
    assert (state["sample_in_epoch"], len(before), len(whole)) == (28, 28, 80)
    assert before + after == whole
    assert len(second) == 80, "the next epoch starts at its beginning"
    assert second != whole, "in another order"


def test_a_packed_batch_counts_the_samples_that_it_drew(tmp_path: Path) -> None:
    rows = [{"input_ids": np.int32([10 + i]), "labels": np.int32([5, EOS])} for i in range(11)]
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    stream = {"local": str(write_stream(tmp_path / "a", columns, rows))}
    settings = config({"a": stream}, packing_ratio=2)
    loader = build_loader(settings, 2, ids=IDS)
    batch = next(iter(loader))
    assert batch["input_ids"].shape == (2, 8)
    assert batch["sequence_id"][0].tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    state = loader.state_dict()
    assert state["sample_in_epoch"] == 4
    resumed = build_loader(settings, 2, ids=IDS)
    resumed.load_state_dict(state)
    assert sorted(int(t) for b in resumed for t in b["input_ids"].flatten() if t >= 10) == list(
        range(14, 21)
    )
    for _ in zip(range(3), loader, strict=False):
        state = loader.state_dict()
    assert state["sample_in_epoch"] == 11, "the last one drew fewer"
    less = config({"a": stream}, packing_ratio=1.9)
    assert build_loader(less, 3, ids=IDS).batch_size == 5, "5.7, rounded down as in LLM-Foundry"


ROWS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("finetuning", {"target_prompts": "all"}, {"target_prompts": "all"}, {}),
    ("finetuning", {"target_responses": "all"}, {"target_responses": "all"}, {}),
    ("finetuning", {"decoder_only_format": False}, {"decoder_only_format": False}, {}),
    ("finetuning", {}, {"max_seq_len": 8}, {"with_sequence_id": True, "packer": None}),
    ("finetuning", {"pad_to_longest": True}, {}, {"pad_to_longest": True}),
    ("finetuning", {"allow_pad_trimming": True}, {}, {"allow_pad_trimming": True}),
    ("finetuning", {"packing_ratio": 2, "max_leftover_bins_to_keep": 0}, {}, {"packer": Packer(bins=2, max_seq_len=8, keep=0)}),
    ("text", {"token_encoding_type": "uint16"}, {"token_encoding_type": "uint16"}, {"with_sequence_id": False}),
    ("text", {"eos_token_id": 0}, {"separator": 0, "separator_starts": False}, {"with_sequence_id": True}),
    ("text", {"bos_token_id": 5}, {"separator": 5, "separator_starts": True}, {"with_sequence_id": True}),
]  # fmt: skip


def test_what_the_yaml_says_of_rows_reaches_them() -> None:
    for name, dataset, rows, batches in ROWS:
        settings = read_settings(config({"a": {"local": "a"}}, name, **dataset))
        rules = loader.rules_of(settings, TokenIds(eos=EOS, pad=PAD, bos=5))
        collate = loader.collate_of(settings, rules, 2 if "packing_ratio" in dataset else None)
        assert {key: getattr(rules, key) for key in rows} == rows
        assert {key: getattr(collate, key) for key in batches} == batches


def test_ranks_take_the_smallest_of_their_packing_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds one from rows of its own, and batches of different sizes would not fit together."""
    made = config({"a": {"local": str(tmp_path)}}, packing_ratio="auto") | {"max_seq_len": 200}
    row = TrainingRow(np.full(100, 9), np.full(100, 9))
    monkeypatch.setattr(loader, "_dataset", lambda *of: SimpleNamespace(end=lambda: None))
    monkeypatch.setattr(loader, "islice", lambda dataset, count: [row] * 1600)
    rules = RowRules(ids=IDS, max_seq_len=200)
    assert loader._packing_ratio(read_settings(made), rules, 8) == 2
    for name, answer in {
        "is_initialized": lambda: True,
        "get_world_size": lambda: 2,
        "all_gather_object": lambda every, mine: every.__setitem__(slice(None), [mine, 1.5]),
    }.items():
        monkeypatch.setattr(torch.distributed, name, answer)
    assert loader._packing_ratio(read_settings(made), rules, 8) == 1.5


def test_what_no_loader_can_be_built_of_is_one_sentence(tmp_path: Path) -> None:
    local = {"local": str(write_tokens(tmp_path, 4))}
    for stream, dataset, ids, why in (
        ({"repeat": 2}, {"epoch_size": 10}, IDS, "repeat or choose, which decide it too, stand at"),
        ({"repeat": "2"}, {}, IDS, "repeat of a is '2'"),
        ({"remote": "ftp://x"}, {}, IDS, "Streaming refuses it: Unsupported remote path"),
        ({}, {"batching_method": "any"}, IDS, "set it to random or stratified"),
        ({}, {"eos_token_id": 9}, IDS, "eos_token_id of train_loader is 9, and the tokenizer's is"),
        ({}, {"name": "finetuning"}, TokenIds(eos=None), "neither a padding nor an EOS token"),
    ):
        name = dataset.pop("name", "text")
        with pytest.raises(RecipeError, match=why):
            build_loader(config({"a": local | stream}, name, **dataset), 1, ids=ids)
    made = config({"a": local}, "text")
    for size in (2.5, 0, -1, "8", None):
        with pytest.raises(RecipeError, match=r"^batch_size is .*: it must be a whole number of"):
            build_loader(made, size, ids=IDS)  # type: ignore[arg-type]
    assert build_loader(made, np.int64(2), ids=IDS).batch_size == 2  # type: ignore[arg-type]


def test_an_epoch_that_fills_no_batch_is_refused(tmp_path: Path) -> None:
    """Streaming gives a pass without a batch and without a word; where the last batch may be short, it is one."""
    streams = {n: {"local": str(write_tokens(tmp_path / n, 30))} for n in "ab"}
    for dataset, size, is_refused in (
        ({}, 200, False),
        ({"drop_last": True}, 60, False),
        ({"drop_last": True}, 61, True),
        ({"batching_method": "stratified"}, 61, True),
        ({"packing_ratio": 2.0, "drop_last": True}, 31, True),
    ):
        name = "finetuning" if "packing_ratio" in dataset else "text"
        made = config(streams, name, **{"drop_last": False, **dataset})
        if is_refused:
            drawn = size * int(dataset.get("packing_ratio", 1))
            with pytest.raises(RecipeError, match=rf"60 samples, which fill no batch of {drawn}\b"):
                build_loader(made, size, ids=IDS)
        else:
            assert len(list(build_loader(made, size, ids=IDS))) == 1
        gc.collect()


def test_a_cache_folder_in_use_is_refused_until_its_loader_is_gone(tmp_path: Path) -> None:
    remote = write_tokens(tmp_path / "remote", 4)
    settings = config({"a": {"remote": str(remote), "local": f"{tmp_path}/local"}}, "text")
    first = build_loader(settings, 2, ids=IDS)
    with pytest.raises(RecipeError, match="is in use"):
        build_loader(settings, 2, ids=IDS)
    assert len(first_tokens(first)) == 4, "the loader that lives was left alone"
    del first
    gc.collect()
    assert len(first_tokens(build_loader(settings, 2, ids=IDS))) == 4
