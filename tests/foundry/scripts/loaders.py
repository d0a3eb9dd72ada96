"""Batches of LLM-Foundry's own data loaders, and of mdsmix.load, over streams on this disk."""

from __future__ import annotations

import copy
from typing import Any

import torch
from llmfoundry.data.dataloader import build_dataloader
from llmfoundry.utils.builders import build_tokenizer
from streaming.base.util import clean_stale_shared_memory
from transformers import AutoTokenizer

from mdsmix.load import TokenIds, build_loader

Batch = dict[str, torch.Tensor]
# Only the text loader of mdsmix adds the mask; only LLM-Foundry counts the tokens in the batch.
ADDED = {"attention_mask"}
COUNTS = {"total_tokens", "loss_generating_tokens"}
BATCH_SIZE = 8


def config(tokenizer: str, folder: str, name: str, dataset: dict[str, Any]) -> dict[str, Any]:
    """One stream in the order in which it lies, every row of it."""
    streams = {"only": {"local": folder}}
    section: dict[str, Any] = {"drop_last": False, "num_workers": 0, "prefetch_factor": None}
    section |= {"persistent_workers": False, "pin_memory": False, "name": name}
    section["dataset"] = {"streams": streams, "shuffle": False, **dataset}
    words = {"name": tokenizer, "kwargs": {"model_max_length": dataset["max_seq_len"]}}
    return {"tokenizer": words, "train_loader": section}


def batches(tree: dict[str, Any]) -> list[Batch]:
    """Those of LLM-Foundry."""
    tree = copy.deepcopy(tree)
    tokenizer = build_tokenizer(tree["tokenizer"]["name"], tree["tokenizer"]["kwargs"])
    return list(build_dataloader(tree["train_loader"], tokenizer, BATCH_SIZE).dataloader)


def same(tokenizer: str, theirs: str, ours: str, name: str, dataset: Any) -> dict[str, int]:
    """Fails unless Foundry's loader gives the same for its own stream and ours, and mdsmix.load for
    ours; counts what was compared.
    """
    trees = [config(tokenizer, folder, name, dataset) for folder in (theirs, ours)]
    left, right = map(batches, trees)
    _same(left, right, set())
    _same(left, list(build_loader(trees[1], BATCH_SIZE)), ADDED if name == "text" else set())
    trained = sum(int((batch["labels"] != -100).sum()) for batch in left)
    return {"rows": sum(len(batch["input_ids"]) for batch in left), "trained": trained}


def compare(case: dict[str, Any]) -> int:
    """Fails unless mdsmix.load gives the batches of LLM-Foundry for a config, a tokenizer folder,
    its attributes and a batch size; gives how many those are.
    """
    tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
    for name, value in case["attributes"].items():
        setattr(tokenizer, name, value)
    loader, size = copy.deepcopy(case["config"]["train_loader"]), case["batch_size"]
    left = list(build_dataloader(loader, tokenizer, size).dataloader)
    known = {name: getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad", "bos")}
    ids = TokenIds(**known, padding_side=tokenizer.padding_side)
    right = list(build_loader(case["config"], size, ids=ids))
    _same(left, right, ADDED if case["config"]["train_loader"]["name"] == "text" else set())
    return len(left)


def find_widest(config: dict[str, Any]) -> int:
    """Return the tokens of the longest padded row, of an encoder or a decoder, that LLM-Foundry's
    loader gives.
    """
    return max(batch[key].shape[1] for batch in batches(config) for key in ("input_ids", "labels"))


def _same(left: list[Batch], right: list[Batch], added: set[str]) -> None:
    assert len(left) == len(right), (len(left), len(right))
    for n, (one, other) in enumerate(zip(left, right, strict=True)):
        keys = set(one) - COUNTS
        assert keys == set(other) - COUNTS - added, (keys, set(other))
        for key in keys:
            assert torch.equal(one[key], other[key]), (n, key, one[key], other[key])


def first_error(tokenizer: str, sections: list[dict[str, Any]], size: int) -> list[str]:
    """Build each section's loader and draw an epoch; return the name of the error it ends in.

    An epoch without a batch counts as the error "NoBatch", and one that gives batches as "".
    """
    opened = AutoTokenizer.from_pretrained(tokenizer)
    errors = list[str]()
    for section in sections:
        clean_stale_shared_memory()
        try:
            batches = list(build_dataloader(copy.deepcopy(section), opened, size).dataloader)
            errors.append("" if batches else "NoBatch")
        except (Exception, AssertionError) as error:
            errors.append(type(error).__name__)
    return errors
