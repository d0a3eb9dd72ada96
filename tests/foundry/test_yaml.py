"""The allow-lists are those of the real LLM-Foundry, and its own loader draws batches from what is rendered."""

import json
from pathlib import Path
from typing import get_args

from mdsmix.training import loader_keys as keys
from tests.converting import documents, mdsmix, write_jsonl
from tests.converting import write_recipe as write_converted
from tests.forked import Standing
from tests.foundry.conftest import Foundry
from tests.foundry.steps import MDSMIX
from tests.published import LENGTH, SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish

PASSED_BY_BUILDERS = {"tokenizer", "device_batch_size", "kwargs", "batch_size"}
OF_HUGGING_FACE = {"hf_name", "hf_kwargs", "preprocessing_fn", "safe_load", "allowed_dataset_keys"}


def test_keys_and_algorithms_are_those_that_the_loaders_read(foundry: Foundry) -> None:
    real = foundry("drawn.signatures")
    for loader in ("text", "finetuning"):
        read = set(real["dataset"][loader]) - PASSED_BY_BUILDERS - OF_HUGGING_FACE
        assert read == keys.dataset_keys(loader)
        takes = set(real["loader"][loader]) - PASSED_BY_BUILDERS
        assert takes | {"name"} == keys.LOADER_KEYS.keys()
        needs = set(real["needs"][loader]) - PASSED_BY_BUILDERS
        assert needs == set(keys.LOADER_NEEDS[loader])
    assert set(real["stream"]) == keys.STREAM_KEYS.keys()
    for key in ("shuffle_algo", "partition_algo"):
        assert real[key] == sorted(get_args(keys.DATASET_KEYS[key]))


def test_the_real_loader_draws_batches_from_the_rendered_yaml(
    foundry_programs: Standing, tokenizer_folder: Path, tmp_path: Path
) -> None:
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 30)
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 30)
    publish(tmp_path / "held", TURNS, [TURNS_ROW] * 1, split="val")
    recipe = {
        "tokenizer": str(tokenizer_folder),
        "max_seq_len": LENGTH,
        "streams": {
            "web": {"local": "web"},
            "chat": {"local": "chat"},
            "held": {"local": "held", "split": "val"},
        },
        "train_loader": {"num_workers": 0},
    }
    (tmp_path / "mix.yaml").write_text(json.dumps(recipe))
    out = tmp_path / "out.yaml"
    arguments = ["render-yaml", tmp_path / "mix.yaml", "-o", out, "--validate"]
    done = foundry_programs.start(MDSMIX, *arguments).wait()
    assert done.returncode == 0, done.stderr
    drawn = f"train_loader (2, {LENGTH}), (2, {LENGTH}); eval_loader held (1, {LENGTH})"
    assert drawn in done.stderr
    assert out.exists()


def test_the_real_loader_reads_a_mix_in_a_bucket_with_the_tokenizer_beside_it(
    foundry_programs: Standing, tokenizer_folder: Path, tmp_path: Path, minio: str, bucket: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"one two three {n} " * 9} for n in range(40)])
    recipe = write_converted(
        tmp_path,
        tokenizer_folder,
        remote=f"s3://{bucket}/mix",
        local=str(tmp_path / "node"),
        streams={"web": documents(tmp_path / "a.jsonl")},
        train_loader={"num_workers": 0},
    )
    assert mdsmix("convert", recipe).code == 0
    config = tmp_path / "train.yaml"
    theirs = {"streams": {"c4": {"local": "/nowhere/c4"}}, "max_seq_len": 16}
    entry = {"label": "c4", "name": "text", "dataset": theirs, "num_workers": 0, "drop_last": False}
    config.write_text(f"eval_loader:\n- {json.dumps(entry)}\n")
    arguments = ["render-yaml", recipe, "--into", config, "--keep-evals", "--validate"]
    done = foundry_programs.start(MDSMIX, *arguments).wait()
    assert done.returncode == 0, done.stderr
    assert "batches of input_ids: train_loader (2, 16), (2, 16)\n" in done.stderr
    assert "kept unseen: eval_loader c4\n" in done.stderr
    assert str(tokenizer_folder) not in config.read_text()
