"""What the epochs of LLM-Foundry's own loader hold of each stream of a rendered mix, counted in its batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llmfoundry.data.dataloader import build_dataloader
from llmfoundry.utils.builders import build_tokenizer
from omegaconf import OmegaConf
from streaming.base.batching import generate_work
from streaming.base.world import World

UNITS = ("tokens", "loss_tokens")


def epochs(path: str, seeds: list[int]) -> dict[str, list[dict[str, float]]]:
    """Unit -> of an epoch of each seed the share of every stream. Fails unless a pass over the loader of the YAML itself holds what
    the samples that Streaming lays out for it hold one by one."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    tokenizer = build_tokenizer(tree["tokenizer"]["name"], tree["tokenizer"]["kwargs"])
    names = list(tree["train_loader"]["dataset"]["streams"])
    loader = build_dataloader(tree["train_loader"], tokenizer, 16).dataloader
    data, held = loader.dataset, _of_samples(loader)
    passed = np.sum([_counted(batch).sum(0) for batch in loader], 0)
    starts = [*data.sample_offset_per_stream, data.num_samples]
    assert np.array_equal(held[_laid_out(data)].sum(0), passed), (
        held[_laid_out(data)].sum(0),
        passed,
    )
    found: dict[str, list[dict[str, float]]] = {unit: [] for unit in UNITS}
    for seed in seeds:
        data.shuffle_seed = seed
        ids = _laid_out(data)
        for unit, counts in zip(UNITS, held.T, strict=True):
            sums = np.histogram(ids, starts, weights=counts[ids])[0]
            found[unit].append(dict(zip(names, (sums / sums.sum()).tolist(), strict=True)))
    return found


def _laid_out(data: Any) -> np.ndarray[Any, Any]:
    ids = generate_work(data.batching_method, data, World(1, 1, 1, 0), 0, 0).ravel()
    return ids[ids >= 0]


def _of_samples(loader: Any) -> np.ndarray[Any, Any]:
    """int64 [samples, 2]: tokens and tokens with a loss of each sample, as the collator makes a row of it."""
    data = loader.dataset
    chunks = np.array_split(np.arange(data.num_samples), -(-data.num_samples // 64))
    return np.concatenate([_counted(loader.collate_fn([data[int(i)] for i in c])) for c in chunks])


def _counted(batch: dict[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    mask, labels = batch["attention_mask"], batch["labels"][:, 1:]
    return torch.stack([mask.sum(1), (labels != -100).sum(1)], 1).numpy().astype(np.int64)
