"""The allow-lists of keys and algorithms are those of the real LLM-Foundry."""

from typing import get_args

from mdsmix.training import loader_keys as keys
from tests.foundry.conftest import Foundry

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
