"""The batches of LLM-Foundry's own loaders, with the Streaming that it pins, are those of
`mdsmix.load` and those that a preview tells; and their keys and algorithms are those of the
allow-lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from mdsmix.foundry_yaml import loader_keys as keys
from mdsmix.mix.check import run_checks
from mdsmix.mix.streams.resolve import make_mix
from tests.converting import documents
from tests.foundry.conftest import Foundry, Lab
from tests.with_torch.load_streams import config, write_stream

MAX_SEQ_LEN, EOS = 32, 0
NO_PAD = {"pad_token": None}
LEFT = {"padding_side": "left"}


def write_streams(folder: Path) -> dict[str, dict[str, str]]:
    """160 rows of each shape: some too long (never by the whole last response), some ended
    by EOS.
    """
    rng, count = np.random.default_rng(7), range(160)
    first = {"input_ids": "ndarray:uint16:1", "labels": f"ndarray:uint16:{MAX_SEQ_LEN - 1}"}
    pair = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    chunks = [rng.integers(0, 400, MAX_SEQ_LEN).astype(np.uint16) for _ in count]

    def turn(*most: int) -> dict[str, list[int]]:
        ids, labels = (rng.integers(5, 400, rng.integers(1, n + 1)).tolist() for n in most)
        return {"input_ids": ids, "labels": [*labels, EOS] if rng.random() < 0.5 else labels}

    talks = [[turn(6, 5) for _ in range(rng.integers(1, 4))] for _ in count]
    written: dict[str, tuple[dict[str, str], list[dict[str, Any]]]] = {
        "text": ({"tokens": f"ndarray:uint16:{MAX_SEQ_LEN}"}, [{"tokens": c} for c in chunks]),
        "bytes": ({"tokens": "bytes"}, [{"tokens": np.int64(c).tobytes()} for c in chunks]),
        "lm": (first, [{"input_ids": c[:1], "labels": c[1:]} for c in chunks]),
        "pairs": (pair, [turn(24, 20) for _ in count]),
        "chats": ({"turns": "json"}, [{"turns": talk} for talk in talks]),
        "long": (pair, [turn(100, 100) for _ in count]),
    }
    for name, (columns, rows) in written.items():
        if columns is pair:
            rows = [{key: np.int32(ids) for key, ids in row.items()} for row in rows]
        write_stream(folder / name, columns, rows)
    return {name: {"local": str(folder / name)} for name in written}


def cases(places: dict[str, dict[str, str]], tokenizer: Path) -> Iterator[dict[str, Any]]:
    """Every policy, padding side, packing and pad rule of the finetuning loader; the text loader's
    own rules.
    """
    shared = {"drop_last": False, "num_workers": 0, "prefetch_factor": None, "shuffle": True}

    def case(used: str, loader: str = "finetuning", **more: Any) -> dict[str, Any]:
        attributes, length = more.pop("attributes", {}), more.pop("length", MAX_SEQ_LEN)
        made = config({n: places[n] for n in used.split()}, loader, **(shared | more))
        made["train_loader"] |= {"persistent_workers": False, "pin_memory": False}
        made["train_loader"]["dataset"]["max_seq_len"] = length
        asked = {"tokenizer": str(tokenizer), "attributes": attributes, "batch_size": 8}
        return asked | {"config": made}

    mix, two_sided = "lm pairs chats", {"decoder_only_format": False}
    for prompts, responses in product(("none", "all", "length>=5"), ("last", "all")):
        yield case(mix, target_prompts=prompts, target_responses=responses)
    yield case(mix, attributes=LEFT)
    yield case(mix, attributes=NO_PAD)
    yield case(mix, packing_ratio=1.7)
    yield case(mix, packing_ratio=2.5, attributes=LEFT, target_responses="all")
    yield case(mix, packing_ratio=3.0, max_leftover_bins_to_keep=2)
    yield case("long", packing_ratio="auto", length=200)
    yield case(mix, packing_ratio="auto")  # too short to pack
    yield case("chats", allow_pad_trimming=True)
    yield case("chats", allow_pad_trimming=True, attributes=LEFT)
    yield case("pairs chats", pad_to_longest=True)
    for attributes in ({}, LEFT):
        yield case("pairs chats", attributes=attributes, **two_sided)
    yield case("chats", allow_pad_trimming=True, **two_sided)
    yield case("pairs chats", pad_to_longest=True, **two_sided)
    yield case("text", "text")
    yield case("bytes", "text")
    for attributes in ({"pad_token": "<|endoftext|>"}, NO_PAD):
        yield case("text", "text", attributes=attributes)
    yield case("text", "text", eos_token_id=EOS)
    yield case(mix, num_workers=2, prefetch_factor=2, target_responses="all")


def test_batches_are_foundrys(foundry: Foundry, tokenizer_folder: Path, tmp_path: Path) -> None:
    for case in cases(write_streams(tmp_path), tokenizer_folder):
        assert foundry("loaders.compare", case=case) > 4, case


def test_pad_to_longest_does_not_cut_rows_of_an_encoder_decoder(
    foundry: Foundry, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """As the check `rows-uncut` says. Contexts have up to 28 tokens."""
    places = write_streams(tmp_path)
    widths = dict[str, int]()
    for key in ("pad_to_longest", "allow_pad_trimming"):
        made = config({"chats": places["chats"]}, decoder_only_format=False, num_workers=0)
        made["train_loader"]["dataset"] |= {"max_seq_len": 8, key: True}
        section = {"drop_last": False, "prefetch_factor": None, "persistent_workers": False}
        made["train_loader"] |= section | {"pin_memory": False}
        made["tokenizer"] = {"name": str(tokenizer_folder), "kwargs": {}}
        widths[key] = foundry("loaders.find_widest", config=made)
    assert widths["pad_to_longest"] > 16
    assert widths["allow_pad_trimming"] == 8


def test_a_preview_is_what_the_real_loader_draws(lab: Lab, foundry: Foundry) -> None:
    """By the Streaming that it pins. That counts and packed rows are the loader's:
    with_torch/test_preview.py.
    """
    texts = {"docs": documents(lab.corpus / "docs.jsonl")} | lab.demo("web")
    for name, workers, of in (("finetuning", 2, lab.demo()), ("text", 0, texts)):
        dataset = {"shuffle": True, "shuffle_seed": 17}
        loader = {"name": name, "num_workers": workers, "drop_last": True, "dataset": dataset}
        config = lab.rendered(name, streams=of, max_seq_len=128, train_loader=loader)
        told = foundry("drawn.previewed", path=str(config), steps=6)
        assert told["version"].startswith("0.12.")
        assert told["ours"] == told["theirs"]
        assert [*map(len, told["ours"])] == [6] * 6


NULLS = (
    *sorted(keys.NOT_NULL - keys.TARGET_KEYS),
    "num_canonical_nodes",
    "predownload",
    "epoch_size",
    "replication",
)
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "dataset": [
        *({key: None} for key in (*NULLS, "shuffle_block_size", "validate_hash", "split")),
        {"shuffle_seed": 1.0},
        {"shuffle_seed": 3},
        {"num_canonical_nodes": 2.0},
        {"sampling_granularity": 2.0},
        *({"num_canonical_nodes": 32, "shuffle_algo": name} for name in ("py1e", "py1s", "naive")),
        {"num_canonical_nodes": 32, "shuffle": False},
    ],
    "loader": [
        *({key: None} for key in ("pin_memory", "persistent_workers", "timeout", "drop_last")),
        {"timeout": 5},
        {"label": "held"},
    ],
    "stream": [*({key: 0} for key in ("proportion", "choose", "repeat")), {"repeat": 2}],
}
ONLY = {
    "text": [{"shuffle_block_size": 1e5}, {"mlm_probability": None}, {"mlm_probability": 0.15}],
    "finetuning": [
        *({key: None} for key in ("target_prompts", "target_responses", "hf_kwargs")),
        *({"packing_ratio": ratio} for ratio in (2.0, 1.2)),
    ],
}
"Settings of one loader alone, under `dataset`."


def section_with(loader: str, place: dict[str, str], where: str, keys: Any) -> dict[str, Any]:
    section = config({"own": place | (keys if where == "stream" else {})}, loader)["train_loader"]
    section |= {"drop_last": True, "num_workers": 0, "prefetch_factor": None}
    section |= {"persistent_workers": False}
    section["dataset"] |= {"max_seq_len": MAX_SEQ_LEN, "shuffle": True}
    if where == "dataset":
        section["dataset"] |= keys
    if where == "loader":
        section |= keys
    return section


@pytest.mark.parametrize("loader", ["text", "finetuning"])
def test_what_check_passes_starts_and_what_it_refuses_does_not(
    loader: str, foundry: Foundry, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Each setting alone, over 20 samples in batches of 16: the real loader draws an epoch of it,
    or fails.
    """
    chunks = [
        {"tokens": np.arange(10 + n, 10 + n + MAX_SEQ_LEN, dtype=np.int32)} for n in range(20)
    ]
    turns = [{"turns": [{"input_ids": [5, 6], "labels": [7, 8 + n]}]} for n in range(20)]
    columns = {"text": {"tokens": "ndarray:int32"}, "finetuning": {"turns": "json"}}[loader]
    write_stream(tmp_path / "own", columns, chunks if loader == "text" else turns)
    place = {"local": str(tmp_path / "own")}
    settings = [(where, each) for where, every in SETTINGS.items() for each in every]
    settings += [("dataset", each) for each in ONLY[loader]]
    sections = [section_with(loader, place, *setting) for setting in settings]
    errors = foundry(
        "loaders.first_error", tokenizer=str(tokenizer_folder), sections=sections, size=16
    )
    for setting, section, error in zip(settings, sections, errors, strict=True):
        tree = {"max_seq_len": MAX_SEQ_LEN, "global_train_batch_size": 16, "train_loader": section}
        tree["tokenizer"] = {"name": str(tokenizer_folder)}
        refused = [
            each for each in run_checks(make_mix(tree, "train.yaml")) if each.severity == "error"
        ]
        assert bool(refused) == bool(error), (setting, error, [each.id for each in refused])


