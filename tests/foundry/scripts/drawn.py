"""What LLM-Foundry's own loaders draw of a training YAML: first batches beside those of a preview, and what epochs hold of each stream; and which
keys these loaders read."""

import gc
import inspect
import re
from itertools import islice
from typing import Any

import llmfoundry.data.utils
import numpy as np
import streaming
import torch
from llmfoundry.data.dataloader import build_dataloader
from llmfoundry.data.finetuning import dataloader as finetuning
from llmfoundry.data.finetuning.tasks import StreamingFinetuningDataset
from llmfoundry.data.text_data import StreamingTextDataset, build_text_dataloader
from llmfoundry.utils.builders import build_tokenizer
from omegaconf import OmegaConf
from streaming import Stream, StreamingDataset
from streaming.base import partition, shuffle
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.mix.draws import World as Machines
from mdsmix.mix.resolve import resolve
from mdsmix.preview.asked import Asked
from mdsmix.preview.first_steps import preview
from mdsmix.preview.step_rows import Step

UNITS = ("tokens", "loss_tokens")
LOADERS = {"text": build_text_dataloader, "finetuning": finetuning.build_finetuning_dataloader}


def loader_of(path: str, batch: int) -> tuple[dict[str, Any], Any]:
    """The train_loader of a YAML as a tree, and what Foundry builds of it."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    tokenizer = build_tokenizer(tree["tokenizer"]["name"], tree["tokenizer"]["kwargs"])
    return tree["train_loader"], build_dataloader(tree["train_loader"], tokenizer, batch).dataloader


def previewed(path: str, steps: int) -> dict[str, Any]:
    """Rows of both as lists of [step] of (tokens, trained positions, rows), and Streaming's version."""
    section, loader = loader_of(path, 6)
    theirs = [_held(batch) for batch in islice(loader, steps)]
    del loader
    gc.collect()
    cluster = Machines(nodes=1, gpus=1, workers=section["num_workers"], batch=6)
    found = preview(resolve([path]), Asked(world=cluster, steps=steps, samples=6)).steps
    return {"version": streaming.__version__, "theirs": theirs, "ours": [_said(s) for s in found]}


def _held(batch: Any) -> dict[str, Any]:
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    return {
        "tokens": int(ids.numel() if mask is None else mask.sum()),
        "slots": ids.numel(),
        "trained": int((batch["labels"][:, 1:] != -100).sum()),
        "rows": sorted(_row(row, None if mask is None else mask[i]) for i, row in enumerate(ids)),
    }


def _row(row: Any, mask: Any) -> list[int]:
    return (row if mask is None else row[mask.bool()]).tolist()


def _said(step: Step) -> dict[str, Any]:
    assert step.counts is not None
    _, tokens, trained = step.counts.sum(axis=0).tolist()
    return {
        "tokens": tokens,
        "slots": step.slots,
        "trained": trained,
        "rows": sorted(row.input_ids.tolist() for row in step.shown),
    }


def epochs(path: str, seeds: list[int]) -> dict[str, list[dict[str, float]]]:
    """Unit -> of an epoch of each seed the share of every stream. Fails unless a pass over the loader of the YAML itself holds what
    the samples that Streaming lays out for it hold one by one."""
    section, loader = loader_of(path, 16)
    names = list(section["dataset"]["streams"])
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


def signatures() -> dict[str, Any]:
    """The keys that Foundry's loaders read, from their own signatures and source."""
    besides = re.findall(
        r"dataset_cfg\.(?:get|pop)\(\s*'(\w+)'", inspect.getsource(llmfoundry.data.utils)
    )
    return {
        "loader": {name: _keys(build) for name, build in LOADERS.items()},
        "dataset": {
            "text": _keys(StreamingTextDataset, StreamingDataset) + besides,
            "finetuning": _keys(StreamingFinetuningDataset, finetuning._validate_config)
            + sorted(finetuning._ALLOWED_DATASET_KEYS),
        },
        "stream": _keys(Stream),
        "shuffle_algo": sorted(shuffle.algos),
        "partition_algo": sorted(partition.algos),
        "needs": {
            name: [
                key
                for key, parameter in inspect.signature(build).parameters.items()
                if parameter.default is inspect.Parameter.empty
            ]
            for name, build in LOADERS.items()
        },
    }


def _keys(*readers: object) -> list[str]:
    return sorted({name for reader in readers for name in inspect.signature(reader).parameters})