PASSED_BY_BUILDERS = {"tokenizer", "device_batch_size", "kwargs", "batch_size"}
OF_HUGGING_FACE = {"hf_name", "preprocessing_fn", "safe_load", "allowed_dataset_keys"}


def test_keys_and_algorithms_are_those_that_the_loaders_read(foundry: Foundry) -> None:
    real = foundry("drawn.signatures")
    for loader in ("text", "finetuning"):
        read = set(real["dataset"][loader]) - PASSED_BY_BUILDERS - OF_HUGGING_FACE
        assert read == set(keys.DATASETS[loader])
        takes = set(real["loader"][loader]) - PASSED_BY_BUILDERS
        assert takes | {"name"} == keys.LOADER_KEYS.keys()
        needs = set(real["needs"][loader]) - PASSED_BY_BUILDERS
        assert needs == set(keys.LOADER_NEEDS[loader])
    assert set(real["stream"]) == keys.STREAM_KEYS.keys()
    for key in ("shuffle_algo", "partition_algo"):
        assert real[key] == sorted(get_args(keys.DATASET_KEYS[key]))


LEARNED = ("none", "last"), ("all", "last"), ("none", "all"), ("length>=1", "last")


@pytest.mark.parametrize("layout", ["concat", "document"])
def test_documents_in_the_finetuning_loader(layout: str, lab: Lab, foundry: Foundry) -> None:
    """A model learns from them what it learns from the same records in the text loader, under every
    policy.
    """
    only = {"only": documents(lab.corpus / "docs.jsonl", layout=layout)}

    def losses(name: str, *settings: str) -> Any:
        loader = {"name": name, "num_workers": 0, "dataset": {"shuffle": False}}
        config = lab.rendered(name, streams=only, max_seq_len=64, train_loader=loader)
        return foundry("train.losses", path=str(config), steps=6, settings=settings)

    wanted = losses("text")
    assert len(wanted) == 6
    for prompts, responses in LEARNED:
        asked = f"target_prompts={prompts}", f"target_responses={responses}"
        found = losses("finetuning", *(f"train_loader.dataset.{each}" for each in asked))
        assert found == pytest.approx(wanted, abs=1e-5, rel=0), asked
